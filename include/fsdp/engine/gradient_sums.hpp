// SPDX-License-Identifier: Apache-2.0
// Reductions of gradients for each element type, chosen at run time.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The communicator's reductions take elements of type T, as Communicator says of float.
template <class C, class T>
concept Sums = requires(C& comm, typename C::Device::Stream& stream, T const* send, T* recv, std::size_t count,
                        Label label) {
  { comm.reduce_scatter(stream, send, recv, count, label) } -> std::same_as<Ticket>;
  { comm.all_reduce(stream, send, recv, count, label) } -> std::same_as<Ticket>;
};

/// The operations of a reduction, for one type of element. All are enqueued on the stream that they are given.
template <Communicator C>
struct GradientSums {
  using D = typename C::Device;
  using Stream = typename D::Stream;

  /// Rounds: out[i] = in[i], to nearest even. Where gradients are rounded.
  void (*round)(D const&, Stream&, float const* in, void* out, std::int64_t n) = nullptr;
  /// Gives slice `own` of the sum over ranks of `full`, in place.
  Ticket (*reduce_scatter)(C&, Stream&, void* full, Range own, Label) = nullptr;
  /// Sums over ranks, in place.
  Ticket (*all_reduce)(C&, Stream&, void* data, std::int64_t count, Label) = nullptr;
  /// Adds to fp32: see kernels::accumulate.
  void (*accumulate)(D const&, Stream&, void const* in, float* out, std::int64_t n, float scale,
                     bool overwrite) = nullptr;

  template <class T>
  static constexpr GradientSums of() {
    return {nullptr, reduce_scatter_of<T>, all_reduce_of<T>, accumulate_of<T>};
  }
  /// The operations for a type that fp32 gradients may be rounded to.
  /// @throws ConfigError if the communicator sums no such elements
  [[gnu::cold]] static GradientSums narrow(DType type, int rank) {
    if constexpr (Sums<C, bf16>)
      if (type == DType::bf16) return rounded_to<bf16>();
    if constexpr (Sums<C, fp16>)
      if (type == DType::f16) return rounded_to<fp16>();
    fail<ConfigError>("rank {}: reduce_dtype {}: the communicator's reduce_scatter and all_reduce do not take {}", rank,
                      fsdp::name(type), fsdp::name(type));
  }

 private:
  template <class T>
  static constexpr GradientSums rounded_to() {
    auto sums = of<T>();
    sums.round = round_to<T>;
    return sums;
  }
  template <class T>
  static void round_to(D const& device, Stream& stream, float const* in, void* out, std::int64_t n) {
    kernels::cast(device, stream, in, static_cast<T*>(out), n);
  }
  template <class T>
  static Ticket reduce_scatter_of(C& comm, Stream& stream, void* full, Range own, Label label) {
    return comm.reduce_scatter(stream, static_cast<T const*>(full), static_cast<T*>(full) + own.begin,
                               static_cast<std::size_t>(own.size()), label);
  }
  template <class T>
  static Ticket all_reduce_of(C& comm, Stream& stream, void* data, std::int64_t count, Label label) {
    return comm.all_reduce(stream, static_cast<T const*>(data), static_cast<T*>(data), static_cast<std::size_t>(count),
                           label);
  }
  template <class T>
  static void accumulate_of(D const& device, Stream& stream, void const* in, float* out, std::int64_t n, float scale,
                            bool overwrite) {
    kernels::accumulate(device, stream, static_cast<T const*>(in), out, n, scale, overwrite);
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
