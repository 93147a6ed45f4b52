// SPDX-License-Identifier: Apache-2.0
// Adapters of linear layers (LoRA): y += scale * B A x, and its gradients. See Tuning.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/layout.hpp"
#include "transformer/kernels/common.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

/// The matrices of an adapter; without data where the layer has none.
template <class E>
struct Adapter {
  fsdp::Tensor<E, 2> a, b;  // (rank, in), (out, rank)
};

/// Describes the adapter of a linear layer with `out` outputs and `in` inputs, if it has one.
/// @param layer  name in the module: "attn.c_attn"
template <class E, class Visit>
void describe_adapter(Tuning const& tuning, Adapter<E>& adapter, std::string_view layer, std::int64_t out,
                      std::int64_t in, Visit&& tensor) {
  if (!tuning.adapts(layer)) return;
  auto const bound = 1.0f / std::sqrt(static_cast<float>(in));
  tensor(std::string(layer) + std::string(lora_a), adapter.a, {tuning.lora_rank, in},
         fsdp::TensorOptions{.init = fsdp::init::uniform(-bound, bound)});
  tensor(std::string(layer) + std::string(lora_b), adapter.b, {out, tuning.lora_rank},
         fsdp::TensorOptions{.init = fsdp::init::zeros});
}

/// Scratch that the adapters of all layers share.
template <class T>
struct AdapterScratch {
  T* low = nullptr;           // (B T, rank): rows behind A
  T* low_gradient = nullptr;  // (B T, rank): only in training
};

/// Passes through adapters. Every call does nothing for an adapter without data. y and dy have `stride` elements a row.
template <class D, class T>
struct Adapters {
  using Stream = typename D::Stream;
  using Gradient = fsdp::Gradient<Compute<T>>;

  Gemm<D>* gemm = nullptr;
  float scale = 1.0f;  // Tuning::lora_scale
  AdapterScratch<T> scratch{};

  /// y (rows, out) += scale * B A x, of x (rows, in).
  void forward(Stream& stream, std::int64_t rows, Adapter<T const> const& w, T const* x, T* y,
               std::int64_t stride) const {
    if (w.a.data == nullptr) return;
    auto const rank = w.a.extents[0], in = w.a.extents[1], out = w.b.extents[0];
    linear(*gemm, stream, rows, in, rank, x, w.a.data, scratch.low, rank);
    gemm->run(stream, Op::none, Op::transpose, rows, out, rank, scale, static_cast<T const*>(scratch.low), rank,
              w.b.data, rank, 1, y, stride);
  }
  /// Begins an adapter's backward: low_gradient = that of A x, of dy (rows, out).
  void low_gradient(Stream& stream, std::int64_t rows, Adapter<T const> const& w, T const* dy,
                    std::int64_t stride) const {
    if (w.a.data == nullptr) return;
    auto const rank = w.a.extents[0], out = w.b.extents[0];
    gemm->run(stream, Op::none, Op::none, rows, rank, out, scale, dy, stride, w.b.data, rank, 0, scratch.low_gradient,
              rank);
  }
  /// dx (rows, in) += the adapter's part of the input's gradient.
  /// @pre low_gradient()
  void input_gradient(Stream& stream, std::int64_t rows, Adapter<T const> const& w, T* dx) const {
    if (w.a.data == nullptr) return;
    auto const rank = w.a.extents[0], in = w.a.extents[1];
    gemm->run(stream, Op::none, Op::none, rows, in, rank, 1, static_cast<T const*>(scratch.low_gradient), rank,
              w.a.data, in, 1, dx, in);
  }
  /// g += the gradients of A and B, of x (rows, in) and dy (rows, out).
  /// @pre low_gradient()
  void weight_gradients(Stream& stream, std::int64_t rows, Adapter<T const> const& w, Adapter<Gradient> const& g,
                        T const* x, T const* dy, std::int64_t stride) const {
    if (w.a.data == nullptr || !g.a.wanted()) return;
    auto const rank = w.a.extents[0], in = w.a.extents[1], out = w.b.extents[0];
    linear_weight_gradient(*gemm, stream, rows, in, rank, x, static_cast<T const*>(scratch.low_gradient), rank,
                           g.a.data, g.a.fresh);
    linear(*gemm, stream, rows, in, rank, x, w.a.data, scratch.low, rank);
    gemm->run(stream, Op::transpose, Op::none, out, rank, rows, scale, dy, stride, static_cast<T const*>(scratch.low),
              rank, g.b.fresh ? 0 : 1, g.b.data, rank);
  }
};

}  // namespace transformer
