// SPDX-License-Identifier: Apache-2.0
// Causal attention: kernels of its own where a device has them; else by panels, matrix products of some query rows with
// the keys that they may see.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "fsdp/error.hpp"
#include "transformer/attention/flash_attention.hpp"
#include "transformer/attention/host_attention.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/kernels/dropout.hpp"
#include "transformer/kernels/softmax.hpp"
#include "transformer/layers/pass.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// Context that the attention of all layers shares. It must outlive them and stay in its place.
template <class D, class T>
struct AttentionContext {
  D device;
  Gemm<D>* gemm = nullptr;
  AttentionPlan plan{};
  AttentionScratch<T> scratch{};
};

/// [Note: Attention by panels]
/// A panel is at most AttentionPlan::panel query rows of one sequence. Its scores are one matrix product with the keys
/// up to the panel's last row, so that of T^2 scores about T (T + panel) / 2 are computed, and about T^2 / 2 by
/// products that know what is Lower. Queries, keys and values are read where the projection wrote them, packed (B, T,
/// 3A), by their leading dimension: no head is transposed or copied. As many heads as fit
/// AttentionPlan::elements go together as one batched product, a group.
///
/// The host has kernels of its own for what most passes need (host_attention.hpp); panels are for the rest, and for
/// processors that have not what those are made of.
///
/// On the host a group is a part of a task, and all that is done with its scores is done by one thread, in whose
/// second-level cache they stay. Nothing depends on how heads are grouped, so groups may depend on the threads.
///
/// Backward goes from the last panel to the first. The last one sees all keys, so its products start the gradients of
/// keys and values (beta = 0) and the others add to them. Probabilities are computed again from queries and keys: one
/// matrix product in seven and a softmax, about 3 % of a step of GPT-2 124M at T = 1024 on the host. Keeping them takes
/// B H T (T + panel) / 2 values a layer, there as many as everything else that a layer keeps.
template <class D, class T>
class CausalAttention {
 public:
  using Stream = typename D::Stream;

  explicit CausalAttention(AttentionContext<D, T> const& context) : context_(&context) {}

  /// mixed (B, n, A) = softmax(q k^T / sqrt(Q)) v, for the n query rows of `pass` and all keys up to each.
  /// @param qkv       (B, capacity, 3A): queries, keys and values, heads side by side in each
  /// @param log_sums  what backward needs of flash attention; null without it, or without a backward pass
  void forward(Stream& stream, Pass const& pass, DropoutMask const& mask, T const* qkv, T* mixed,
               float* log_sums) const;

  /// qkv_gradient (B, n, 3A) = gradient of forward at qkv, given that of its result.
  /// @param mixed, log_sums  of forward; panels do not read them
  /// @pre pass.position == 0
  void backward(Stream& stream, Pass const& pass, DropoutMask const& mask, T const* qkv, T const* mixed,
                float const* log_sums, T const* mixed_gradient, T* qkv_gradient) const;

 private:
  /// Query rows of some heads of one sequence, and the keys that they see.
  struct Panel {
    std::int64_t sequence, first, rows;  // first: counted from the pass's first row
    std::int64_t keys;                   // counted from position 0
    std::int64_t head, heads;
  };
  template <class E>
  struct Place {
    E *query, *key, *value;
  };

  FlashShape flash(Pass const& pass) const {
    FlashShape shape = flash_shape(context_->plan);
    shape.batch = pass.batch;
    shape.length = pass.length;
    shape.position = pass.position;
    shape.capacity = pass.capacity;
    shape.sequence = pass.sequence;
    return shape;
  }
  HostAttention tiles(Pass const& pass) const {
    return {pass.batch,   context_->plan.shape.heads, context_->plan.shape.size, pass.length, pass.position,
            pass.capacity};
  }
  /// Whether this pass goes in tiles: not a few rows, which would not repay what is packed for them, and nothing that
  /// drops.
  bool goes_in_tiles(Pass const& pass, DropoutMask const& mask) const {
    return context_->scratch.tile_bytes > 0 && mask.probability == 0.0f && pass.length >= 16;
  }
  double scale() const { return 1 / std::sqrt(static_cast<double>(context_->plan.shape.size)); }

