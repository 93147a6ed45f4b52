// SPDX-License-Identifier: Apache-2.0
// The core's kernels: casts, accumulation, initialisation, norms, optimizers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/concepts.hpp"
#include "fsdp/init.hpp"
#include "fsdp/kernels.hpp"
#include "fsdp/random.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp {

/// Which norm clipping measures.
enum class NormKind : unsigned char { l1, l2, inf };

/// What clipping leaves on the device. Zero it before the first use.
struct ClipScalars {
  double norm = 0.0;         ///< global gradient norm of the last step
  float factor = 1.0f;       ///< what the optimizer multiplies gradients by; -1: skip the step
  std::int64_t skipped = 0;  ///< steps skipped so far because the norm was not finite
};

/// A run of consecutive elements that one block of an optimizer kernel updates.
struct OptimizerChunk {
  std::int64_t begin = 0;
  std::int32_t count = 0;
  float weight_decay = 0.0f;
};

/// Scalars of an AdamW step. `correction1 = 1 - beta1^t`, `correction2 = 1 - beta2^t`, t = 1 for the first step.
struct AdamWScalars {
  float learning_rate = 0.0f;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float epsilon = 1e-8f;
  float correction1 = 1.0f;
  float correction2 = 1.0f;
};

/// Scalars of an SGD step.
struct SgdScalars {
  float learning_rate = 0.0f;
  float momentum = 0.0f;
};

/// Kernels over flat arrays, enqueued on a stream. `n = 0` enqueues nothing. Arrays are in memory of the device, and
/// equal or disjoint.
namespace kernels {

/// Elements that one block handles.
inline constexpr std::int64_t chunk_elements = 16 * 1024;

namespace detail {

constexpr std::int64_t blocks_for(std::int64_t n) { return (n + chunk_elements - 1) / chunk_elements; }

/// Length of chunk `index` of n elements.
FSDP_HD constexpr std::int64_t chunk_length(std::int64_t n, std::int64_t index) {
  std::int64_t const rest = n - index * chunk_elements;
  return rest < chunk_elements ? rest : chunk_elements;
}

struct Identity {
  template <class T>
  FSDP_HD T operator()(T value) const {
    return value;
  }
};

struct Cast {
  template <class Block, class From, class To>
  FSDP_HD void operator()(Block const& block, std::int64_t index, From const* in, To* out, std::int64_t n) const {
    std::int64_t const begin = index * chunk_elements;
    block.each(chunk_length(n, index), out + begin, Identity{}, in + begin);
  }
};

struct Accumulate {
  template <class Block, class R>
  FSDP_HD void operator()(Block const& block, std::int64_t index, R const* in, float* out, std::int64_t n, float scale,
                          bool overwrite) const {
    std::int64_t const begin = index * chunk_elements;
    std::int64_t const count = chunk_length(n, index);
    using T = Compute<R>;
    if (overwrite) {
      block.each(
          count, out + begin, [=](T x) { return static_cast<float>(x) * scale; }, in + begin);
    } else {
      block.update(
          count, [=](float& sum, T x) { sum = math::mul_add(static_cast<float>(x), scale, sum); }, out + begin,
          in + begin);
    }
  }
};

struct Add {
  template <class Block, class R>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float const* in, R* out, std::int64_t n) const {
    std::int64_t const begin = index * chunk_elements;
    block.update(
        chunk_length(n, index), [](Compute<R>& sum, float x) { sum += x; }, out + begin, in + begin);
  }
};

struct Scale {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, float* x, std::int64_t n, float factor) const {
    std::int64_t const begin = index * chunk_elements;
    block.update(
        chunk_length(n, index), [=](float& value) { value *= factor; }, x + begin);
  }
};

struct Fill {
  template <class Block, class T>
  FSDP_HD void operator()(Block const& block, std::int64_t index, T* out, std::int64_t n, float value) const {
    std::int64_t const begin = index * chunk_elements;
    block.each(
        chunk_length(n, index), out + begin, [=](std::int64_t) { return value; }, Indices{});
  }
};

template <class Values>
struct FillRandom {
  template <class Block, class T>
  FSDP_HD void operator()(Block const& block, std::int64_t index, T* out, std::int64_t n, Values values,
                          RandomSequence sequence, std::int64_t first) const {
    std::int64_t const begin = index * chunk_elements;
    each_random(block, chunk_length(n, index), sequence, first + begin, values,
                [=](std::int64_t i, float value) { out[begin + i] = narrow<T>(value); });
  }
};

