// SPDX-License-Identifier: Apache-2.0
// Memory of an optimizer's moments, on the device or in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "fsdp/algorithm.hpp"
#include "fsdp/engine/offload_hooks.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/optimizer_layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// `count` values for each element of a layout. If the engine offloads moments, they lie in host memory, and the device
/// has two slots of the size of the largest unit's: see [Note: Offloading].
/// @tparam T  of a moment
template <class E, class T>
class Moments {
 public:
  /// All moments are zero, once compute has run dry.
  /// @note Stream: zeroed on compute
  [[gnu::cold]] Moments(E& engine, OptimizerLayout const& layout, int count)
      : count_(count), elements_(layout.elements()), starts_(layout.units() + 1) {
    for (std::size_t u = 0; u < layout.units(); ++u) starts_[u + 1] = layout.offset(u + 1);
    auto const& core = engine.shards().core();
    auto const each = count_ * static_cast<std::int64_t>(sizeof(T));
    bool const offloads = core.declared.offload.moments && elements_ * each > 0;
    std::int64_t largest = 0;
    for (std::size_t u = 0; u < layout.units(); ++u) largest = std::max(largest, size(u));
    auto const bytes = static_cast<std::size_t>(each * (offloads ? 2 * largest : elements_));
    device_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    if (offloads) {
      FixedArray<std::int64_t> starts(starts_.size());
      for (std::size_t u = 0; u < starts.size(); ++u) starts[u] = each * starts_[u];
      host_ = core.offload->make_moments(std::move(starts), device_.data(), each * largest);
    }
    // Last: nothing may throw while compute writes memory that the destructor would have waited for.
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    if (!offloads && bytes > 0) engine.device().zero_async(engine.compute(), device_.data(), bytes);
  }
  Moments(Moments&&) noexcept = default;
  /// @pre released
  Moments& operator=(Moments&&) noexcept = default;
  /// @pre kernels that use the moments have ended
  [[gnu::cold]] void release(E& engine) {
    engine.account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(device_.bytes()));
    if (host_ != nullptr) engine.shards().core().offload->free_moments(host_);
    host_ = nullptr;
  }

  /// Adds the optimizer to the step that has begun.
  void begin_step() {
    if (host_ != nullptr) host_->steps = true;
  }
  /// A unit's moment `which`, during its update.
  T* at(std::int64_t which, std::size_t unit) const {
    return host_ != nullptr ? reinterpret_cast<T*>(host_->staged[unit]) + which * size(unit) : home(which, unit);
  }
  /// A unit's moment `which` between steps; nullptr if there are none. @pre Shards::await_stores
  T* home(std::int64_t which, std::size_t unit) const {
    if (elements_ == 0 || count_ == 0) return nullptr;
    if (host_ != nullptr) return reinterpret_cast<T*>(host_->home(unit)) + which * size(unit);
    return device_.template as<T>() + which * elements_ + starts_[unit];
  }

 private:
  std::int64_t size(std::size_t unit) const { return starts_[unit + 1] - starts_[unit]; }

  int count_;
  std::int64_t elements_;                             ///< of one moment
  FixedArray<std::int64_t> starts_;                   ///< of each unit's elements; one more for the end
  AccountedMemory<typename E::Device const> device_;  ///< all moments, or two slots
  HostMoments* host_ = nullptr;                       ///< nullptr: they are in device memory
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
