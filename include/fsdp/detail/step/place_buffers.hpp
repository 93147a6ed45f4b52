// SPDX-License-Identifier: Apache-2.0
// The second stage of the step compiler: the buffers of a step, when each unit is gathered and dropped, and which slot
// it has.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/plan_units.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Buckets of NoShard: contiguous ranges of all gradients in the order in which backward completes them. Cuts elements
/// of `element_bytes` into ranges: the first of about `first_bytes`, the others of about `bucket_bytes` (both rounded
/// up to layout_alignment elements). A unit may be split, and several may be merged.
/// @param ends          of each unit, in elements
/// @param bucket_bytes  0: one bucket a unit
inline std::vector<Range> make_buckets(std::vector<std::int64_t> const& ends, std::size_t element_bytes,
                                       std::int64_t bucket_bytes, std::int64_t first_bytes) {
  std::vector<Range> buckets;
  auto const total = ends.empty() ? 0 : ends.back();
  std::int64_t begin = 0;
  if (bucket_bytes <= 0) {
    for (auto const end : ends) {
      buckets.push_back({begin, end});
      begin = end;
    }
    return buckets;
  }
  auto const elements = [&](std::int64_t bytes) {
    auto const size = static_cast<std::int64_t>(element_bytes);
    return align_up((bytes + size - 1) / size, layout_alignment);
  };
  while (begin < total) {
    auto const end = std::min(total, begin + elements(buckets.empty() ? first_bytes : bucket_bytes));
    buckets.push_back({begin, end});
    begin = end;
  }
  return buckets;
}

namespace detail {

/// Index of the first unit that ends after `range` begins. @param ends  where each unit ends, ascending
inline std::size_t first_place(std::vector<std::int64_t> const& ends, Range range) {
  return static_cast<std::size_t>(std::lower_bound(ends.begin(), ends.end(), range.begin + 1) - ends.begin());
}

/// A unit is gathered at a use.
struct PlannedGather {
  std::uint32_t unit = 0;
  std::uint32_t slot = Program::none;
  bool if_sharded = false;  ///< only if the pass begins with sharded parameters
};
/// The gathers before a use, and the drops after it, of one pass.
struct PlannedTurn {
  std::size_t use = 0;      ///< of the path
  bool recomputes = false;  ///< in a backward pass: the use is recomputed
  bool is_last = false;     ///< in a backward pass: its units are not used after it
  std::vector<PlannedGather> gathers;
  std::vector<std::uint32_t> drops;  ///< units
};
using PlannedPass = FixedArray<PlannedTurn>;

/// Buffers of one path.
struct PathBuffers {
  std::array<PlannedPass, pass_kinds.size()> passes;
  std::vector<std::uint32_t> gradient_slots;  ///< by unit: slot that backward writes its gradients to
  std::vector<std::uint32_t> buckets;         ///< completed by backward: indices of PlacedBuffers::buckets

  PathBuffers() = default;
  PathBuffers(PathBuffers const&) = delete;
  [[gnu::cold, gnu::noinline]] ~PathBuffers() = default;
};

/// All buffers of a step; see the members of the same names in Program.
struct PlacedBuffers {
  std::vector<Slot> gather_slots, kept_slots, gradient_slots, wires;
  std::uint32_t bucket_wire = Program::none;
  std::int64_t staged_masters = 0, staged_gradients = 0;
  std::vector<std::size_t> gradient_order;
  std::vector<std::int64_t> gradient_ends;  ///< end of each unit in this order, in elements
  std::vector<Range> buckets;
  step::Buffers cells;
  FixedArray<PathBuffers> paths;

