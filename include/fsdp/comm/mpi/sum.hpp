// SPDX-License-Identifier: Apache-2.0
// The sum over ranks of pairwise.hpp, run at once on the calling thread, for any number of ranks.
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

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

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
/// @tparam To  T, or its accumulation type
template <class T, class To>
void sum_many(T const* const* from, std::size_t ranks, To* to, std::size_t count) {
  constexpr std::size_t tile = 128;
  constexpr std::size_t group = pairwise::max_ranks;
  std::size_t const groups = (ranks + group - 1) / group;
  if (groups > group) fail<ConfigError>("cannot sum over {} ranks: the limit is {}", ranks, group * group);
  using Sum = Compute<T>;
  std::vector<Sum> wide(std::min(ranks, group) * tile);
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
    for (std::size_t i = 0; i < length; ++i) to[begin + i] = static_cast<To>(total[i]);
  }
}

/// Calls `run` with the type of the elements as a std::type_identity.
template <class Run>
void with_type(DType type, Run&& run) {
  switch (type) {
    case DType::f32: return run(std::type_identity<float>{});
    case DType::bf16: return run(std::type_identity<bf16>{});
    case DType::f16: return run(std::type_identity<fp16>{});
    case DType::f64: return run(std::type_identity<double>{});
    case DType::i64: return run(std::type_identity<std::int64_t>{});
  }
}

/// Sums `count` elements over `ranks` sources, in rank order, in the fixed pairwise tree. `to` may be one of them.
inline void pairwise_sum(DType type, void const* const* sources, std::size_t ranks, void* to, std::size_t count) {
  with_type(type, [&]<class T>(std::type_identity<T>) {
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
      sum_many<T, T>(take(from.data()), ranks, sum, count);
    }
  });
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