template <NormKind Kind>
struct NormPartial {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float const* x, std::int64_t n, double* out,
                          bool add) const {
    if constexpr (Kind == NormKind::inf) {
      // The bits of |x| order as the values do, and place NaN above infinity, so that it is never lost.
      std::uint32_t const bits = block.max(
          n, [](float v) { return fsdp::detail::bit_cast<std::uint32_t>(math::abs(v)); }, x);
      double const largest = fsdp::detail::bit_cast<float>(bits);
      if (block.thread() == 0) *out = add && !(largest > *out) && largest == largest ? *out : largest;
    } else {
      double const sum = block.sum(
          n,
          [](float v) {
            double const wide = v;
            return Kind == NormKind::l1 ? math::abs(wide) : wide * wide;
          },
          x);
      if (block.thread() == 0) *out = add ? *out + sum : sum;
    }
  }
};

struct ClipFactor {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, double const* slices, int count, NormKind kind,
                          float max_norm, ClipScalars* out) const {
    if (block.thread() != 0) return;
    double const total = combine(slices, count, kind);
    double const norm = kind == NormKind::l2 ? math::sqrt(total) : total;
    out->norm = norm;
    if (!math::is_finite(norm)) {
      out->factor = -1.0f;
      out->skipped += 1;
      return;
    }
    double const factor = static_cast<double>(max_norm) / (norm + 1e-6);
    out->factor = factor < 1.0 ? static_cast<float>(factor) : 1.0f;
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

struct AdamW {
  template <class Block, class P>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks, AdamWScalars s, P* p,
                          float const* g, float* m, float* v, float const* factor) const {
    float const clip = factor == nullptr ? 1.0f : *factor;
    if (clip < 0.0f) return;
    OptimizerChunk const chunk = chunks[index];
    float const keep = 1.0f - s.learning_rate * chunk.weight_decay;
    float const rate = s.learning_rate / s.correction1;
    float const root_scale = 1.0f / math::sqrt(s.correction2);
    block.update(
        chunk.count,
        [=](float& param, float gradient, float& first, float& second) {
          float const slope = gradient * clip;
          first = math::mul_add(s.beta1, first - slope, slope);
          float const square = slope * slope;
          second = math::mul_add(s.beta2, second - square, square);
          param = math::mul_add(param, keep, -rate * first / math::mul_add(math::sqrt(second), root_scale, s.epsilon));
        },
        p + chunk.begin, g + chunk.begin, m + chunk.begin, v + chunk.begin);
  }
};

struct Sgd {
  template <class Block, class P>
  FSDP_HD void operator()(Block const& block, std::int64_t index, OptimizerChunk const* chunks, SgdScalars s, P* p,
                          float const* g, float* momentum, float const* factor) const {
    float const clip = factor == nullptr ? 1.0f : *factor;
    if (clip < 0.0f) return;
    OptimizerChunk const chunk = chunks[index];
    float const decay = chunk.weight_decay;
    if (momentum == nullptr) {
      block.update(
          chunk.count,
          [=](float& param, float gradient) {
            float const slope = math::mul_add(decay, param, gradient * clip);
            param = math::mul_add(-s.learning_rate, slope, param);
          },
          p + chunk.begin, g + chunk.begin);
    } else {
      block.update(
          chunk.count,
          [=](float& param, float gradient, float& velocity) {
            float const slope = math::mul_add(decay, param, gradient * clip);
            velocity = math::mul_add(s.momentum, velocity, slope);
            param = math::mul_add(-s.learning_rate, velocity, param);
          },
          p + chunk.begin, g + chunk.begin, momentum + chunk.begin);
    }
  }
};

}  // namespace detail

/// Converts n elements: out[i] = To(in[i]), rounded to nearest even.
template <Device D, class From, class To>
void cast(D const& device, typename D::Stream& stream, From const* in, To* out, std::int64_t n) {
  if (n <= 0) return;
  if constexpr (std::is_same_v<From, To> && !std::is_same_v<Compute<To>, To>) {
    device.copy_async(stream, out, in, static_cast<std::size_t>(n) * sizeof(To));  // not by way of fp32
  } else {
    device.launch(stream, detail::blocks_for(n), detail::Cast{}, in, out, n);
  }
}

/// Scales a reduced gradient into its fp32 shard: out[i] = scale * in[i], or out[i] += scale * in[i].
/// @param overwrite  true for the first micro-step
template <Device D, class R>
void accumulate(D const& device, typename D::Stream& stream, R const* in, float* out, std::int64_t n, float scale,
                bool overwrite) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Accumulate{}, in, out, n, scale, overwrite);
}