  /// Wires that units take in turn.
  std::uint32_t wires_in_turn() const {
    return static_cast<std::uint32_t>(wires.size()) - (bucket_wire != Program::none ? 1 : 0);
  }
};

/// Sizes of units that take turns in shared slots.
///
/// [Note: Units of a module] A module's tensors of several kinds lie in several units, which are gathered and dropped
/// together. Units that take turns in shared slots are of one *size class*: the largest unit of each module takes turns
/// with the largest of others, the second largest with the second largest. So slots for all of a module's units are
/// hardly larger than the largest module.
struct SizeClasses {
  /// @param bytes  by unit: of its content; 0: it takes no turns
  [[gnu::cold]] SizeClasses(UnitPlan const& plan, std::vector<std::int64_t> const& bytes)
      : of_unit(bytes.size(), Program::none) {
    for (std::uint32_t u = 0; u < bytes.size(); ++u) {
      if (bytes[u] == 0) continue;
      std::uint32_t at = 0;  // units of its module that are larger, or as large and come before it
      for (auto const other : plan.beside(plan.first_unit(u)))
        if (bytes[other] > bytes[u] || (bytes[other] == bytes[u] && other < u)) ++at;
      of_unit[u] = at;
      while (largest.size() <= at) largest.push_back(0), units.push_back(0);
      largest[at] = std::max(largest[at], bytes[u]);
      ++units[at];
    }
  }

  std::vector<std::uint32_t> of_unit;  ///< by unit; Program::none: it takes no turns
  std::vector<std::int64_t> largest;   ///< by class: bytes of a slot
  std::vector<std::size_t> units;      ///< by class: number of units
};

/// Walks through the passes of a path, and notes at each use which units it gathers and drops.
class GatherWalk {
 public:
  [[gnu::cold]] GatherWalk(UnitPlan const& plan, PathPlan const& path, SizeClasses const& classes)
      : plan_(plan),
        path_(path),
        classes_(classes),
        gathered_(plan.units.size()),
        ahead_(plan.units.size()),
        used_(classes.largest.size()),
        most_(classes.largest.size()) {}

  /// Gathers all that an earlier backward pass may have left unsharded.
  void begin_unsharded() {
    for (std::uint32_t unit = 0; unit < gathered_.size(); ++unit)
      if (plan_.gathers(unit) && path_.in_backward[unit]) gather(unit);
  }
  /// @param ahead  by use: lists of uses whose units are gathered ahead
  /// @param cut    shortens these lists where they exceed max_ahead_bytes
  [[gnu::cold]] PlannedPass forward(PassKind kind, std::vector<std::vector<std::size_t>>& ahead, bool cut) {
    PlannedPass pass(path_.order.size());
    for (std::size_t use = 0; use < pass.size(); ++use) {
      auto& turn = pass[use];
      turn.use = use;
      begin(turn, ahead[use], cut);
      for (auto const u : plan_.units_of(path_, use))
        if (plan_.gathers(u) && !plan_.keeps_after_forward(path_, use, u, kind)) drop(u), turn.drops.push_back(u);
    }
    return pass;
  }
  /// @param kind  backward or frozen_backward
  [[gnu::cold]] PlannedPass backward(PassKind kind, PrefetchLists& ahead) {
    auto const& order = path_.order;
    auto const end = kind == PassKind::backward ? path_.backward_end : 0;
    auto const turns = order.backward_turns(end);
    PlannedPass pass(turns.size());
    std::vector<std::size_t> no_list;
    for (std::size_t i = 0; i < turns.size(); ++i) {
      auto& turn = pass[i];
      turn.use = turns[i] % order.size();
      turn.recomputes = turns[i] != turn.use;
      auto& list = !turn.recomputes          ? ahead.backward[turn.use]
                   : ahead.recompute.empty() ? no_list
                                             : ahead.recompute[turn.use];
      std::size_t kept = 0;
      for (auto const next : list)
        if (comes_after(turn, next, end)) list[kept++] = next;
      while (list.size() > kept) list.pop_back();
      begin(turn, list, true);
      turn.is_last = turn.recomputes ? turn.use < end && order.last_use_of_unit(turn.use)
                                     : UnitPlan::is_last_in_backward(path_, turn.use, end);
      if (!turn.is_last) continue;
      for (auto const u : plan_.units_of(path_, turn.use))
        if (plan_.gathers(u)) drop(u), turn.drops.push_back(u);
    }
    return pass;
  }
  /// Raises each element of `most` to the largest number of units of its size class that were unsharded at a time.
  void raise(std::vector<std::size_t>& most) const {
    for (std::size_t at = 0; at < most.size(); ++at) most[at] = std::max(most[at], most_[at]);
  }