  /// Threads of a stream of the host, each of which works in a scratch of its own.
  std::int64_t lanes(auto const& stream) const {
    auto const count = static_cast<std::int64_t>(stream.threads());
    FSDP_EXPECTS(count <= context_->plan.lanes, "attention: expected at most {} threads, got {}", context_->plan.lanes,
                 count);
    return count;
  }
  LaneScratch lane_scratch(auto const& stream) const {
    lanes(stream);
    return {context_->scratch.tiles, context_->scratch.tile_bytes};
  }

  /// A thread's buffers for the scores of a group.
  struct Scratch {
    T *scores, *gradient;
  };

  /// body(stream, panel, scratch) for each group of heads of all sequences, and the panel of rows from `first`.
  /// @param body  is copied: it refers to nothing of its caller's frame
  template <class Body>
  void each_group(Stream& stream, Pass const& pass, std::int64_t first, Body const& body) const {
    auto const& work = context_->scratch;
    std::int64_t const rows = std::min(context_->plan.panel, pass.length - first);
    std::int64_t const keys = pass.position + first + rows;
    std::int64_t const heads = context_->plan.shape.heads;
    std::int64_t together = std::clamp<std::int64_t>(work.score_elements / (rows * keys), 1, heads);
    if constexpr (splits_tasks<D>) {
      std::int64_t const threads = lanes(stream);
      if (threads > 1) together = std::clamp<std::int64_t>(pass.batch * heads / (2 * threads), 1, together);
      std::int64_t const groups = (heads + together - 1) / together;
      auto& own = Stream::of_calling_thread();
      stream.enqueue_parts(pass.batch * groups, [=, &own, &work](std::int64_t part, int lane) {
        std::int64_t const head = part % groups * together, offset = lane * work.score_elements;
        body(own, Panel{part / groups, first, rows, keys, head, std::min(together, heads - head)},
             Scratch{work.scores + offset, work.scores_gradient + offset});
      });
    } else {
      for (std::int64_t sequence = 0; sequence < pass.batch; ++sequence) {
        for (std::int64_t head = 0; head < heads; head += together) {
          body(stream, Panel{sequence, first, rows, keys, head, std::min(together, heads - head)},
               Scratch{work.scores, work.scores_gradient});
        }
      }
    }
  }

  template <class E>
  Place<E> locate(Panel const& p, Pass const& pass, E* qkv) const {
    auto const width = context_->plan.shape.width();
    E* const sequence = qkv + p.sequence * pass.capacity * 3 * width + p.head * context_->plan.shape.size;
    return {sequence + (pass.position + p.first) * 3 * width, sequence + width, sequence + 2 * width};
  }
  std::int64_t mixed_offset(Panel const& p, Pass const& pass) const {
    return (p.sequence * pass.length + p.first) * context_->plan.shape.width() + p.head * context_->plan.shape.size;
  }

  /// scores (heads, rows, keys) = softmax of the scaled products with the visible keys, 0 elsewhere.
  void probabilities(Stream& stream, Panel const& p, Place<T const> const& at, T* scores) const {
    auto const size = context_->plan.shape.size, packed = 3 * context_->plan.shape.width();
    context_->gemm->batched(stream, Op::none, Op::transpose, p.rows, p.keys, size, 1, at.query, packed, size, at.key,
                            packed, size, 0, scores, p.keys, p.rows * p.keys, p.heads, Lower::result);
    causal_softmax(context_->device, stream, scores, p.heads, p.rows, p.keys, scale());
  }

  /// The mask of element (sequence, head, query, key) does not depend on panels.
  void drop(Stream& stream, Pass const& pass, DropoutMask const& mask, Panel const& p, T* scores) const {
    if (mask.probability == 0.0f) return;
    std::int64_t const length = pass.capacity, pitch = attention_mask_pitch(length);
    std::int64_t const first =
        (((pass.sequence + p.sequence) * context_->plan.shape.heads + p.head) * length + pass.position + p.first) *
        pitch;
    dropout_panels(context_->device, stream, static_cast<T const*>(scores), scores, p.heads, p.rows, p.keys, mask,
                   first, length * pitch, pitch);
  }

  AttentionContext<D, T> const* context_;
};

