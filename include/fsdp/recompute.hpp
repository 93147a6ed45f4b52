// SPDX-License-Identifier: Apache-2.0
// Recomputed activations: a module that runs its forward again in its backward, and buffers for models whose layers are
// recomputed in segments. fsdp.hpp does not include it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <tuple>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Arguments for the forward that Recompute's backward runs first.
template <class... Args>
struct ForwardArguments {
  std::tuple<Args...> values;  ///< references to the arguments, in their order
};
/// Makes ForwardArguments: `layer.backward(fsdp::forward_with(x, y, scratch), ...)`. Valid until the end of the
/// statement.
template <class... Args>
ForwardArguments<Args&&...> forward_with(Args&&... args) {
  return {std::forward_as_tuple(std::forward<Args>(args)...)};
}

/// Wraps the module M so that backward runs forward again first. Several modules may then share the memory to which
/// forward writes its activations. No segment is needed: the engine sees one backward.
///
/// ```
/// auto layers = engine.shard(std::vector(depth, fsdp::Recompute{Layer{...}}), "h");
/// layers[i].forward(x(i), x(i + 1), scratch);
/// layers[i].backward(fsdp::forward_with(x(i), y, scratch), x(i), scratch, dy);  // y: what forward writes, not needed
/// ```
/// @tparam M  a module; it need not know of this
template <class M>
struct Recompute : M {
  /// @param again  the arguments of M::forward behind the weights. It runs on the same stream, before M::backward
  /// @param args   those of M::backward behind the gradients
  /// @return what M::backward returns
  template <class Stream, class Weights, class Gradients, class... Again, class... Args>
  decltype(auto) backward(Stream& stream, Weights const& weights, Gradients const& gradients,
                          ForwardArguments<Again...> const& again, Args&&... args) const {
    M const& module = *this;
    std::apply([&](auto&&... values) { static_cast<void>(module.forward(stream, weights, values...)); }, again.values);
    return module.backward(stream, weights, gradients, std::forward<Args>(args)...);
  }
};
template <class M>
Recompute(M) -> Recompute<M>;

/// Sizes of the activations of equal layers, and the memory that they need if each `per_segment` layers are recomputed
/// together (Engine::recompute_segment). The last segment may be shorter.
struct SegmentSizes {
  std::size_t layers = 0;       ///< number of layers
  std::size_t per_segment = 1;  ///< at least 1; `layers`: everything is kept
  std::size_t output = 0;       ///< bytes of a layer's output, which is the next layer's input
  std::size_t kept = 0;         ///< bytes that a layer's forward keeps for its backward

  std::size_t segments() const { return (layers + longest() - 1) / longest(); }  ///< number of segments
  /// Layers of the longest segment.
  std::size_t longest() const { return std::clamp<std::size_t>(per_segment, 1, std::max<std::size_t>(layers, 1)); }
  /// The first layer of the segment that contains `layer`.
  std::size_t first(std::size_t layer) const { return layer - layer % longest(); }
  /// The last layer of the segment that contains `layer`.
  std::size_t last(std::size_t layer) const { return std::min(first(layer) + longest(), layers) - 1; }
  /// Bytes of SegmentActivations: the input of each segment, the last output, and the activations of one segment.
  std::size_t bytes() const { return (segments() + longest()) * padded(output) + longest() * padded(kept); }

  /// Buffers begin at multiples of 256 bytes.
  static std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
};

/// Activations of equal layers that are recomputed in segments. The inputs of segments are kept; layers of different
/// segments share everything else.
/// @tparam D  device, from which the memory is
template <class D>
class SegmentActivations {
 public:
  /// Allocates `sizes.bytes()`. @param device, account  must outlive this; the account has it as activations
  /// @throws UsageError if there are no layers, or none in a segment
  SegmentActivations(D& device, MemoryAccount& account, SegmentSizes const& sizes)
      : sizes_(checked(sizes)), memory_(device, account, MemoryTag::activations, sizes.bytes()) {}

  SegmentSizes const& sizes() const { return sizes_; }   ///< the sizes that the constructor got
  std::size_t bytes() const { return memory_.bytes(); }  ///< bytes that the device allocated
  /// The input of a layer; for index `layers`, the output of the last one.
  /// @throws UsageError if there is no such layer; output() and kept() too
  template <class T>
  T* input(std::size_t layer) const {
    expect(layer <= sizes_.layers, "input", layer);
    auto const longest = sizes_.longest();
    bool const shared = layer < sizes_.layers && layer % longest != 0;
    auto const number = layer == sizes_.layers ? sizes_.segments()
                        : shared               ? sizes_.segments() + layer % longest
                                               : layer / longest;
    return reinterpret_cast<T*>(memory_.data() + number * SegmentSizes::padded(sizes_.output));
  }
  /// The output of a layer, which is the input of the next one. @throws UsageError if there is no such layer
  template <class T>
  T* output(std::size_t layer) const {
    expect(layer < sizes_.layers, "output", layer);
    return input<T>(layer + 1);
  }
  /// Activations that a layer's forward keeps for its backward.
  template <class T>
  T* kept(std::size_t layer) const {
    expect(layer < sizes_.layers, "kept", layer);
    auto const longest = sizes_.longest();
    return reinterpret_cast<T*>(memory_.data() + (sizes_.segments() + longest) * SegmentSizes::padded(sizes_.output) +
                                layer % longest * SegmentSizes::padded(sizes_.kept));
  }

 private:
  static SegmentSizes const& checked(SegmentSizes const& sizes) {
    FSDP_EXPECTS(sizes.layers > 0 && sizes.per_segment > 0,
                 "SegmentActivations: {} layers, {} in a segment; both must be at least 1", sizes.layers,
                 sizes.per_segment);
    return sizes;
  }
  void expect(bool exists, std::string_view what, std::size_t layer) const {
    FSDP_EXPECTS(exists, "SegmentActivations::{}: there is no layer {}; there are {}, counted from 0", what, layer,
                 sizes_.layers);
  }

  SegmentSizes sizes_;
  AccountedMemory<D> memory_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