 private:
  /// Begins a use: gathers its units, then those of `ahead`.
  [[gnu::cold]] void begin(PlannedTurn& turn, std::vector<std::size_t>& ahead, bool cut) {
    auto const begin_gathers = [&](std::size_t of_use, bool is_ahead) {
      for (auto const u : plan_.units_of(path_, of_use)) {
        if (plan_.gathers(u) && !gathered_[u]) {
          gather(u);
          turn.gathers.push_back({u});
          set_ahead(u, is_ahead);
        }
        if (!is_ahead) set_ahead(u, false);
      }
    };
    begin_gathers(turn.use, false);
    std::size_t taken = 0;
    for (; taken < ahead.size(); ++taken) {
      if (cut && exceeds_cap(ahead[taken])) break;
      begin_gathers(ahead[taken], true);
    }
    while (cut && ahead.size() > taken) ahead.pop_back();
  }
  /// @return whether what the use `next` lacks and the units gathered ahead so far exceed max_ahead_bytes
  bool exceeds_cap(std::size_t next) const {
    if (plan_.input.max_ahead_bytes == 0) return false;
    std::int64_t lacking = 0;
    for (auto const u : plan_.units_of(path_, next))
      if (plan_.gathers(u) && !gathered_[u]) lacking += full_bytes(u);
    return lacking > 0 && lacking + ahead_bytes_ > plan_.input.max_ahead_bytes;
  }
  /// @return whether a backward pass that ends with the use `end` comes to `next` after this turn, which has the use in
  /// its prefetch list. Uses below the end are recomputed if their segment has the end.
  bool comes_after(PlannedTurn const& turn, std::size_t next, std::size_t end) const {
    auto const segment = path_.order.segment(next);
    if (next >= end) return true;
    return segment != UseOrder::none && segment == path_.order.segment(end) &&
           (segment != path_.order.segment(turn.use) || (turn.recomputes && next > turn.use));
  }

  void gather(std::uint32_t unit) {
    gathered_[unit] = true;
    if (auto const at = classes_.of_unit[unit]; at != Program::none) most_[at] = std::max(most_[at], ++used_[at]);
  }
  void drop(std::uint32_t unit) {
    auto const at = classes_.of_unit[unit];
    if (gathered_[unit] && at != Program::none) --used_[at];
    gathered_[unit] = false;
    set_ahead(unit, false);
  }
  void set_ahead(std::uint32_t unit, bool ahead) {
    if (ahead_[unit] == ahead) return;
    ahead_bytes_ += ahead ? full_bytes(unit) : -full_bytes(unit);
    ahead_[unit] = ahead;
  }
  std::int64_t full_bytes(std::uint32_t unit) const {
    return plan_.units[unit].param_bytes(plan_.units[unit].elements);
  }

