// SPDX-License-Identifier: Apache-2.0
// pairwise.hpp's sum over ranks, run at once on the calling thread, for any number of ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fsdp/comm/common/pairwise.hpp"
#include "fsdp/kernels/block.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/kernels/mean.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::mpi::detail {

template <std::size_t Capacity, class Kernel, class T, class... More>
void sum_blocks(Kernel kernel, T const* const* from, std::size_t ranks, T* to, std::size_t count, More... more) {
  pairwise::Sources<T, Capacity> sources{};
  std::copy_n(from, ranks, sources.from);
  auto const elements = static_cast<std::int64_t>(count);
  std::int64_t const blocks = (elements + pairwise::chunk_elements - 1) / pairwise::chunk_elements;
  for (std::int64_t block = 0; block < blocks; ++block) kernel(HostBlock{}, block, sources, to, elements, more...);
}

template <class T>
void sum_at_once(T const* const* from, std::size_t ranks, T* to, std::size_t count) {
  using pairwise::SumFew;
  switch (ranks) {
    case 1: return sum_blocks<1>(SumFew<T, 1>{}, from, ranks, to, count);
    case 2: return sum_blocks<2>(SumFew<T, 2>{}, from, ranks, to, count);
    case 3: return sum_blocks<3>(SumFew<T, 3>{}, from, ranks, to, count);
    case 4: return sum_blocks<4>(SumFew<T, 4>{}, from, ranks, to, count);
    case 5: return sum_blocks<5>(SumFew<T, 5>{}, from, ranks, to, count);
    case 6: return sum_blocks<6>(SumFew<T, 6>{}, from, ranks, to, count);
    case 7: return sum_blocks<7>(SumFew<T, 7>{}, from, ranks, to, count);
    case 8: return sum_blocks<8>(SumFew<T, 8>{}, from, ranks, to, count);
    default:
      return sum_blocks<pairwise::max_ranks>(pairwise::SumMany<T>{}, from, ranks, to, count, static_cast<int>(ranks));
  }
}

/// More ranks than a kernel takes, a tile at a time: 256 consecutive ranks are a subtree of their own, so their sums,
/// kept in the accumulation type, are the leaves of a second tree.
template <class T>
void sum_many(T const* const* from, std::size_t ranks, T* to, std::size_t count) {
  constexpr std::size_t tile = 128;
  constexpr std::size_t group = pairwise::max_ranks;
  std::size_t const groups = (ranks + group - 1) / group;
  if (groups > group) fail<ConfigError>("cannot sum over {} ranks: the limit is {}", ranks, group * group);
  using Sum = Compute<T>;
  std::vector<Sum> wide(group * tile);
  std::vector<Sum> sums((groups + 1) * tile);
  std::vector<Sum const*> leaves(group);
  for (std::size_t begin = 0; begin < count; begin += tile) {
    std::size_t const length = std::min(tile, count - begin);
    for (std::size_t g = 0; g < groups; ++g) {
      std::size_t const members = std::min(group, ranks - g * group);
      for (std::size_t r = 0; r < members; ++r) {
        auto* const leaf = wide.data() + r * tile;
        for (std::size_t i = 0; i < length; ++i) leaf[i] = static_cast<Sum>(from[g * group + r][begin + i]);
        leaves[r] = leaf;
      }
      sum_at_once(static_cast<Sum const* const*>(leaves.data()), members, sums.data() + g * tile, length);
    }
    for (std::size_t g = 0; g < groups; ++g) leaves[g] = sums.data() + g * tile;
    auto* const total = sums.data() + groups * tile;
    sum_at_once(static_cast<Sum const* const*>(leaves.data()), groups, total, length);
    for (std::size_t i = 0; i < length; ++i) to[begin + i] = static_cast<T>(total[i]);
  }
}

/// Sums `count` elements over `ranks` sources, in rank order, in the fixed pairwise tree. `to` may be one of them.
inline void pairwise_sum(DType type, void const* const* sources, std::size_t ranks, void* to, std::size_t count) {
  auto const run = [&]<class T>(std::type_identity<T>) {
    auto* const sum = static_cast<T*>(to);
    auto const take = [&](T const** from) {
      for (std::size_t r = 0; r < ranks; ++r) from[r] = static_cast<T const*>(sources[r]);
      return from;
    };
    if (ranks <= pairwise::max_ranks) {
      std::array<T const*, pairwise::max_ranks> from;
      sum_at_once<T>(take(from.data()), ranks, sum, count);
    } else {
      std::vector<T const*> from(ranks);
      sum_many<T>(take(from.data()), ranks, sum, count);
    }
  };
  switch (type) {
    case DType::f32: return run(std::type_identity<float>{});
    case DType::bf16: return run(std::type_identity<bf16>{});
    case DType::f16: return run(std::type_identity<fp16>{});
    case DType::f64: return run(std::type_identity<double>{});
    case DType::i64: return run(std::type_identity<std::int64_t>{});
  }
}

/// A sum over ranks whose result goes to several places: what it reads and writes, which its owner names anew for each.
struct SpreadSum {
  std::vector<void const*> from;  ///< by rank
  std::vector<std::byte*> to;     ///< besides this rank's result; none after run()

  explicit SpreadSum(std::size_t ranks) : from(ranks) { to.reserve(ranks); }

  /// Sums `count` elements as pairwise_sum does, of fp32 the mean if that is asked for, and copies the result: block by
  /// block, so that the sum's reading is the only one that may miss the cache. `own` and `to` may be among the sources.
  void run(DType type, bool mean, std::byte* own, std::size_t count) {
    constexpr std::size_t block = pairwise::chunk_elements;
    static_assert(block <= kernels::chunk_elements, "one block of the kernel that scales");
    std::size_t const ranks = from.size(), element = size_of(type);
    for (std::size_t begin = 0; begin < count; begin += block) {
      std::size_t const length = std::min(block, count - begin);
      std::byte* const sum = own + begin * element;
      pairwise_sum(type, from.data(), ranks, sum, length);
      if (mean)
        kernels::detail::Scale{}(HostBlock{}, 0, reinterpret_cast<float*>(sum), static_cast<std::int64_t>(length),
                                 kernels::mean_factor(static_cast<int>(ranks)));
      for (auto* const place : to) std::memcpy(place + begin * element, sum, length * element);
      for (auto& source : from) source = static_cast<std::byte const*>(source) + length * element;
    }
    to.clear();
  }
};

}  // namespace fsdp::mpi::detail
