// SPDX-License-Identifier: Apache-2.0
// The first stage of the step compiler: which units and paths there are, and which units each pass needs. No buffer has
// a place yet.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// One path of a program; the declared order is one too. A unit has a buffer of its own if some path needs one.
struct PathPlan {
  UseOrder order;
  std::size_t backward_end = 0;  ///< the last use of its backward passes; order.size(): nothing trains
  FixedArray<bool> in_backward;  ///< by unit: whether a backward pass comes to some use of it
  FixedArray<bool> writes;       ///< by unit: whether the path has a use of a module whose tensors in it train
  /// By unit: whether modules begin the sums of all its gradients. If the path lacks some of its modules, nobody stores
  /// the gradients of their tensors: then these must be zero.
  FixedArray<bool> sets_gradients;
  FixedArray<bool> keeps_slice;        ///< by unit: see [Note: Kept slices]
  std::size_t last_that_may_drop = 0;  ///< the last use of a unit that forward may drop and backward uses; size(): none
  PrefetchLists ahead;                 ///< as declared

  PathPlan() = default;
  PathPlan(PathPlan const&) = delete;
  [[gnu::cold, gnu::noinline]] ~PathPlan() = default;
};

/// Consecutive units of a list.
struct UnitsOfUse {
  std::uint32_t const *first, *last;
  std::uint32_t const* begin() const { return first; }
  std::uint32_t const* end() const { return last; }
};

/// Units and paths of a step. Members that take a use count it in the path.
class UnitPlan {
 public:
  [[gnu::cold, gnu::noinline]] explicit UnitPlan(StepInput const& of)
      : input(of), units(of.units.size()), paths(1 + of.paths.size()) {
    declare_paths();
    for (std::size_t u = 0; u < units.size(); ++u) describe(units[u] = input.units[u], u);
    group_units();
    frozen_uses_ = FixedArray<bool>(paths[0].order.size());
    for (auto const use : input.frozen_uses) frozen_uses_[use] = true;
    for (auto& path : paths) find_backward_end(path);
    for (auto& path : paths) find_drops(path);
    give_scratch();
  }
  explicit UnitPlan(StepInput&&) = delete;  // it keeps a reference
  UnitPlan(UnitPlan const&) = delete;

  // Units.

  /// The unit whose uses are the unit's.
  std::size_t first_unit(std::size_t unit) const {
    auto const first = units[unit].first;
    return first == step::Unit::none ? unit : first;
  }
  /// A unit that has uses of its own, then those beside it.
  UnitsOfUse beside(std::size_t first) const {
    return {units_of_use_.begin() + begins_[first], units_of_use_.begin() + begins_[first + 1]};
  }
  /// Whether the unit's full parameters lie in a slot: they are gathered, or cast where one rank has all of them.
  bool gathers(std::size_t unit) const { return !units[unit].reads_masters; }
  bool own_gather_slot(std::size_t unit) const {
    return !units[unit].reshards_after_forward || input.allow_keep_unsharded || returns_in_some_path(unit);
  }
  /// Whether every unit that a backward pass of the path can leave unsharded has a slot of its own.
  bool all_own_gather_slots(PathPlan const& path) const {
    for (std::size_t unit = 0; unit < units.size(); ++unit)
      if (gathers(unit) && path.in_backward[unit] && !own_gather_slot(unit)) return false;
    return true;
  }
  bool own_gradient_slot(std::size_t unit) const { return waits_in_slot(unit) || returns_in_some_path(unit); }
  /// Whether the unit's gradients wait in the slot that backward has written.
  bool waits_in_slot(std::size_t unit) const {
    return input.allow_no_sync && writes_fp32(unit) && !units[unit].writes_shards;
  }
  /// Whether gradients of some units wait is no property of a micro-step, but of each unit: see step::Condition.
  bool waits_by_unit() const { return paths.size() > 1; }
  /// Whether the unit's gradients are rounded when it is reduced. Those of a unit that no other rank shares travel in
  /// buckets.
  bool is_rounded(std::size_t unit) const {
    return input.wire && !units[unit].writes_shards && units[unit].world() > 1;
  }
  /// The waiting_flags of a micro-step that finds gradients of the unit unreduced on this rank. `group_sums_wait` is
  /// one of them if the unit is reduced over replicas only.
  StepFlags unreduced_flags(std::size_t unit) const {
    return reduces_in_group(unit) ? gradients_wait : gradients_wait | group_sums_wait;
  }
  /// The sync_flags of a micro-step that reduces the unit's gradients, at least within its shard group.
  StepFlags reducing_flags(std::size_t unit) const {
    return reduces_in_group(unit) ? syncs_group | syncs_all : syncs_all;
  }

