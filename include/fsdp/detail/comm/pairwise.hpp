// SPDX-License-Identifier: Apache-2.0
// A kernel for the sum over ranks on every device: a fixed pairwise tree, in one pass over memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::pairwise {

/// Ranks that one kernel sums over. It gets one pointer per rank as arguments, of which CUDA takes 4 KiB.
inline constexpr int max_ranks = 256;
inline constexpr std::int64_t chunk_elements = 4096;  ///< summed by one block

/// Adds adjacent pairs at each level and carries an odd one up: ((0+1)+(2+3))+((4+5)+6). One to eight values.
struct TreeAdd {
  template <class V>
  FSDP_HD V operator()(V a) const {
    return a;
  }
  template <class V>
  FSDP_HD V operator()(V a, V b) const {
    return a + b;
  }
  template <class V>
  FSDP_HD V operator()(V a, V b, V c) const {
    return (a + b) + c;
  }
  template <class V>
  FSDP_HD V operator()(V a, V b, V c, V d) const {
    return (a + b) + (c + d);
  }
  template <class V, class... Rest>
  FSDP_HD V operator()(V a, V b, V c, V d, V e, Rest... rest) const {
    static_assert(sizeof...(Rest) <= 3);
    return ((a + b) + (c + d)) + (*this)(e, rest...);
  }
};

/// Pointers to the buffers of all ranks, in rank order; passed to kernels by value. Not std::array: device code reads
/// it.
template <class T, std::size_t Capacity>
struct Sources {
  T const* from[Capacity];
};

/// to[i] = the sum of Ranks sources, for Ranks <= 8. `to` may be one of the sources. bf16 and fp16 are summed in fp32
/// and rounded once.
template <class T, std::size_t Ranks>
struct SumFew {
  static_assert(Ranks >= 1 && Ranks <= 8);

  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, Sources<T, Ranks> sources, T* to,
                          std::int64_t count) const {
    std::int64_t const begin = index * chunk_elements;
    std::int64_t const length = count - begin < chunk_elements ? count - begin : chunk_elements;
    sum(block, begin, length, sources, to, std::make_index_sequence<Ranks>{});
  }

 private:
  template <class Block, std::size_t... I>
  FSDP_HD static void sum(Block const& block, std::int64_t begin, std::int64_t length, Sources<T, Ranks> sources, T* to,
                          std::index_sequence<I...>) {
    block.each(length, to + begin, TreeAdd{}, sources.from[I] + begin...);
  }
};

/// to[i] = the sum of up to max_ranks sources. Partial sums of complete subtrees wait on a small stack, as the ones of
/// a binary counter do: rank r carries as often as r has trailing ones.
template <class T>
struct SumMany {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t index, Sources<T, max_ranks> sources, T* to,
                          std::int64_t count, int ranks) const {
    constexpr std::size_t width = std::is_same_v<Block, HostBlock> ? 64 : 1;
    constexpr auto step = static_cast<std::int64_t>(width);
    std::int64_t const begin = index * chunk_elements;
    std::int64_t const end = count - begin < chunk_elements ? count : begin + chunk_elements;
    std::int64_t i = begin + block.thread() * step;
    for (; i + step <= end; i += block.threads() * step) sum<width>(sources, to, i, ranks);
    if constexpr (width > 1) {  // one lane: what is left
      for (; i < end; ++i) sum<1>(sources, to, i, ranks);
    }
  }

 private:
  static constexpr int levels = 9;  // 2^8 = max_ranks

  template <std::size_t Width>
  FSDP_HD static void sum(Sources<T, max_ranks> const& sources, T* to, std::int64_t i, int ranks) {
    T const* const* from = sources.from;
    constexpr auto size = static_cast<int>(Width);
    Compute<T> stack[levels][Width];
    for (int rank = 0; rank < ranks; ++rank) {
      Compute<T> carry[Width];
      for (int k = 0; k < size; ++k) carry[k] = widen(from[rank][i + k]);
      int level = 0;
      for (; (rank >> level & 1) != 0; ++level) {
        for (int k = 0; k < size; ++k) carry[k] = stack[level][k] + carry[k];
      }
      for (int k = 0; k < size; ++k) stack[level][k] = carry[k];
    }
    int level = 0;
    while ((ranks >> level & 1) == 0) ++level;
    Compute<T> total[Width];
    for (int k = 0; k < size; ++k) total[k] = stack[level][k];
    for (++level; level < levels; ++level) {
      if ((ranks >> level & 1) == 0) continue;
      for (int k = 0; k < size; ++k) total[k] = stack[level][k] + total[k];
    }
    for (int k = 0; k < size; ++k) to[i + k] = narrow<T>(total[k]);
  }
};

namespace detail {
template <std::size_t Ranks, class D, class From, class T>
void launch_few(D const& device, typename D::Stream& stream, From const* from, T* to, std::int64_t count) {
  Sources<T, Ranks> sources{};
  for (std::size_t rank = 0; rank < Ranks; ++rank) sources.from[rank] = static_cast<T const*>(from[rank]);
  device.launch(stream, (count + chunk_elements - 1) / chunk_elements, SumFew<T, Ranks>{}, sources, to, count);
}
}  // namespace detail

/// Enqueues to[i] = the tree sum of from[0..ranks)[i] for `count` elements. `to` may be one of the sources.
/// @param from  pointers to T, or to void
/// @throws ConfigError for more than max_ranks ranks
template <class D, class From, class T>
void launch_sum(D const& device, typename D::Stream& stream, From const* from, int ranks, T* to, std::int64_t count) {
  // Doubles are a norm's, one a rank: no kernels are compiled for those. Narrow sums have them for the usual numbers of
  // ranks, so that every engine can have such sums without being compiled for long.
  if constexpr (sizeof(T) == 2) {
    switch (ranks) {
      case 2: return detail::launch_few<2>(device, stream, from, to, count);
      case 4: return detail::launch_few<4>(device, stream, from, to, count);
      case 8: return detail::launch_few<8>(device, stream, from, to, count);
      default: break;
    }
  } else if constexpr (!std::is_same_v<T, double>) {
    switch (ranks) {
      case 1: return detail::launch_few<1>(device, stream, from, to, count);
      case 2: return detail::launch_few<2>(device, stream, from, to, count);
      case 3: return detail::launch_few<3>(device, stream, from, to, count);
      case 4: return detail::launch_few<4>(device, stream, from, to, count);
      case 5: return detail::launch_few<5>(device, stream, from, to, count);
      case 6: return detail::launch_few<6>(device, stream, from, to, count);
      case 7: return detail::launch_few<7>(device, stream, from, to, count);
      case 8: return detail::launch_few<8>(device, stream, from, to, count);
      default: break;
    }
  }
  if (ranks < 1 || ranks > max_ranks) fail<ConfigError>("cannot sum over {} ranks: the limit is {}", ranks, max_ranks);
  Sources<T, max_ranks> sources{};
  for (int rank = 0; rank < ranks; ++rank) sources.from[rank] = static_cast<T const*>(from[rank]);
  device.launch(stream, (count + chunk_elements - 1) / chunk_elements, SumMany<T>{}, sources, to, count, ranks);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::pairwise
