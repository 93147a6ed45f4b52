// SPDX-License-Identifier: Apache-2.0
// Memory of an optimizer's moments: on the device, or in host memory with two units' at a time on the device.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/optimizer_layout.hpp"
#include "fsdp/staging.hpp"
#include "fsdp/stream_kind.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::detail {

/// `count` values for each element of a layout.
///
/// [Note: Offloaded moments] If they are offloaded, a unit's moments lie end to end in host memory. The device has two
/// slots of the size of the largest unit's. Before a unit is updated, the copy stream is told to fetch the next unit's
/// moments, so that they come while this unit is updated; after the update they are stored back. Three things are in
/// order: compute waits until a slot has been filled, copy waits until the slot has been updated, and the copies of one
/// slot follow one another on the copy stream.
///
/// @tparam T  of a moment
template <class E, class T>
class Moments {
 public:
  /// All moments are zero, once compute has run dry.
  /// @note Stream: zeroed on compute
  [[gnu::cold]] Moments(E& engine, OptimizerLayout const& layout, int count, bool offload)
      : count_(count), elements_(layout.elements()), starts_(layout.units() + 1) {
    for (std::size_t u = 0; u < layout.units(); ++u) starts_[u + 1] = layout.offset(u + 1);
    auto const bytes = static_cast<std::size_t>(elements_ * count_) * sizeof(T);
    auto device_bytes = bytes;
    if (offload && bytes > 0) {
      std::int64_t largest = 0;
      for (std::size_t u = 0; u < layout.units(); ++u) largest = std::max(largest, size(u));
      slot_elements_ = count_ * largest;
      device_bytes = 2 * static_cast<std::size_t>(slot_elements_) * sizeof(T);
      host_.emplace(engine, bytes);
      for (auto& slot : slots_) slot.emplace(engine.device());
    }
    device_ = {engine.device(), engine.account(), MemoryTag::optimizer, device_bytes};
    // Last: nothing may throw while compute writes memory that the destructor would have waited for.
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(device_bytes));
    if (!host_ && bytes > 0) engine.device().zero_async(engine.compute(), device_.data(), bytes);
  }
  Moments(Moments&&) noexcept = default;
  Moments& operator=(Moments&&) noexcept = default;
  /// @pre kernels that use the moments have ended
  [[gnu::cold]] void release(E& engine) {
    engine.account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(device_.bytes()));
  }

  /// A step begins. @note Stream: the first unit's moments are fetched on copy
  void begin_step(E& engine) {
    for (auto& slot : slots_)
      if (slot) slot->unit = none;
    next_slot_ = 0;
    if (host_) fetch(engine, next(0));
  }
  /// A unit's update begins: its moments are at at(). @note Stream: compute waits for them
  void begin_update(E& engine, std::size_t unit) {
    if (!host_ || size(unit) == 0) return;
    if (slot_of(unit).unit != unit) fetch(engine, unit);  // steps may leave out units: nobody has updated the others
    fetch(engine, next(unit + 1));
    auto& slot = slot_of(unit);
    engine.device().wait(engine.compute(), std::as_const(slot.fetched), WaitSite::offload_fetched);
  }
  /// Its kernels have been enqueued on compute. @note Stream: its moments are stored on copy
  void end_update(E& engine, std::size_t unit) {
    if (!host_ || size(unit) == 0) return;
    auto& slot = slot_of(unit);
    auto const shards = engine.shards();
    auto& copy = shards.copy_stream();
    engine.device().record(slot.updated, engine.compute());
    engine.device().wait(copy, std::as_const(slot.updated), WaitSite::offload_updated);
    move(engine, unit, "store", home(0, unit), on_device(slot));
  }
  /// A unit's moment `which`, in its update.
  T* at(std::int64_t which, std::size_t unit) {
    if (elements_ == 0) return nullptr;
    return host_ && size(unit) > 0 ? on_device(slot_of(unit)) + which * size(unit) : home(which, unit);
  }
  /// The same between steps; nullptr if there are none. @pre await_stores()
  T* home(std::int64_t which, std::size_t unit) const {
    if (elements_ == 0 || count_ == 0) return nullptr;
    if (host_) return host_->data.data() + count_ * starts_[unit] + which * size(unit);
    return device_.template as<T>() + which * elements_ + starts_[unit];
  }
  /// The calling thread waits until moments are stored.
  void await_stores(E& engine) const {
    if (host_) engine.device().synchronize(engine.shards().copy_stream());
  }

 private:
  using Device = std::remove_cvref_t<typename E::Device>;
  static constexpr std::size_t none = ~std::size_t{0};

  struct Slot {
    std::size_t unit = none;
    typename Device::Event fetched, updated;
    explicit Slot(Device const& device) : fetched(device.make_event()), updated(device.make_event()) {}
  };
  /// Zeroed host memory.
  struct Host {
    Staging<Device, T> data;
    MemoryAccount* account;
    std::int64_t bytes;
    [[gnu::cold]] Host(E& engine, std::size_t size)
        : data(engine.device(), size / sizeof(T)), account(&engine.account()), bytes(static_cast<std::int64_t>(size)) {
      std::memset(static_cast<void*>(data.data()), 0, size);
      account->reserve(MemoryTag::offloaded, bytes);
      account->lease(MemoryTag::offloaded, bytes);
    }
    Host(Host&& other) noexcept
        : data(std::move(other.data)), account(std::exchange(other.account, nullptr)), bytes(other.bytes) {}
    Host& operator=(Host&& other) noexcept {
      std::swap(data, other.data);
      std::swap(account, other.account);
      std::swap(bytes, other.bytes);
      return *this;
    }
    [[gnu::cold]] ~Host() {
      if (account == nullptr) return;
      account->reserve(MemoryTag::offloaded, -bytes);
      account->lease(MemoryTag::offloaded, -bytes);
    }
  };

  std::int64_t size(std::size_t unit) const { return starts_[unit + 1] - starts_[unit]; }
  /// The first unit from `unit` on that has moments on this rank.
  std::size_t next(std::size_t unit) const {
    while (unit + 1 < starts_.size() && size(unit) == 0) ++unit;
    return unit + 1 < starts_.size() ? unit : none;
  }
  Slot& slot_of(std::size_t unit) { return slots_[0]->unit == unit ? *slots_[0] : *slots_[1]; }
  T* on_device(Slot const& slot) const {
    return device_.template as<T>() + (&slot == &*slots_[0] ? 0 : slot_elements_);
  }
  void fetch(E& engine, std::size_t unit) {
    if (unit == none) return;
    auto& slot = *slots_[next_slot_];
    next_slot_ = 1 - next_slot_;
    slot.unit = unit;
    move(engine, unit, "fetch", on_device(slot), home(0, unit));
    engine.device().record(slot.fetched, engine.shards().copy_stream());
  }
  void move(E& engine, std::size_t unit, std::string_view what, T* to, T const* from) {
    auto const shards = engine.shards();
    auto const bytes = count_ * size(unit) * static_cast<std::int64_t>(sizeof(T));
    auto span =
        shards.trace().begin(shards.copy_stream(), StreamKind::copy, shards[unit].name(), what, "optimizer", bytes);
    engine.device().copy_async(shards.copy_stream(), to, from, static_cast<std::size_t>(bytes));
    span.end();
  }

  int count_;
  std::int64_t elements_;            ///< of one moment
  FixedArray<std::int64_t> starts_;  ///< of each unit's elements; one more than there are
  std::int64_t slot_elements_ = 0;
  AccountedMemory<typename E::Device const> device_;  ///< all moments, or two slots
  std::optional<Host> host_;
  std::array<std::optional<Slot>, 2> slots_;
  std::size_t next_slot_ = 0;
};

}  // namespace fsdp::detail
