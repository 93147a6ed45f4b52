// SPDX-License-Identifier: Apache-2.0
// Kernels of the global gradient norm, of clipping, and of the loss scale that goes with it.
#pragma once

#include <cstdint>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/kernels/block.hpp"
#include "fsdp/kernels/elementwise.hpp"

namespace fsdp {

/// Which norm clipping measures.
enum class NormKind : unsigned char { l1, l2, inf };

constexpr std::string_view name(NormKind kind) {
  return kind == NormKind::l1 ? "l1" : kind == NormKind::l2 ? "l2" : "inf";
}

/// Results of clipping, in device memory. Zero it before the first use.
struct ClipScalars {
  double norm = 0.0;         ///< global gradient norm of the last step, of unscaled gradients
  float factor = 1.0f;       ///< what the optimizer multiplies gradients by; -1: skip the step
  std::int64_t skipped = 0;  ///< optimizer steps skipped so far
};

/// The state of a loss scale, in device memory.
struct LossScale {
  float scale = 65536.0f;
  std::int32_t good_steps = 0;  ///< steps taken since the scale last changed
};

namespace kernels {

namespace detail {

/// Bits of a value that is not negative: they order as the values do, and place NaN above infinity.
template <class Bits, class T>
FSDP_HD inline Bits ordered(T value) {
  return fsdp::detail::bit_cast<Bits>(value);
}

template <NormKind Kind>
struct NormPartials {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float const* x, std::int64_t n, double* out) const {
    std::int64_t const count = chunk_length(n, index);
    float const* const chunk = x + index * chunk_elements;
    double result;
    if constexpr (Kind == NormKind::inf) {
      result = fsdp::detail::bit_cast<float>(block.max(
          count, [](float v) { return ordered<std::uint32_t>(math::abs(v)); }, chunk));
    } else {
      result = block.sum(
          count,
          [](float v) {
            double const wide = v;
            return Kind == NormKind::l1 ? math::abs(wide) : wide * wide;
          },
          chunk);
    }
    if (block.thread() == 0) out[index] = result;
  }
};

template <NormKind Kind>
struct NormCombine {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, double const* partials, std::int64_t n, double* out) const {
    double result;
    if constexpr (Kind == NormKind::inf) {
      result = fsdp::detail::bit_cast<double>(block.max(
          n, [](double v) { return ordered<std::uint64_t>(v); }, partials));
    } else {
      result = block.sum(
          n, [](double v) { return v; }, partials);
    }
    if (block.thread() == 0) *out = result;
  }
};

struct ClipFactor {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, double const* slices, int count, NormKind kind,
                          float max_norm, float const* loss_scale, bool again, ClipScalars* out) const {
    if (block.thread() != 0) return;
    double const total = combine(slices, count, kind);
    double scale = loss_scale == nullptr ? 1.0 : static_cast<double>(*loss_scale);
    if (again && out->factor > 0.0f) scale = 1.0 / static_cast<double>(out->factor);
    double const norm = (kind == NormKind::l2 ? math::sqrt(total) : total) / scale;
    out->norm = norm;
    if (!math::is_finite(norm)) {
      out->factor = -1.0f;
      return;
    }
    double const factor = static_cast<double>(max_norm) / (norm + 1e-6);
    out->factor = static_cast<float>((factor < 1.0 ? factor : 1.0) / scale);
  }

  /// Pairwise tree: adjacent pairs at each level, an odd one carried up. Level k pairs runs of 2^k slices, so a slice
  /// is added as soon as its partner is complete: one pending sum for each bit of the index.
  FSDP_HD static double combine(double const* slices, int count, NormKind kind) {
    double pending[32];
    int depth = 0;
    for (int i = 0; i < count; ++i) {
      double sum = slices[i];
      for (int bits = i; (bits & 1) != 0; bits >>= 1) sum = join(pending[--depth], sum, kind);
      pending[depth++] = sum;
    }
    if (depth == 0) return 0.0;
    double sum = pending[--depth];
    while (depth > 0) sum = join(pending[--depth], sum, kind);
    return sum;
  }
  FSDP_HD static double join(double left, double right, NormKind kind) {
    if (kind != NormKind::inf) return left + right;
    return left > right || left != left ? left : right;
  }
};

struct UpdateScale {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, ClipScalars const* step, float growth, float backoff,
                          std::int32_t interval, LossScale* state) const {
    if (block.thread() != 0) return;
    if (step->factor < 0.0f) {
      state->scale *= backoff;
      state->good_steps = 0;
      return;
    }
    if (++state->good_steps < interval) return;
    float const larger = state->scale * growth;
    if (math::is_finite(static_cast<double>(larger))) state->scale = larger;
    state->good_steps = 0;
  }
};

}  // namespace detail

/// Shares that norm_partials makes of n elements.
constexpr std::int64_t norm_partial_count(std::int64_t n) { return detail::blocks_for(n); }

/// Shares of a gradient norm in double, one for each 16,384 elements: the sum of |x| (l1) or x^2 (l2), or the largest
/// |x| (inf).
/// @param out  norm_partial_count(n) doubles
/// @note The order of the sums depends on n and the kind of device alone. NaN and infinity reach their share.
template <Device D>
void norm_partials(D const& device, typename D::Stream& stream, float const* x, std::int64_t n, NormKind kind,
                   double* out) {
  if (n <= 0) return;
  auto const blocks = norm_partial_count(n);
  switch (kind) {
    case NormKind::l1: device.launch(stream, blocks, detail::NormPartials<NormKind::l1>{}, x, n, out); break;
    case NormKind::l2: device.launch(stream, blocks, detail::NormPartials<NormKind::l2>{}, x, n, out); break;
    case NormKind::inf: device.launch(stream, blocks, detail::NormPartials<NormKind::inf>{}, x, n, out); break;
  }
}

/// Combines `count` shares into *out, in an order that depends on count and the kind of device alone; 0 when count = 0.
template <Device D>
void norm_combine(D const& device, typename D::Stream& stream, double const* partials, std::int64_t count,
                  NormKind kind, double* out) {
  if (kind == NormKind::inf) {
    device.launch(stream, 1, detail::NormCombine<NormKind::inf>{}, partials, count, out);
  } else {
    device.launch(stream, 1, detail::NormCombine<NormKind::l2>{}, partials, count, out);
  }
}

/// Combines the slices' shares by the pairwise tree and decides the step: out->norm, and out->factor =
/// min(1, max_norm / (norm + 1e-6)), or -1 when the norm is not finite.
/// @param slices  count shares of norm_combine, the same kind
/// @param loss_scale  what gradients were scaled by: norm and factor are those of unscaled gradients; null: 1
/// @param again  `out` holds an earlier decision about the same gradients: the norm is that of gradients multiplied by
/// its factor, and the new factor includes it
template <Device D>
void clip_factor(D const& device, typename D::Stream& stream, double const* slices, int count, NormKind kind,
                 float max_norm, float const* loss_scale, ClipScalars* out, bool again = false) {
  device.launch(stream, 1, detail::ClipFactor{}, slices, count, kind, max_norm, loss_scale, again, out);
}

/// After a step: a skipped one multiplies the scale by `backoff`, every `interval` steps taken in a row by `growth`
/// unless that overflows.
template <Device D>
void update_scale(D const& device, typename D::Stream& stream, ClipScalars const* step, float growth, float backoff,
                  std::int32_t interval, LossScale* state) {
  device.launch(stream, 1, detail::UpdateScale{}, step, growth, backoff, interval, state);
}

}  // namespace kernels
}  // namespace fsdp