  UnitPlan const& plan_;
  PathPlan const& path_;
  SizeClasses const& classes_;
  FixedArray<bool> gathered_;             ///< by unit
  FixedArray<bool> ahead_;                ///< by unit: it was gathered ahead, and its use has not begun
  std::int64_t ahead_bytes_ = 0;          ///< of the full parameters of these units
  std::vector<std::size_t> used_, most_;  ///< by size class: units that are unsharded, at present and at most
};

/// Gives each gather of a path its slot.
class GatherSlots {
 public:
  /// @param own_slots  number of slots that one unit has for itself. Shared slots follow them, in order of size class
  /// @param shared  number of shared slots, by size class
  GatherSlots(UnitPlan const& plan, SizeClasses const& classes, std::size_t own_slots,
              std::vector<std::size_t> const& shared)
      : plan_(&plan), classes_(&classes), shared_(&shared), first_(shared.size()), position_(shared.size()) {
    auto slots = own_slots;
    for (std::size_t at = 0; at < shared.size(); ++at) first_[at] = std::exchange(slots, slots + shared[at]);
    busy_ = FixedArray<bool>(slots);
    slots_ = std::vector<std::uint32_t>(plan.units.size(), Program::none);
  }

  [[gnu::cold]] void assign(PlannedPass& pass) {
    for (auto& turn : pass) {
      for (auto& gather : turn.gathers) gather.slot = take(gather.unit);
      for (auto const unit : turn.drops) drop(unit);
    }
  }

 private:
  /// The unit's own slot, or the next one of its class, or the first free one after it, because prefetch lists may
  /// overtake.
  std::uint32_t take(std::uint32_t unit) {
    auto& slot = slots_[unit] = plan_->units[unit].gather_slot;
    if (slot != Program::none) return slot;
    auto const at = classes_->of_unit[unit];
    auto& position = position_[at];
    while (busy_[first_[at] + position % (*shared_)[at]]) ++position;
    slot = static_cast<std::uint32_t>(first_[at] + position++ % (*shared_)[at]);
    busy_[slot] = true;
    return slot;
  }
  void drop(std::uint32_t unit) {
    if (slots_[unit] != Program::none) busy_[slots_[unit]] = false;
    slots_[unit] = Program::none;
  }

  UnitPlan const* plan_;
  SizeClasses const* classes_;
  std::vector<std::size_t> const* shared_;
  std::vector<std::size_t> first_, position_;  ///< by class: its first slot; the next one of its slots
  std::vector<std::uint32_t> slots_;           ///< by unit; none: it is sharded
  FixedArray<bool> busy_;                      ///< by slot
};

/// Fills a PlacedBuffers. Sets the slots of units.
///
/// [Note: Wires] If ranks sum in a narrower type than backward writes, gradients are rounded into a send buffer
/// (*wire*), and the wire is reduced. The slot is free after rounding. The reduce stream reduces one unit after
/// another, so one wire is enough for all units. With replicas there are two wires: one unit is reduce-scattered while
/// the unit before it is all-reduced. Buckets are rounded on the replicate stream, into a wire of their own.
class BufferPlacer {
 public:
  [[gnu::cold]] explicit BufferPlacer(UnitPlan& plan) : plan_(plan) {
    placed_.paths = FixedArray<PathBuffers>(plan.paths.size());
  }

  [[gnu::cold]] PlacedBuffers place() {
    order_completion();
    place_wires();
    place_own_slots();
    place_staged();
    place_gathered();
    place_gradients();
    placed_.cells.set_slots(step::Pool::gather, placed_.gather_slots.size());
    placed_.cells.set_slots(step::Pool::kept_slice, placed_.kept_slots.size());
    placed_.cells.set_slots(step::Pool::gradient_slot, placed_.gradient_slots.size());
    placed_.cells.set_slots(step::Pool::wire, placed_.wires.size());
    return std::move(placed_);
  }

