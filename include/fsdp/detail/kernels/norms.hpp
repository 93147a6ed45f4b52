// SPDX-License-Identifier: Apache-2.0
// Kernels of the global gradient norm, of clipping, and of the loss scale that goes with it.
#pragma once

#include <cstdint>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Norm that clipping measures.
enum class NormKind : unsigned char { l1, l2, inf };

constexpr std::string_view name(NormKind kind) {
  return kind == NormKind::l1 ? "l1" : kind == NormKind::l2 ? "l2" : "inf";
}

/// Results of clipping, in device memory. Zero it before the first use.
struct ClipScalars {
  double norm = 0.0;         ///< global gradient norm of the last step, of unscaled gradients
  float factor = 1.0f;       ///< factor for gradients; -1: skip the step
  std::int64_t skipped = 0;  ///< optimizer steps skipped so far
};

/// The state of a loss scale, in device memory.
struct LossScale {
  float scale = 65536.0f;
  std::int32_t good_steps = 0;  ///< steps taken since the scale last changed
};

namespace kernels {

/// Digits of a norm's sum: see [Note: Exact sums of shares].
inline constexpr int norm_digit_count = 22;

namespace detail {

/// [Note: Exact sums of shares] A share is a sum of squares or magnitudes of 16,384 fp32: a double that is not
/// negative, a multiple of 2^-298, and below 2^270. Cut into digits of 26 bits, shares add up without rounding in any
/// order, within a rank and over ranks, as long as a digit's sum stays below 2^53: that is for 2^27 shares, or 2^41
/// elements. Only the last step rounds, where the digits become one double. A share that is not finite is not cut: each
/// of its digits is the share.
struct Digits {
  static constexpr int bits = 26, lowest = -298;

  /// Digit `index` of a share.
  FSDP_HD static double of(double share, int index) {
    auto const word = fsdp::detail::bit_cast<std::uint64_t>(share);
    auto const exponent = static_cast<int>(word >> 52 & 0x7ff);
    if (exponent == 0x7ff) return share;
    if (exponent == 0) return 0.0;
    auto const mantissa = (word & ((std::uint64_t{1} << 52) - 1)) | std::uint64_t{1} << 52;
    int const shift = exponent - 1075 - (lowest + bits * index);
    if (shift >= bits || shift < -52) return 0.0;
    auto const moved = shift >= 0 ? mantissa << shift : mantissa >> -shift;
    return static_cast<double>(moved & ((std::uint64_t{1} << bits) - 1));
  }
  FSDP_HD static double total(double const* digits) {
    double sum = 0.0;
    for (int index = 0; index < norm_digit_count; ++index) {
      auto const unit = static_cast<std::uint64_t>(1023 + lowest + bits * index) << 52;
      sum += digits[index] * fsdp::detail::bit_cast<double>(unit);
    }
    return sum;
  }
};

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

struct NormDigits {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, double const* shares, std::int64_t n,
                          double* out) const {
    auto const digit = static_cast<int>(index);
    double const result = block.sum(
        n, [digit](double share) { return Digits::of(share, digit); }, shares);
    if (block.thread() == 0) out[digit] = result;
  }
};

struct ClipFactor {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, double const* parts, int count, NormKind kind,
                          float max_norm, float const* loss_scale, bool again, ClipScalars* out) const {
    if (block.thread() != 0) return;
    double const total = kind == NormKind::inf ? largest(parts, count) : Digits::total(parts);
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

  FSDP_HD static double largest(double const* parts, int count) {
    double result = 0.0;
    for (int i = 0; i < count; ++i)
      if (!(parts[i] <= result)) result = parts[i] != parts[i] || result == result ? parts[i] : result;
    return result;
  }
};

struct CountSkipped {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, ClipScalars* step) const {
    if (block.thread() == 0 && step->factor < 0.0f) step->skipped += 1;
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

/// Adds up `count` shares of the kind l1 or l2 exactly. @param out  norm_digit_count doubles, to be added to those of
/// other ranks
template <Device D>
void norm_digits(D const& device, typename D::Stream& stream, double const* shares, std::int64_t count, double* out) {
  device.launch(stream, norm_digit_count, detail::NormDigits{}, shares, count, out);
}

/// Decides the step: out->norm, and out->factor = min(1, max_norm / (norm + 1e-6)), or -1 when the norm is not finite.
/// @param parts  of the norm: the sums of norm_digits (l1, l2), or `count` results of norm_combine (inf)
/// @param loss_scale  what gradients were scaled by: norm and factor are those of unscaled gradients; null: 1
/// @param again  `out` holds an earlier decision about the same gradients: the norm is that of gradients multiplied by
/// its factor, and the new factor includes it
template <Device D>
void clip_factor(D const& device, typename D::Stream& stream, double const* parts, int count, NormKind kind,
                 float max_norm, float const* loss_scale, ClipScalars* out, bool again = false) {
  device.launch(stream, 1, detail::ClipFactor{}, parts, count, kind, max_norm, loss_scale, again, out);
}

/// Counts a step that clipping skips, in step->skipped.
template <Device D>
void count_skipped(D const& device, typename D::Stream& stream, ClipScalars* step) {
  device.launch(stream, 1, detail::CountSkipped{}, step);
}

/// Adapts the scale after a step: a skipped step multiplies it by `backoff`, every `interval` steps taken in a row by
/// `growth` unless that overflows.
template <Device D>
void update_scale(D const& device, typename D::Stream& stream, ClipScalars const* step, float growth, float backoff,
                  std::int32_t interval, LossScale* state) {
  device.launch(stream, 1, detail::UpdateScale{}, step, growth, backoff, interval, state);
}

}  // namespace kernels
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
