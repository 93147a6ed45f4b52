// SPDX-License-Identifier: Apache-2.0
// EngineOptions::trap_stale_pointers: each unit's uses see copies of its buffers, at addresses that are inaccessible
// outside the unit's uses.
#pragma once

#include <cstddef>
#include <vector>

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
  template <class Units>
  [[gnu::cold]] void prepare(Units const& units) {
    copies_.reserve(units.size());
    for (auto const& unit : units) copies_.emplace_back(parameter_bytes(*unit), gradient_bytes(*unit));
  }
  /// A use begins: `buffers` are replaced by copies.
  void begin(D const& device, typename D::Stream& stream, Unit const& unit, UseBuffers<P>& buffers) {
    if (!copies_.empty()) copy(device, stream, unit, buffers);
  }
  /// The use ends: the unit's gradients get what the use has written.
  void end(D const& device, typename D::Stream& stream, Unit const& unit, UseBuffers<P> const& buffers) {
    if (!copies_.empty()) copy_back(device, stream, unit, buffers);
  }
  /// An exception has ended the use: its copies are lost.
  void abandon(D const& device, typename D::Stream& stream, Unit const& unit) noexcept {
    if (!copies_.empty()) try {
        close(device, stream, copies_[unit.index()]);
      } catch (...) {  // the stream has failed, and says so in its next call
      }
  }

 private:
  struct Copies {
    Copies(std::size_t parameters_bytes, std::size_t gradients_bytes)
        : parameters(parameters_bytes), gradients(gradients_bytes) {}
    typename D::GuardedMemory parameters, gradients;
  };
  static std::size_t parameter_bytes(Unit const& unit) {
    return static_cast<std::size_t>(unit.full_numel()) * sizeof(typename P::Param);
  }
  static std::size_t gradient_bytes(Unit const& unit) {
    return static_cast<std::size_t>(unit.full_numel()) * sizeof(typename P::Reduce);
  }

  [[gnu::cold]] void copy(D const& device, typename D::Stream& stream, Unit const& unit, UseBuffers<P>& buffers) {
    auto const& copies = copies_[unit.index()];
    device.open_async(stream, copies.parameters);
    device.copy_async(stream, copies.parameters.data(), buffers.parameters, parameter_bytes(unit));
    buffers.parameters = static_cast<typename P::Param const*>(copies.parameters.data());
    if (buffers.gradients == nullptr) return;
    device.open_async(stream, copies.gradients);
    device.copy_async(stream, copies.gradients.data(), buffers.gradients, gradient_bytes(unit));
    buffers.gradients = static_cast<typename P::Reduce*>(copies.gradients.data());
  }
  [[gnu::cold]] void copy_back(D const& device, typename D::Stream& stream, Unit const& unit,
                               UseBuffers<P> const& buffers) {
    if (buffers.gradients != nullptr)
      device.copy_async(stream, unit.full_gradient, buffers.gradients, gradient_bytes(unit));
    close(device, stream, copies_[unit.index()]);
  }
  static void close(D const& device, typename D::Stream& stream, Copies const& copies) {
    device.close_async(stream, copies.parameters);
    device.close_async(stream, copies.gradients);
  }

  std::vector<Copies> copies_;  ///< by unit
};

}  // namespace fsdp::detail