 private:
  [[gnu::cold]] void order_completion() {
    auto const& declared = plan_.paths[0];
    std::vector<std::size_t> reduced_from_slots;
    std::vector<std::int64_t> elements;
    std::int64_t end = 0;
    auto const last = declared.backward_end;
    for (auto use = declared.order.size(); use-- > last;) {
      if (!UnitPlan::is_last_in_backward(declared, use, last)) continue;
      for (auto const unit : plan_.units_of(declared, use)) {
        if (!plan_.units[unit].trains()) continue;
        auto const direct = plan_.units[unit].writes_shards;
        (direct ? placed_.gradient_order : reduced_from_slots).push_back(unit);
        if (!direct) continue;
        elements.push_back(plan_.units[unit].elements);
        placed_.gradient_ends.push_back(end += elements.back());
      }
    }
    auto const& input = plan_.input;
    if (input.shards * input.replicas > 1)
      placed_.buckets =
          make_buckets(placed_.gradient_ends, sizeof(float), input.bucket_bytes, input.first_bucket_bytes);
    placed_.cells = {plan_.units.size(), elements, placed_.gradient_order, reduced_from_slots, placed_.buckets};
    auto const count = placed_.buckets.size();
    for (std::size_t path = 0; path < plan_.paths.size(); ++path) place_buckets(path, count);
    for (auto const unit : reduced_from_slots) placed_.gradient_order.push_back(unit);
  }
  /// The parts of declared buckets that belong to units of a path: consecutive ones together. They begin and end where
  /// a unit or a declared bucket does.
  /// @param declared  number of declared buckets, which lie in ascending order; missing parts are added after them
  [[gnu::cold]] void place_buckets(std::size_t path, std::size_t declared) {
    auto& buckets = placed_.buckets;
    auto const& ends = placed_.gradient_ends;
    for (std::size_t bucket = 0; bucket < declared; ++bucket) {
      auto const add = [&](Range part) {
        if (part.size() == 0) return;
        auto at = bucket;
        if (!(buckets[at] == part))
          for (at = declared; at < buckets.size() && !(buckets[at] == part);) ++at;
        if (at == buckets.size()) buckets.push_back(part);
        placed_.paths[path].buckets.push_back(static_cast<std::uint32_t>(at));
      };
      auto const whole = buckets[bucket];
      Range part{whole.begin, whole.begin};
      for (auto i = first_place(ends, whole); i < ends.size(); ++i) {
        Range const in_bucket{std::max(i == 0 ? 0 : ends[i - 1], whole.begin), std::min(ends[i], whole.end)};
        if (in_bucket.begin >= in_bucket.end) break;
        if (plan_.paths[path].writes[placed_.gradient_order[i]]) {
          part.end = in_bucket.end;
        } else {
          add(part);
          part = {in_bucket.end, in_bucket.end};
        }
      }
      add(part);
    }
  }

  [[gnu::cold]] void place_wires() {
    if (!plan_.input.wire) return;
    auto const element = size_of(*plan_.input.wire);
    std::int64_t largest = 0, largest_bucket = 0;
    std::size_t rounded = 0;
    bool replicated = false;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      if (!plan_.is_rounded(u)) continue;
      auto const& unit = plan_.units[u];
      largest = std::max(largest, unit.elements);
      replicated = replicated || (unit.replicas > 1 && !unit.waits_for_replicas);
      ++rounded;
    }
    for (std::size_t wire = 0; wire < std::min<std::size_t>(rounded, replicated ? 2 : 1); ++wire)
      add(placed_.wires, {slot_bytes(largest, element)});
    for (auto const& bucket : placed_.buckets) largest_bucket = std::max(largest_bucket, bucket.size());
    if (largest_bucket > 0) placed_.bucket_wire = add(placed_.wires, {slot_bytes(largest_bucket, element)});
  }