template <class D, class T>
void CausalAttention<D, T>::forward(Stream& stream, Pass const& pass, DropoutMask const& mask, T const* qkv, T* mixed,
                                    [[maybe_unused]] float* log_sums) const {
  if constexpr (has_flash_attention<D, T>) {
    if (uses_flash_attention<D, T>(context_->plan.shape))
      return flash_attention_forward(context_->device, stream, flash(pass), mask, qkv, mixed, log_sums);
  }
  if constexpr (has_host_attention<D, T>) {
    if (goes_in_tiles(pass, mask))
      return host_attention_forward(context_->device, stream, tiles(pass), qkv, mixed, lane_scratch(stream));
  }
  for (std::int64_t first = 0; first < pass.length; first += context_->plan.panel) {
    each_group(stream, pass, first, [=, this](Stream& own, Panel const& p, Scratch const& scratch) {
      auto const size = context_->plan.shape.size, width = context_->plan.shape.width();
      auto const at = locate(p, pass, qkv);
      probabilities(own, p, at, scratch.scores);
      drop(own, pass, mask, p, scratch.scores);
      context_->gemm->batched(own, Op::none, Op::none, p.rows, size, p.keys, 1, static_cast<T const*>(scratch.scores),
                              p.keys, p.rows * p.keys, at.value, 3 * width, size, 0, mixed + mixed_offset(p, pass),
                              width, size, p.heads, Lower::left);
    });
  }
}

template <class D, class T>
void CausalAttention<D, T>::backward(Stream& stream, Pass const& pass, DropoutMask const& mask, T const* qkv,
                                     [[maybe_unused]] T const* mixed, [[maybe_unused]] float const* log_sums,
                                     T const* mixed_gradient, T* qkv_gradient) const {
  if constexpr (has_flash_attention<D, T>) {
    if (uses_flash_attention<D, T>(context_->plan.shape))
      return flash_attention_backward(context_->device, stream, flash(pass), mask,
                                      {qkv, mixed, mixed_gradient, log_sums, context_->scratch.products, qkv_gradient});
  }
  if constexpr (has_host_attention<D, T>) {
    if (goes_in_tiles(pass, mask))
      return host_attention_backward(context_->device, stream, tiles(pass), qkv, mixed_gradient, qkv_gradient,
                                     lane_scratch(stream));
  }
  std::int64_t const panels = (pass.length + context_->plan.panel - 1) / context_->plan.panel;
  for (std::int64_t index = panels; index-- > 0;) {
    GemmScalar<T> const keep = index + 1 == panels ? 0 : 1;
    each_group(
        stream, pass, index * context_->plan.panel, [=, this](Stream& own, Panel const& p, Scratch const& scratch) {
          auto& gemm = *context_->gemm;
          auto const size = context_->plan.shape.size, width = context_->plan.shape.width(), packed = 3 * width;
          auto const at = locate(p, pass, qkv);
          auto const to = locate(p, pass, qkv_gradient);
          T const* const result = mixed_gradient + mixed_offset(p, pass);
          T const* const scores = scratch.scores;
          T const* const gradient = scratch.gradient;
          auto const stride = p.rows * p.keys;
          probabilities(own, p, at, scratch.scores);
          gemm.batched(own, Op::none, Op::transpose, p.rows, p.keys, size, 1, result, width, size, at.value, packed,
                       size, 0, scratch.gradient, p.keys, stride, p.heads, Lower::result);
          drop(own, pass, mask, p, scratch.gradient);
          causal_softmax_backward(context_->device, own, scores, scratch.gradient, p.heads, p.rows, p.keys, scale());
          drop(own, pass, mask, p, scratch.scores);
          gemm.batched(own, Op::transpose, Op::none, p.keys, size, p.rows, 1, scores, p.keys, stride, result, width,
                       size, keep, to.value, packed, size, p.heads, Lower::left);
          gemm.batched(own, Op::none, Op::none, p.rows, size, p.keys, 1, gradient, p.keys, stride, at.key, packed, size,
                       0, to.query, packed, size, p.heads, Lower::left);
          gemm.batched(own, Op::transpose, Op::none, p.keys, size, p.rows, 1, gradient, p.keys, stride, at.query,
                       packed, size, keep, to.key, packed, size, p.heads, Lower::left);
        });
  }
}

}  // namespace transformer