  // Uses of a path.

  /// The units of a use: the first, then those beside it.
  UnitsOfUse units_of(PathPlan const& path, std::size_t use) const { return beside(path.order.unit(use)); }
  /// Whether the unit, one of the use's, stays unsharded when this use's forward ends. If no use in a backward pass
  /// follows, a unit is kept until its last use at most.
  bool keeps_after_forward(PathPlan const& path, std::size_t use, std::size_t unit, PassKind kind) const {
    bool const in_backward = kind != PassKind::evaluation && path.in_backward[unit];
    bool const used_again = !path.order.last_use_of_unit(use);
    if (path.order.returns(use)) return input.keep_root && (used_again || in_backward);
    if (used_again) return true;
    if (!in_backward) return false;
    return !may_drop(path, use, unit) || (input.keep_last && use == path.last_that_may_drop);
  }
  /// Whether this is the last use of its units in a backward pass that ends with the use `end`.
  static bool is_last_in_backward(PathPlan const& path, std::size_t use, std::size_t end) {
    auto const earlier = path.order.previous_use(use);
    return earlier == UseOrder::none || earlier < end;
  }

  StepInput const& input;
  FixedArray<step::Unit> units;
  FixedArray<PathPlan> paths;  ///< the declared order comes first
  /// Bytes of the buffer for gradients that modules write although they are not wanted, in uses in backward passes.
  std::int64_t scratch_bytes = 0;
  std::int64_t accumulator_elements = 0;  ///< of all units

 private:
  [[gnu::cold]] void declare_paths() {
    auto& declared = paths[0].order;
    for (std::size_t unit = 0; input.uses.empty() && unit < units.size(); ++unit)
      if (input.units[unit].first == step::Unit::none) declared.declare(unit, "");
    for (auto const unit : input.uses) declared.declare(unit, "");
    for (std::size_t use = 0; use < input.segments.size(); ++use) declared.set_segment(use, input.segments[use]);
    for (std::size_t path = 0; path < paths.size(); ++path) {
      auto& at = paths[path];
      if (path > 0) at.order = UseOrder(declared, input.paths[path - 1].name, input.paths[path - 1].uses);
      at.ahead = path == 0 ? input.prefetch : input.paths[path - 1].prefetch;
      if (at.ahead.forward.empty()) at.ahead = prefetch_by_depth(at.order, 1, 1, empty_units(input));
    }
  }
  /// Lists units that have uses of their own, each before those beside it.
  [[gnu::cold]] void group_units() {
    begins_ = FixedArray<std::size_t>(units.size() + 1);
    for (std::uint32_t u = 0; u < units.size(); ++u) ++begins_[first_unit(u) + 1];
    for (std::uint32_t u = 0; u < units.size(); ++u) begins_[u + 1] += begins_[u];
    units_of_use_ = FixedArray<std::uint32_t>(units.size());
    auto next = begins_;
    for (bool const beside : {false, true})
      for (std::uint32_t u = 0; u < units.size(); ++u)
        if (beside == (first_unit(u) != u)) units_of_use_[next[first_unit(u)]++] = u;
  }
  [[gnu::cold]] void describe(step::Unit& unit, std::size_t index) {
    if (unit.name.empty()) unit.name = std::to_string(index);
    unit.gather_slot = unit.kept_slot = unit.gradient_slot = step::Unit::none;
    unit.staging_slot = 0;
    unit.shard_ranks = unit.sharded ? input.shards : 1;
    unit.replicas = input.shards * input.replicas / unit.shard_ranks;
    unit.reads_masters = unit.empty() || (unit.shard_ranks == 1 && unit.types.parameter == unit.gathered_type());
    unit.writes_shards = !unit.trains() || (unit.shard_ranks == 1 && writes_fp32(index) && !input.offload.gradients);
    unit.waits_for_replicas = unit.sharded && unit.replicas > 1 && !unit.writes_shards && input.allow_no_replica_sync;
    unit.accumulates = input.allow_no_sync && !writes_fp32(index) && !unit.writes_shards;
    if (unit.accumulates) accumulator_elements += unit.elements;
  }

