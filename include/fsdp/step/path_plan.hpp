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

/// Index of the first unit that ends after `range` begins. @param ends  where each unit ends, ascending
inline std::size_t first_place(std::vector<std::int64_t> const& ends, Range range) {
  return static_cast<std::size_t>(std::lower_bound(ends.begin(), ends.end(), range.begin + 1) - ends.begin());
}

/// The parts of declared buckets that belong to units of a path: consecutive ones together. They begin and end where a
/// unit or a declared bucket does.
/// @param buckets  declared ones come first; gets the parts that it lacks
/// @param ends     where each unit ends, in the order in which gradient shards lie
/// @param order    these units, and perhaps others after them
/// @pre declared buckets lie in ascending order
[[gnu::cold]] inline void add_path_buckets(PathPlan& path, std::vector<Range>& buckets, std::size_t declared,
                                           std::vector<std::int64_t> const& ends,
                                           std::vector<std::size_t> const& order) {
  for (std::size_t bucket = 0; bucket < declared; ++bucket) {
    auto const add = [&](Range part) {
      if (part.size() == 0) return;
      auto at = bucket;
      if (!(buckets[at] == part))
        for (at = declared; at < buckets.size() && !(buckets[at] == part);) ++at;
      if (at == buckets.size()) buckets.push_back(part);
      path.buckets.push_back(static_cast<std::uint32_t>(at));
    };
    auto const whole = buckets[bucket];
    Range part{whole.begin, whole.begin};
    for (auto i = first_place(ends, whole); i < ends.size(); ++i) {
      Range const in_bucket{std::max(i == 0 ? 0 : ends[i - 1], whole.begin), std::min(ends[i], whole.end)};
      if (in_bucket.begin >= in_bucket.end) break;
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
  [[gnu::cold]] Completion(PathPlan const& path, std::vector<Range> const& buckets,
                           std::vector<std::int64_t> const& ends, std::vector<std::size_t> const& order)
      : path_(&path),
        buckets_(&buckets),
        ends_(&ends),
        order_(&order),
        places_(path.writes.size()),
        written_(ends.size()),
        reduced_(path.buckets.size()) {
    for (std::size_t place = 0; place < ends.size(); ++place) places_[order[place]] = place;
  }

  /// Backward has written the unit's gradients. Calls `reduce(bucket)` for each bucket that is complete now, and after
  /// it `reduced(unit)` for each unit all of whose buckets are reduced.
  template <class Reduce, class Reduced>
  void write(std::uint32_t unit, Reduce const& reduce, Reduced const& reduced) {
    auto const place = places_[unit];
    written_[place] = true;
    for (auto k = first_bucket(place); overlaps(k, place); ++k) {
      if (!is_complete(k)) continue;
      reduce(path_->buckets[k]);
      reduced_[k] = true;
      for (auto i = first_place(*ends_, bucket(k)); overlaps(k, i); ++i)
        if (is_reduced(i)) reduced(static_cast<std::uint32_t>((*order_)[i]));
    }
  }

 private:
  Range bucket(std::size_t k) const { return (*buckets_)[path_->buckets[k]]; }
  std::int64_t begin(std::size_t place) const { return place == 0 ? 0 : (*ends_)[place - 1]; }
  bool overlaps(std::size_t k, std::size_t place) const {
    return k < reduced_.size() && place < written_.size() && bucket(k).begin < (*ends_)[place] &&
           begin(place) < bucket(k).end;
  }
  /// The first bucket of the path that has an element of the unit or lies behind it. Buckets lie in ascending order.
  std::size_t first_bucket(std::size_t place) const {
    std::size_t first = 0, last = reduced_.size();
    while (first < last) {
      auto const middle = first + (last - first) / 2;
      bucket(middle).end > begin(place) ? last = middle : first = middle + 1;
    }
    return first;
  }
  bool is_complete(std::size_t k) const {
    for (auto i = first_place(*ends_, bucket(k)); overlaps(k, i); ++i)
      if (!written_[i]) return false;
    return true;
  }
  bool is_reduced(std::size_t place) const {
    for (auto k = first_bucket(place); overlaps(k, place); ++k)
      if (!reduced_[k]) return false;
    return true;
  }

  PathPlan const* path_;
  std::vector<Range> const* buckets_;
  std::vector<std::int64_t> const* ends_;
  std::vector<std::size_t> const* order_;
  FixedArray<std::size_t> places_;      ///< by unit whose gradient shard backward writes: its place in `ends`
  FixedArray<bool> written_, reduced_;  ///< by place; by bucket of the path
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
