// SPDX-License-Identifier: Apache-2.0
// Decisions of the compiler for one path: units in its passes, shared slots and buckets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/step/use_order.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// One path of a program; the declared order is one too. A unit has a buffer of its own if some path needs one.
struct PathPlan {
  UseOrder order;
  FixedArray<bool> in_backward;  ///< by unit: whether a backward pass comes to some use of it
  FixedArray<bool> writes;       ///< by unit: whether the path has a use of a module whose tensors in it train
  /// By unit: whether modules begin the sums of all its gradients. If the path lacks some of its modules, nobody stores
  /// the gradients of their tensors: then these must be zero.
  FixedArray<bool> sets_gradients;
  FixedArray<bool> keeps_slice;               ///< by unit: see [Note: Kept slices]
  std::vector<std::uint32_t> gradient_slots;  ///< by unit: slot that backward writes its gradients to
  std::vector<std::uint32_t> buckets;         ///< completed by backward: indices of Program::buckets
  PrefetchLists ahead, ahead_in_activations;

  PathPlan() = default;
  PathPlan(PathPlan const&) = delete;
  [[gnu::cold, gnu::noinline]] ~PathPlan() = default;
};

/// The parts of declared buckets that belong to units of a path: consecutive ones together. They begin and end where a
/// unit or a declared bucket does.
/// @param buckets  declared ones come first; gets the parts that it lacks
/// @param ends     where each unit ends, in the order in which gradient shards lie
/// @param order    these units, and perhaps others after them
[[gnu::cold]] inline void add_path_buckets(PathPlan& path, std::vector<Range>& buckets, std::size_t declared,
                                           std::vector<std::int64_t> const& ends,
                                           std::vector<std::size_t> const& order) {
  auto const add = [&](Range part) {
    if (part.size() == 0) return;
    std::uint32_t at = 0;
    while (at < buckets.size() && !(buckets[at].begin == part.begin && buckets[at].end == part.end)) ++at;
    if (at == buckets.size()) buckets.push_back(part);
    path.buckets.push_back(at);
  };
  for (std::size_t bucket = 0; bucket < declared; ++bucket) {
    auto const whole = buckets[bucket];
    Range part{whole.begin, whole.begin};
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < ends.size(); begin = ends[i++]) {
      Range const in_bucket{std::max(begin, whole.begin), std::min(ends[i], whole.end)};
      if (in_bucket.begin >= in_bucket.end) continue;
      if (path.writes[order[i]]) {
        part.end = in_bucket.end;
      } else {
        add(part);
        part = {in_bucket.end, in_bucket.end};
      }
    }
    add(part);
  }
}

/// Progress of a backward pass that writes gradient shards: finds the buckets that are complete.
class Completion {
 public:
  /// @param buckets, ends, order  as in add_path_buckets
  Completion(PathPlan const& path, std::vector<Range> const& buckets, std::vector<std::int64_t> const& ends,
             std::vector<std::size_t> const& order)
      : path_(&path),
        buckets_(&buckets),
        ends_(&ends),
        order_(&order),
        written_(ends.size()),
        reduced_(path.buckets.size()) {}

  /// Backward has written the unit's gradients. Calls `reduce(bucket)` for each bucket that is complete now, and after
  /// it `reduced(unit)` for each unit all of whose buckets are reduced.
  template <class Reduce, class Reduced>
  void write(std::uint32_t unit, Reduce const& reduce, Reduced const& reduced) {
    std::size_t place = 0;
    while ((*order_)[place] != unit) ++place;
    written_[place] = true;
    for (std::size_t k = 0; k < reduced_.size(); ++k) {
      if (!overlaps(k, place) || !is_complete(k)) continue;
      reduce(path_->buckets[k]);
      reduced_[k] = true;
      for (std::size_t i = 0; i < written_.size(); ++i)
        if (overlaps(k, i) && is_reduced(i)) reduced(static_cast<std::uint32_t>((*order_)[i]));
    }
  }

 private:
  bool overlaps(std::size_t k, std::size_t place) const {
    auto const bucket = (*buckets_)[path_->buckets[k]];
    return bucket.begin < (*ends_)[place] && (place == 0 ? 0 : (*ends_)[place - 1]) < bucket.end;
  }
  bool is_complete(std::size_t k) const {
    for (std::size_t i = 0; i < written_.size(); ++i)
      if (overlaps(k, i) && !written_[i]) return false;
    return true;
  }
  bool is_reduced(std::size_t place) const {
    for (std::size_t k = 0; k < reduced_.size(); ++k)
      if (overlaps(k, place) && !reduced_[k]) return false;
    return true;
  }

  PathPlan const* path_;
  std::vector<Range> const* buckets_;
  std::vector<std::int64_t> const* ends_;
  std::vector<std::size_t> const* order_;
  FixedArray<bool> written_, reduced_;  ///< by place; by bucket of the path
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