/// Adds fp32 values to narrower ones: out[i] = R(float(out[i]) + in[i]), rounded once.
template <Device D, class R>
void add(D const& device, typename D::Stream& stream, float const* in, R* out, std::int64_t n) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Add{}, in, out, n);
}

/// Multiplies in place: x[i] *= factor.
template <Device D>
void scale(D const& device, typename D::Stream& stream, float* x, std::int64_t n, float factor) {
  if (n > 0) device.launch(stream, detail::blocks_for(n), detail::Scale{}, x, n, factor);
}

/// Fills elements [first_index, first_index + n) of a tensor. An element's value depends on the seed, the tensor and
/// its index alone, so that every rank fills its own slice and all agree.
/// @param tensor_hash  hash_name() of the tensor's name
/// @tparam T  float, bf16 or fp16: the fp32 value, rounded to nearest even
template <Device D, class T>
void initialize(D const& device, typename D::Stream& stream, T* out, std::int64_t n, Init const& init,
                std::uint64_t seed, std::uint64_t tensor_hash, std::int64_t first_index) {
  if (n <= 0) return;
  auto const blocks = detail::blocks_for(n);
  RandomSequence const sequence{seed, tensor_hash};
  switch (init.kind) {
    case Init::Kind::zeros: device.launch(stream, blocks, detail::Fill{}, out, n, 0.0f); break;
    case Init::Kind::constant: device.launch(stream, blocks, detail::Fill{}, out, n, init.first); break;
    case Init::Kind::normal:
      device.launch(stream, blocks, detail::FillRandom<NormalValues>{}, out, n, NormalValues{init.first, init.second},
                    sequence, first_index);
      break;
    case Init::Kind::uniform:
      device.launch(stream, blocks, detail::FillRandom<UniformValues>{}, out, n, UniformValues{init.first, init.second},
                    sequence, first_index);
      break;
  }
}

/// One slice's share of a gradient norm, in double: the sum of |x| (l1) or x^2 (l2), or the largest |x| (inf).
/// @param add  combine with what *out holds instead of replacing it
/// @note The order of the sum depends on n and the kind of device alone; one block walks the slice. NaN and infinity
/// reach *out.
template <Device D>
void norm_partial(D const& device, typename D::Stream& stream, float const* x, std::int64_t n, NormKind kind,
                  double* out, bool add) {
  if (n <= 0 && add) return;
  switch (kind) {
    case NormKind::l1: device.launch(stream, 1, detail::NormPartial<NormKind::l1>{}, x, n, out, add); break;
    case NormKind::l2: device.launch(stream, 1, detail::NormPartial<NormKind::l2>{}, x, n, out, add); break;
    case NormKind::inf: device.launch(stream, 1, detail::NormPartial<NormKind::inf>{}, x, n, out, add); break;
  }
}

/// Combines the slices' shares by the pairwise tree and decides the step: out->norm, and out->factor =
/// min(1, max_norm / (norm + 1e-6)), or -1 and one more in out->skipped when the norm is not finite.
/// @param slices  count shares of norm_partial, the same kind
template <Device D>
void clip_factor(D const& device, typename D::Stream& stream, double const* slices, int count, NormKind kind,
                 float max_norm, ClipScalars* out) {
  device.launch(stream, 1, detail::ClipFactor{}, slices, count, kind, max_norm, out);
}

/// One AdamW step over a flat shard, with decoupled weight decay per chunk (Loshchilov and Hutter, arXiv:1711.05101).
/// @param chunks  chunk_count disjoint chunks, in memory of the device
/// @param p, g, m, v  parameters, gradients, first and second moments: chunk positions index all four
/// @param factor  gradients are multiplied by *factor first, a negative one skips the step; may be null
template <Device D, class P>
void adamw(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
           AdamWScalars scalars, P* p, float const* g, float* m, float* v, float const* factor) {
  if (chunk_count > 0) device.launch(stream, chunk_count, detail::AdamW{}, chunks, scalars, p, g, m, v, factor);
}

/// One SGD step over a flat shard: weight decay is added to the gradient, then momentum, as in PyTorch's SGD.
/// @param momentum  velocities, zero before the first step; null for plain SGD
template <Device D, class P>
void sgd(D const& device, typename D::Stream& stream, OptimizerChunk const* chunks, std::int64_t chunk_count,
         SgdScalars scalars, P* p, float const* g, float* momentum, float const* factor) {
  if (chunk_count > 0) device.launch(stream, chunk_count, detail::Sgd{}, chunks, scalars, p, g, momentum, factor);
}

}  // namespace kernels
}  // namespace fsdp
