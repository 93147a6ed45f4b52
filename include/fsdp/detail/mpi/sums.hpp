// SPDX-License-Identifier: Apache-2.0
// Sums over ranks in the order of pairwise.hpp, whose inputs may include partial sums of other nodes, and whose
// results may be stored in several places.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fsdp/detail/comm/pairwise.hpp"
#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/mpi/placement.hpp"
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

/// The type of partial sums: of bf16 and fp16 they are fp32, so that the whole sum is rounded once.
constexpr DType partial_type(DType type) { return size_of(type) == 2 ? DType::f32 : type; }

/// pairwise_sum in the type of partial sums.
/// @param to  none of the sources
inline void partial_sum(DType type, void const* const* sources, std::size_t ranks, void* to, std::size_t count) {
  if (partial_type(type) == type) return pairwise_sum(type, sources, ranks, to, count);
  with_type(type, [&]<class T>(std::type_identity<T>) {
    std::vector<T const*> from(ranks);
    for (std::size_t r = 0; r < ranks; ++r) from[r] = static_cast<T const*>(sources[r]);
    sum_many<T, Compute<T>>(from.data(), ranks, static_cast<Compute<T>*>(to), count);
  });
}

/// A sum over the ranks of a communicator: its sources and destinations, set anew for each sum.
struct TreeSum {
  /// Sources, by rank. Of a piece of several ranks of another node, the first rank's is the partial sum, and the
  /// others' unused.
  std::vector<void const*> from;
  std::vector<std::byte*> to;  ///< besides this rank's result; none after run()

  /// @param placement  outlives this
  explicit TreeSum(Placement const& placement)
      : from(static_cast<std::size_t>(placement.size())), placement_(placement) {
    to.reserve(from.size());
  }

  /// Sums `count` elements as pairwise_sum does, of fp32 the mean if that is asked for, and copies the result: block by
  /// block, so that the sum's reading is the only one that may miss the cache. `own` and `to` may be among the sources.
  void run(DType type, bool mean, std::byte* own, std::size_t count) {
    static_assert(block <= kernels::chunk_elements, "one block of the kernel that scales");
    std::size_t const element = size_of(type);
    for (std::size_t begin = 0; begin < count; begin += block) {
      std::size_t const length = std::min(block, count - begin);
      std::byte* const sum = own + begin * element;
      if (placement_.has_partial_sums()) {
        add_pieces(type, sum, begin, length);
      } else {
        pairwise_sum(type, at(begin * element), from.size(), sum, length);
      }
      if (mean)
        kernels::detail::Scale{}(HostBlock{}, 0, reinterpret_cast<float*>(sum), static_cast<std::int64_t>(length),
                                 kernels::mean_factor(placement_.size()));
      for (auto* const place : to) std::memcpy(place + begin * element, sum, length * element);
    }
    to.clear();
  }

 private:
  static constexpr std::size_t block = pairwise::chunk_elements;

  void const* const* at(std::size_t bytes) {
    sources_.resize(from.size());
    std::transform(from.begin(), from.end(), sources_.begin(), [&](void const* source) {
      return source == nullptr ? nullptr : static_cast<std::byte const*>(source) + bytes;
    });
    return sources_.data();
  }
  /// Follows the placement's steps with a stack of values of one block each.
  void add_pieces(DType type, std::byte* sum, std::size_t begin, std::size_t length) {
    auto const partial = partial_type(type);
    std::size_t const wide = size_of(partial);
    auto const* const raw = at(begin * size_of(type));
    stack_.clear();
    for (auto const step : placement_.steps()) {
      if (step == Placement::add) {
        auto const* const right = stack_.back();
        stack_.pop_back();
        void const* const both[] = {stack_.back(), right};
        auto* const value = slot(stack_.size() - 1);
        pairwise_sum(partial, both, 2, value, length);
        stack_.back() = value;
        continue;
      }
      auto const& piece = placement_.pieces()[static_cast<std::size_t>(step)];
      auto const first = static_cast<std::size_t>(piece.first);
      if (piece.ranks > 1 && piece.node != placement_.own_node()) {
        stack_.push_back(static_cast<std::byte const*>(from[first]) + begin * wide);
      } else {
        auto* const value = slot(stack_.size());
        partial_sum(type, raw + first, static_cast<std::size_t>(piece.ranks), value, length);
        stack_.push_back(value);
      }
    }
    with_type(type, [&]<class T>(std::type_identity<T>) {
      auto const* const value = reinterpret_cast<Compute<T> const*>(stack_.back());
      auto* const result = reinterpret_cast<T*>(sum);
      for (std::size_t i = 0; i < length; ++i) result[i] = narrow<T>(value[i]);
    });
  }
  std::byte* slot(std::size_t index) {
    while (slots_.size() <= index) slots_.emplace_back(block * sizeof(double));
    return slots_[index].data();
  }

  Placement const& placement_;
  std::vector<void const*> sources_;
  std::vector<std::byte const*> stack_;
  std::vector<std::vector<std::byte>> slots_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