  /// The lowest use of a module that trains; 0 if nothing below it is frozen. If none trains, backward has no use.
  [[gnu::cold]] void find_backward_end(PathPlan& path) const {
    auto const uses = path.order.size();
    bool some_frozen = false;
    std::size_t end = 0;
    for (; end < uses; ++end) {
      bool trains = false;
      for (auto const u : units_of(path, end)) {
        trains = trains || units[u].trains();
        some_frozen = some_frozen || units[u].frozen;
      }
      some_frozen = some_frozen || is_frozen(path, end);
      if (trains && !is_frozen(path, end)) break;
    }
    if (!some_frozen) end = 0;
    path.backward_end = end;
    path.in_backward = path.writes = path.sets_gradients = path.keeps_slice = FixedArray<bool>(units.size());
    for (auto use = end; use < uses; ++use)
      for (auto const u : units_of(path, use)) {
        path.in_backward[u] = true;
        path.writes[u] = path.writes[u] || (units[u].trains() && !is_frozen(path, use));
      }
    auto const lacks = lacking_units(path);
    for (std::size_t u = 0; u < units.size(); ++u)
      path.sets_gradients[u] = units[u].sets_gradients && !lacks[first_unit(u)];
    if (end < uses && path.order.segment(end) != UseOrder::none)
      for (auto use = path.order.segment(end); use < end; ++use)
        for (auto const u : units_of(path, use)) path.in_backward[u] = true;
  }
  /// The use of the path is one of a module whose tensors are all frozen.
  bool is_frozen(PathPlan const& path, std::size_t use) const { return frozen_uses_[path.order.declared(use)]; }
  /// @return by unit: whether a backward pass of the path leaves out a use whose module has tensors that train
  [[gnu::cold]] FixedArray<bool> lacking_units(PathPlan const& path) const {
    FixedArray<bool> lacks(units.size());
    if (&path == &paths[0]) return lacks;
    auto const& declared = paths[0].order;
    auto done = frozen_uses_;
    for (auto at = path.backward_end; at < path.order.size(); ++at) done[path.order.declared(at)] = true;
    for (std::size_t use = 0; use < declared.size(); ++use)
      if (!done[use]) lacks[declared.unit(use)] = true;
    return lacks;
  }
  /// The last use that may drop, and the units of which a slice stays after forward.
  [[gnu::cold]] void find_drops(PathPlan& path) const {
    auto const uses = path.order.size();
    auto const backward_may_find_it_dropped = [&](std::size_t use) {
      for (auto const u : units_of(path, use))
        if (may_drop(path, use, u) && path.in_backward[u]) return true;
      return false;
    };
    path.last_that_may_drop = uses;
    for (auto use = uses; use-- > 0 && path.last_that_may_drop == uses;)
      if (backward_may_find_it_dropped(use)) path.last_that_may_drop = use;
    for (std::size_t use = 0; input.reshard_ranks > 0 && use < uses; ++use)
      for (auto const u : units_of(path, use))
        path.keeps_slice[u] =
            path.keeps_slice[u] || (units[u].sharded && path.in_backward[u] && may_drop(path, use, u) &&
                                    !keeps_after_forward(path, use, u, PassKind::forward));
  }
  [[gnu::cold]] void give_scratch() {
    for (std::size_t u = 0; u < units.size(); ++u) {
      auto& unit = units[u];
      unit.in_backward = false;
      bool used_in_backward = false;
      for (auto const& path : paths) {
        unit.in_backward = unit.in_backward || path.in_backward[u];
        auto const last = path.order.last_use(first_unit(u));
        used_in_backward = used_in_backward || (last != UseOrder::none && last >= path.backward_end);
      }
      if (!unit.skips_gradients && ((unit.frozen && used_in_backward) || input.allow_frozen_parameters))
        scratch_bytes = std::max(scratch_bytes, align_up(unit.gradient_bytes(unit.elements), 256));
    }
  }

  bool writes_fp32(std::size_t unit) const { return units[unit].types.gradient == DType::f32; }
  bool returns_in_some_path(std::size_t unit) const {
    for (auto const& path : paths)
      if (path.order.unit_returns(first_unit(unit))) return true;
    return false;
  }
  /// @return whether no_replica_sync still reduces the unit: it has no replicas, or it is sharded
  bool reduces_in_group(std::size_t unit) const { return units[unit].sharded || units[unit].replicas == 1; }
  /// Whether the unit, one of the use's, may be resharded when the use's forward ends.
  bool may_drop(PathPlan const& path, std::size_t use, std::size_t unit) const {
    return gathers(unit) && !path.order.returns(use) && units[unit].reshards_after_forward;
  }

  FixedArray<bool> frozen_uses_;            ///< by declared use: all tensors of its module are frozen
  FixedArray<std::uint32_t> units_of_use_;  ///< units that have uses of their own, each before those beside it
  FixedArray<std::size_t> begins_;          ///< by unit: where it is there; one more for the end
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
