// SPDX-License-Identifier: Apache-2.0
// Kernels over flat arrays: casts, accumulation, initialisation; and the mean over ranks, by any communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/random.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

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
    case Init::Kind::given:  // the caller gives them
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

}  // namespace kernels
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels {

/// The factor that makes a sum over N ranks a mean (average): 1/N. All code that takes a mean multiplies by it once, in
/// fp32.
constexpr float mean_factor(int ranks) { return 1.0f / static_cast<float>(ranks); }

/// The mean over ranks of `count` elements, to every rank: the sum of all_reduce, times mean_factor(size()). By the
/// communicator where it TakesMeans, otherwise in a pass of its own. The bits are the same.
/// @note Stream: as all_reduce
/// @note Collective: one all_reduce or all_reduce_mean
template <Communicator C>
Ticket all_reduce_mean(C& comm, typename C::Device::Stream& stream, float const* send, float* recv, std::size_t count,
                       Label label) {
  if constexpr (TakesMeans<C>) {
    if (takes_means(comm)) return comm.all_reduce_mean(stream, send, recv, count, label);
  }
  auto const ticket = comm.all_reduce(stream, send, recv, count, label);
  if (send == recv) comm.wait_for_peers(stream, ticket, WaitSite::replicate_peers_read);
  scale(comm.device(), stream, recv, static_cast<std::int64_t>(count), mean_factor(comm.size()));
  return ticket;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::kernels
