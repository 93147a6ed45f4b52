// SPDX-License-Identifier: Apache-2.0
// EngineOptions::trap_stale_pointers: each unit's uses see copies of its buffers, at addresses that are inaccessible
// outside the unit's uses.
#pragma once

#include <cstddef>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// A device that can make memory inaccessible at a point of a stream.
template <class D>
concept GuardsMemory = requires(D const& device, typename D::Stream& stream, typename D::GuardedMemory const& memory) {
  typename D::GuardedMemory;
  device.open_async(stream, memory);
  device.close_async(stream, memory);
};

/// For devices that cannot protect memory: guards nothing.
template <class D, class Unit>
class GuardedUses {
 public:
  template <class Units>
  void prepare(Units const&) {}
  void begin(D const&, typename D::Stream&, Unit&) {}
  void end(D const&, typename D::Stream&, Unit const&, void*) {}
  void abandon(D const&, typename D::Stream&, Unit const&) noexcept {}
};

/// Copies of one engine's buffers. Everything is enqueued on compute. Without prepare(), nothing is guarded.
template <GuardsMemory D, class Unit>
class GuardedUses<D, Unit> {
 public:
  /// A pointer to a stack of slices (AdoptedTensor::slice) may miss its unit by the size of the stack, which is at most
  /// that of all units: so much is inaccessible around each copy.
  template <class Units>
  [[gnu::cold]] void prepare(Units const& units) {
    copies_ = FixedArray<Copies>(units.size());
    std::size_t parameters = 0, gradients = 0;  // bytes
    for (auto const& unit : units) parameters += param_bytes(*unit), gradients += gradient_bytes(*unit);
    for (auto const& unit : units)
      copies_[unit->index()] = {Memory(param_bytes(*unit), parameters), Memory(gradient_bytes(*unit), gradients)};
  }
  /// A use begins: the unit's `use` is replaced by copies.
  void begin(D const& device, typename D::Stream& stream, Unit& unit) {
    if (copies_.empty()) return;
    auto const& copies = copies_[unit.index()];
    auto& buffers = unit.use;
    copy(device, stream, copies.parameters, buffers.parameters, param_bytes(unit));
    buffers.parameters = copies.parameters.data();
    if (buffers.gradients == nullptr) return;
    copy(device, stream, copies.gradients, buffers.gradients, gradient_bytes(unit));
    buffers.gradients = copies.gradients.data();
  }
  /// The use ends. @param gradients  of the unit: get what the use has written
  void end(D const& device, typename D::Stream& stream, Unit const& unit, void* gradients) {
    if (copies_.empty()) return;
    if (unit.use.gradients != nullptr) device.copy_async(stream, gradients, unit.use.gradients, gradient_bytes(unit));
    close(device, stream, copies_[unit.index()]);
  }
  /// An exception has ended the use: its copies are lost.
  void abandon(D const& device, typename D::Stream& stream, Unit const& unit) noexcept {
    if (copies_.empty()) return;
    try {
      close(device, stream, copies_[unit.index()]);
    } catch (...) {  // the stream has failed, and says so in its next call
    }
  }

 private:
  using Memory = typename D::GuardedMemory;
  struct Copies {
    Memory parameters, gradients;
  };

  static std::size_t param_bytes(Unit const& unit) {
    return static_cast<std::size_t>(unit.full_numel()) * size_of(unit.types().parameter);
  }
  static std::size_t gradient_bytes(Unit const& unit) {
    return static_cast<std::size_t>(unit.full_numel()) * size_of(unit.types().gradient);
  }
  [[gnu::cold, gnu::noinline]] static void copy(D const& device, typename D::Stream& stream, Memory const& to,
                                                void const* from, std::size_t bytes) {
    device.open_async(stream, to);
    device.copy_async(stream, to.data(), from, bytes);
  }
  [[gnu::cold, gnu::noinline]] static void close(D const& device, typename D::Stream& stream, Copies const& copies) {
    device.close_async(stream, copies.parameters);
    device.close_async(stream, copies.gradients);
  }

  FixedArray<Copies> copies_;  ///< by unit
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
