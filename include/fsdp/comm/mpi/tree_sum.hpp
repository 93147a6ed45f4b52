// SPDX-License-Identifier: Apache-2.0
// Sums over ranks whose inputs include partial sums of other nodes, and whose results are stored in several places.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "fsdp/comm/common/pairwise.hpp"
#include "fsdp/comm/mpi/placement.hpp"
#include "fsdp/comm/mpi/sum.hpp"
#include "fsdp/kernels/block.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/kernels/mean.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

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
