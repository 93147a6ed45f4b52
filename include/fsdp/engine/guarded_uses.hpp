// SPDX-License-Identifier: Apache-2.0
// EngineOptions::trap_stale_pointers: each unit's uses see copies of its buffers, at addresses that are inaccessible
// outside the unit's uses.
#pragma once

#include <cstddef>

#include "fsdp/fixed_array.hpp"

namespace fsdp::detail {

/// A device that can make memory inaccessible, in the order of a stream.
template <class D>
concept GuardsMemory = requires(D const& device, typename D::Stream& stream, typename D::GuardedMemory const& memory) {
  typename D::GuardedMemory;
  device.open_async(stream, memory);
  device.close_async(stream, memory);
};

/// What a use may access: buffers of the unit, or copies of them.
template <class P>
struct UseBuffers {
  typename P::Param const* parameters = nullptr;  ///< (full_numel)
  typename P::Reduce* gradients = nullptr;        ///< (full_numel); nullptr in forward
};

/// For devices that cannot: nothing is guarded.
template <class D, class P, class Unit>
class GuardedUses {
 public:
  template <class Units>
  void prepare(Units const&) {}
  void begin(D const&, typename D::Stream&, Unit const&, UseBuffers<P>&) {}
  void end(D const&, typename D::Stream&, Unit const&, UseBuffers<P> const&) {}
  void abandon(D const&, typename D::Stream&, Unit const&) noexcept {}
};

/// One engine's copies. Everything is enqueued on compute. Without prepare(), nothing is guarded.
template <GuardsMemory D, class P, class Unit>
class GuardedUses<D, P, Unit> {
 public:
  /// A pointer to a stack of slices (AdoptedTensor::slice) may miss its unit by the size of the stack, which is at most
  /// that of all units: so much is inaccessible around each copy.
  template <class Units>
  [[gnu::cold]] void prepare(Units const& units) {
    copies_ = FixedArray<Copies>(units.size());
    std::size_t elements = 0;
    for (auto const& unit : units) elements += numel(*unit);
    for (auto const& unit : units)
      copies_[unit->index()] = {Memory(numel(*unit) * sizeof(Param), elements * sizeof(Param)),
                                Memory(numel(*unit) * sizeof(Reduce), elements * sizeof(Reduce))};
  }
  /// A use begins: `buffers` are replaced by copies.
  void begin(D const& device, typename D::Stream& stream, Unit const& unit, UseBuffers<P>& buffers) {
    if (copies_.empty()) return;
    auto const& copies = copies_[unit.index()];
    copy(device, stream, copies.parameters, buffers.parameters, numel(unit) * sizeof(Param));
    buffers.parameters = static_cast<Param const*>(copies.parameters.data());
    if (buffers.gradients == nullptr) return;
    copy(device, stream, copies.gradients, buffers.gradients, numel(unit) * sizeof(Reduce));
    buffers.gradients = static_cast<Reduce*>(copies.gradients.data());
  }
  /// The use ends: the unit's gradients get what the use has written.
  void end(D const& device, typename D::Stream& stream, Unit const& unit, UseBuffers<P> const& buffers) {
    if (copies_.empty()) return;
    if (buffers.gradients != nullptr)
      device.copy_async(stream, unit.full_gradient, buffers.gradients, numel(unit) * sizeof(Reduce));
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
  using Param = typename P::Param;
  using Reduce = typename P::Reduce;
  using Memory = typename D::GuardedMemory;
  struct Copies {
    Memory parameters, gradients;
  };

  static std::size_t numel(Unit const& unit) { return static_cast<std::size_t>(unit.full_numel()); }
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

}  // namespace fsdp::detail