  /// Slots that one unit has for itself, and those of kept slices.
  [[gnu::cold]] void place_own_slots() {
    for (std::uint32_t u = 0; u < plan_.units.size(); ++u) {
      auto& unit = plan_.units[u];
      if (plan_.gathers(u) && plan_.own_gather_slot(u))
        unit.gather_slot = add(placed_.gather_slots, {parameter_bytes(u), u});
      if (!unit.writes_shards && plan_.own_gradient_slot(u))
        unit.gradient_slot = add(placed_.gradient_slots, {gradient_bytes(u), u});
    }
    auto const ranks = plan_.input.reshard_ranks;
    for (auto const& path : plan_.paths)
      for (std::size_t use = 0; use < path.order.size(); ++use)
        for (auto const u : plan_.units_of(path, use)) {
          auto& unit = plan_.units[u];
          if (!path.keeps_slice[u] || unit.kept_slot != Program::none) continue;
          auto const element = size_of(unit.types.parameter);
          unit.kept_slot = add(placed_.kept_slots, {slot_bytes(unit.elements / ranks, element), u});
        }
  }
  /// Assigns the staging slots in turn to units that train.
  [[gnu::cold]] void place_staged() {
    std::uint32_t turn = 0;
    for (auto& unit : plan_.units) {
      if (!unit.trains()) continue;
      unit.staging_slot = turn++ % 2;
      std::int64_t const bytes = unit.shard() * static_cast<std::int64_t>(sizeof(float));
      if (unit.offloads_masters) placed_.staged_masters = std::max(placed_.staged_masters, bytes);
      if (plan_.input.offload.gradients) placed_.staged_gradients = std::max(placed_.staged_gradients, bytes);
    }
  }

  std::int64_t parameter_bytes(std::uint32_t u) const {
    return slot_bytes(plan_.units[u].elements, size_of(plan_.units[u].types.parameter));
  }
  std::int64_t gradient_bytes(std::uint32_t u) const {
    return slot_bytes(plan_.units[u].elements, size_of(plan_.units[u].types.gradient));
  }

  /// Decides what each pass gathers and drops, and adds as many shared slots as are needed at a time.
  [[gnu::cold]] void place_gathered() {
    std::vector<std::int64_t> in_turn(plan_.units.size());
    for (std::uint32_t u = 0; u < in_turn.size(); ++u)
      if (plan_.gathers(u) && !plan_.own_gather_slot(u)) in_turn[u] = parameter_bytes(u);
    SizeClasses const classes(plan_, in_turn);
    auto const own_slots = placed_.gather_slots.size();
    std::vector<std::size_t> shared(classes.largest.size());
    for (std::size_t path = 0; path < plan_.paths.size(); ++path)
      plan_passes(plan_.paths[path], classes, placed_.paths[path], shared);
    for (std::size_t at = 0; at < shared.size(); ++at)
      for (std::size_t slot = 0; slot < shared[at]; ++slot) add(placed_.gather_slots, {classes.largest[at]});
    for (auto& path : placed_.paths) {
      GatherSlots slots(plan_, classes, own_slots, shared), evaluated = slots;
      slots.assign(pass_of(path, PassKind::forward));
      auto frozen_backward = slots;
      slots.assign(pass_of(path, PassKind::backward));
      frozen_backward.assign(pass_of(path, PassKind::frozen_backward));
      evaluated.assign(pass_of(path, PassKind::evaluation));
    }
  }
  static PlannedPass& pass_of(PathBuffers& path, PassKind kind) { return path.passes[static_cast<std::size_t>(kind)]; }
  /// Plans the gathers and drops of a path. @param most  raised to the numbers of shared slots that they use
  [[gnu::cold]] void plan_passes(PathPlan const& path, SizeClasses const& classes, PathBuffers& placed,
                                 std::vector<std::size_t>& most) const {
    auto lists = path.ahead, frozen_lists = path.ahead;
    GatherWalk walk(plan_, path, classes), evaluated = walk, resident = walk;
    auto forward = walk.forward(PassKind::forward, lists.forward, true);
    // A pass that finds parameters of an earlier pass has fewer gathers. Nothing else changes.
    if (plan_.all_own_gather_slots(path) && placed_.kept_slots.empty()) {
      resident.begin_unsharded();
      auto const fewer = resident.forward(PassKind::forward, lists.forward, false);
      for (std::size_t turn = 0; turn < forward.size(); ++turn) restrict_to_sharded(forward[turn], fewer[turn]);
    }
    pass_of(placed, PassKind::forward) = std::move(forward);
    auto frozen_backward = walk;
    pass_of(placed, PassKind::backward) = walk.backward(PassKind::backward, lists);
    if (plan_.input.allow_frozen_parameters)
      pass_of(placed, PassKind::frozen_backward) = frozen_backward.backward(PassKind::frozen_backward, frozen_lists);
    pass_of(placed, PassKind::evaluation) = evaluated.forward(PassKind::evaluation, lists.forward, false);
    for (auto const* walked : {&walk, &evaluated, &frozen_backward}) walked->raise(most);
  }
  /// Gathers that are missing in `fewer`, a subsequence, run only if the pass starts sharded.
  [[gnu::cold]] static void restrict_to_sharded(PlannedTurn& all, PlannedTurn const& fewer) {
    std::size_t next = 0;
    for (auto& gather : all.gathers) {
      gather.if_sharded = next == fewer.gathers.size() || fewer.gathers[next].unit != gather.unit;
      if (!gather.if_sharded) ++next;
    }
    FSDP_EXPECTS(next == fewer.gathers.size(),
                 "a pass over unsharded parameters gathers a unit that a pass over sharded ones does not gather");
  }

  /// Adds two slots to each class: one is filled while the other is reduced.
  [[gnu::cold]] void place_gradients() {
    std::vector<std::int64_t> in_turn(plan_.units.size());
    for (std::uint32_t u = 0; u < in_turn.size(); ++u)
      if (!plan_.units[u].writes_shards && !plan_.own_gradient_slot(u)) in_turn[u] = gradient_bytes(u);
    SizeClasses const classes(plan_, in_turn);
    std::vector<std::uint32_t> first;  // by class: its first slot
    for (std::size_t at = 0; at < classes.largest.size(); ++at) {
      first.push_back(static_cast<std::uint32_t>(placed_.gradient_slots.size()));
      for (std::size_t slot = 0; slot < std::min<std::size_t>(classes.units[at], 2); ++slot)
        add(placed_.gradient_slots, {classes.largest[at]});
    }
    for (std::size_t path = 0; path < plan_.paths.size(); ++path)
      assign_gradient_slots(plan_.paths[path], classes, first, placed_.paths[path].gradient_slots);
  }
  /// Assigns the shared slots to units in turn, in the order of backward. A slot is zeroed if one of its units adds to
  /// zeroes.
  [[gnu::cold]] void assign_gradient_slots(PathPlan const& path, SizeClasses const& classes,
                                           std::vector<std::uint32_t> const& first, std::vector<std::uint32_t>& slots) {
    slots = std::vector<std::uint32_t>(plan_.units.size(), Program::none);
    std::vector<std::uint32_t> taken(first.size());
    for (auto use = path.order.size(); use-- > 0;) {
      if (!path.order.last_use_of_unit(use)) continue;
      for (auto const u : plan_.units_of(path, use)) {
        auto const& unit = plan_.units[u];
        if (unit.writes_shards) continue;
        auto& slot = slots[u] = unit.gradient_slot;
        if (slot == Program::none) {
          auto const at = classes.of_unit[u];
          slot = first[at] + taken[at]++ % static_cast<std::uint32_t>(std::min<std::size_t>(classes.units[at], 2));
        }
        placed_.gradient_slots[slot].zeroed = placed_.gradient_slots[slot].zeroed || !path.sets_gradients[u];
      }
    }
  }

  static std::uint32_t add(std::vector<Slot>& slots, Slot slot) {
    slots.push_back(slot);
    return static_cast<std::uint32_t>(slots.size() - 1);
  }

  UnitPlan& plan_;
  PlacedBuffers placed_;
};

/// @param plan  gets the slots of its units
[[gnu::cold]] inline PlacedBuffers place_buffers(UnitPlan& plan) { return BufferPlacer(plan).place(); }

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
