// SPDX-License-Identifier: Apache-2.0
// The third stage of the step compiler: the operations of each thing that happens at a use (a gather, a drop, a
// computation, a reduction), and those of norms and updates between passes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/place_buffers.hpp"
#include "fsdp/detail/step/plan_units.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Progress of a backward pass that writes gradient shards: finds the buckets that are complete.
class BucketProgress {
 public:
  [[gnu::cold]] BucketProgress(PlacedBuffers const& buffers, PathBuffers const& path, std::size_t units)
      : buffers_(&buffers),
        path_(&path),
        places_(units),
        written_(buffers.gradient_ends.size()),
        reduced_(path.buckets.size()) {
    for (std::size_t place = 0; place < written_.size(); ++place) places_[buffers.gradient_order[place]] = place;
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
      for (auto i = first_place(ends(), bucket(k)); overlaps(k, i); ++i)
        if (is_reduced(i)) reduced(static_cast<std::uint32_t>(buffers_->gradient_order[i]));
    }
  }

 private:
  Range bucket(std::size_t k) const { return buffers_->buckets[path_->buckets[k]]; }
  std::vector<std::int64_t> const& ends() const { return buffers_->gradient_ends; }
  std::int64_t begin(std::size_t place) const { return place == 0 ? 0 : ends()[place - 1]; }
  bool overlaps(std::size_t k, std::size_t place) const {
    return k < reduced_.size() && place < written_.size() && bucket(k).begin < ends()[place] &&
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
    for (auto i = first_place(ends(), bucket(k)); overlaps(k, i); ++i)
      if (!written_[i]) return false;
    return true;
  }
  bool is_reduced(std::size_t place) const {
    for (auto k = first_bucket(place); overlaps(k, place); ++k)
      if (!reduced_[k]) return false;
    return true;
  }

  PlacedBuffers const* buffers_;
  PathBuffers const* path_;
  FixedArray<std::size_t> places_;      ///< by unit whose gradient shard backward writes: its place in `ends`
  FixedArray<bool> written_, reduced_;  ///< by place; by bucket of the path
};

/// [Note: Ways to reduce] The options and the unit's strategy choose between these:
/// - Gradients in a slot: backward writes a slot. If several ranks share the unit, the slot is reduce-scattered in
/// place.
///   If it has replicas, the own slice is all-reduced. The result times 1/W is added to the gradient shard. The slot is
///   zeroed, unless the modules of all its units begin their sums themselves.
/// - EngineOptions::allow_no_replica_sync: the slices are summed in a partial shard of fp32, and the partial shard is
///   all-reduced. The slot is free once the group has read it.
/// - Gradients in the shard (*direct*), if no other rank shares the unit and gradients are fp32 (NoShard, or a world of
///   one): backward writes the gradient shard. Buckets of it are all-reduced in place and multiplied by 1/W.
/// - EngineOptions::reduce_dtype: gradients are first rounded into a wire, and the wire is reduced: see [Note: Wires].
///
/// [Note: Gradients that wait] Unreduced gradients in fp32 stay in their slot, and backward adds to them. Narrower ones
/// are summed in a full-size accumulator of fp32. The sum is rounded once, when the unit is reduced.
///
/// [Note: Kept slices] With EngineOptions::reshard_ranks, compute copies a slice of a unit when the unit's forward
/// ends. Backward gathers these slices from a few consecutive ranks, not the shards of all ranks.
///
/// [Note: Offloading] Moments, master shards and gradient shards may each lie in host memory. The device has two
/// staging slots of the size of the largest unit; units that train take turns in them. Before a unit is updated, the
/// copy stream is told to fetch the next unit's state, so that it comes while this unit is updated. After the update
/// the state is stored. If masters are offloaded, the device keeps a shard in the parameters' type: gathers read it,
/// and each update writes it. A gradient shard is stored when its reduction is complete; further micro-steps fetch it,
/// add to it and store it again. Norms read it in host memory.
class OperationWriter {
 public:
  /// @param path  index among the paths
  OperationWriter(UnitPlan const& plan, PlacedBuffers const& buffers, std::size_t path)
      : plan_(plan), buffers_(buffers), path_(plan.paths[path]), placed_(buffers.paths[path]) {}

  /// Writes the passes of the path.
  [[gnu::cold]] void write_passes(Program& program, std::size_t path) const {
    Slots slots(plan_.units.size(), Program::none);
    auto evaluated = slots;
    program.turns(PassKind::forward, path) = write_forward(PassKind::forward, slots);
    auto frozen_backward = slots;
    program.turns(PassKind::backward, path) = write_backward(PassKind::backward, slots);
    program.turns(PassKind::frozen_backward, path) = write_backward(PassKind::frozen_backward, frozen_backward);
    program.turns(PassKind::evaluation, path) = write_forward(PassKind::evaluation, evaluated);
  }
  /// Writes the unit's norm and update, and the moves of its state around them.
  [[gnu::cold]] void write_update(Program& p, std::uint32_t u) const {
    auto const& unit = plan_.units[u];
    auto const none = [&](Operations& to, Primitive primitive) { append(to, primitive, StreamKind::compute, u, {}); };
    none(p.fetches, Primitive::fetch);
    none(p.gradient_fetches, Primitive::fetch);
    none(p.stores, Primitive::store);
    none(p.reads, Primitive::norm);
    if (!unit.trains()) {
      none(p.norms, Primitive::norm);
      if (unit.empty()) return none(p.updates, Primitive::update);
      // Updates serve imports too, which follow passes of all kinds.
      append(p.updates, Primitive::update, StreamKind::compute, u, {adds(buffers_.cells.of_unit(Pool::master, u))})
          .records = any_flags;
      return;
    }
    auto const shard = unit.shard();
    auto const master = adds(buffers_.cells.of_unit(Pool::master, u));
    append(p.norms, Primitive::norm, StreamKind::compute, u, {reads(gradient_shard(u))}).moving(shard, 0);
    if (plan_.waits_by_unit() && plan_.input.zeros_for_absent)
      append(p.absent, Primitive::zero, StreamKind::compute, u, {writes(gradient_shard(u))})
          .moving(shard, shard * fp32)
          .unless_begun = true;
    bool const offloads = plan_.input.offload.moments || unit.offloads_masters;
    auto const home = buffers_.cells.of_unit(Pool::offloaded, u),
               staged = Buffers::staged(Pool::staged, unit.staging_slot);
    auto const moments = adds(offloads ? staged : buffers_.cells.of_unit(Pool::moments, u));
    append(p.updates, Primitive::update, StreamKind::compute, u, {reads(gradient_on_device(u)), master, moments})
        .moving(shard, shard * fp32);
    if (plan_.input.offload.gradients) {
      p.gradient_fetches.pop_back();
      move_gradient(p.gradient_fetches, Primitive::fetch, u, any_flags);
    }
    if (!offloads) return;
    // The program does not know the optimizers: moments are counted as AdamW's in fp32.
    auto const moved = shard * fp32 * ((unit.offloads_masters ? 1 : 0) + (plan_.input.offload.moments ? 2 : 0));
    auto const replace = [&](Operations& to, Primitive primitive, StreamKind stream,
                             std::initializer_list<step::Access> accesses) {
      to.back() = step::make_operation(primitive, stream, u, accesses);
      to.back().moving(shard, moved).records = any_flags;  // for imports, and readers of masters
    };
    replace(p.fetches, Primitive::fetch, StreamKind::copy, {reads(home), writes(staged)});
    replace(p.stores, Primitive::store, StreamKind::copy, {reads(staged), writes(home)});
    if (unit.offloads_masters) replace(p.reads, Primitive::norm, StreamKind::compute, {reads(home)});
  }

 private:
  using Operation = step::Operation;
  using Operations = std::vector<Operation>;
  using Buffers = step::Buffers;
  using Cells = step::Cells;
  using Pool = step::Pool;
  using Primitive = step::Primitive;
  using Slots = std::vector<std::uint32_t>;  ///< by unit: of its full parameters; none: it is sharded, or reads masters
  static constexpr std::int64_t fp32 = sizeof(float);

  using Turn = Program::Turn;

  PlannedPass const& planned(PassKind kind) const { return placed_.passes[static_cast<std::size_t>(kind)]; }

  [[gnu::cold]] FixedArray<Turn> write_forward(PassKind kind, Slots& slots) const {
    FixedArray<Turn> turns(planned(kind).size());
    for (std::size_t i = 0; i < turns.size(); ++i) {
      auto& turn = turns[i];
      auto const& plan = planned(kind)[i];
      begin(turn, plan, slots, false);
      compute(turn, Primitive::forward, slots, false);
      for (auto const u : plan.drops) {
        if (kind == PassKind::forward && path_.keeps_slice[u]) keep_slice(turn.after, u, slots[u]);
        drop(turn.after, u, slots, any_flags);
      }
    }
    return turns;
  }
  /// @param kind  backward or frozen_backward
  [[gnu::cold]] FixedArray<Turn> write_backward(PassKind kind, Slots& slots) const {
    bool const writes_gradients = kind == PassKind::backward;
    FixedArray<Turn> turns(planned(kind).size());
    std::uint32_t rounded = 0;
    std::vector<std::uint32_t> last_users(buffers_.gradient_slots.size(), Program::none);
    BucketProgress buckets(buffers_, placed_, plan_.units.size());
    for (std::size_t i = 0; i < turns.size(); ++i) {
      auto& turn = turns[i];
      auto const& plan = planned(kind)[i];
      bool const sums = writes_gradients && !plan.recomputes;
      begin(turn, plan, slots, true);
      compute(turn, plan.recomputes ? Primitive::recompute : Primitive::backward, slots, sums);
      if (sums && path_.order.last_use_of_unit(plan.use)) open_gradients(turn.before, plan.use, last_users);
      for (auto const u : plan.drops) {
        drop(turn.after, u, slots, path_.in_backward[u] ? only_if(reshards) : any_flags);
        if (path_.keeps_slice[u]) close(turn.after, u, Buffers::kept(plan_.units[u].kept_slot), only_if(reshards));
      }
      for (auto const u : plan_.units_of(path_, plan.use)) {
        if (!sums || !plan.is_last || !path_.writes[u]) continue;
        if (plan_.units[u].writes_shards)
          end_direct_gradients(turn.after, u, buckets);
        else
          end_gradients(turn.after, u, plan_.is_rounded(u) ? rounded++ % buffers_.wires_in_turn() : Program::none);
      }
    }
    if (!turns.empty() && writes_gradients)  // before modules are declared, there are none
      close_buffers(turns.back().after, turns.back().unit, last_users);
    return turns;
  }

  /// Begins a use: writes its planned gathers.
  [[gnu::cold]] void begin(Turn& turn, PlannedTurn const& plan, Slots& slots, bool in_backward) const {
    turn.use = static_cast<std::uint32_t>(path_.order.declared(plan.use));
    turn.unit = static_cast<std::uint32_t>(path_.order.unit(plan.use));
    turn.index_in_path = static_cast<std::uint32_t>(plan.use);
    for (auto const& at : plan.gathers) {
      auto const first = turn.before.size();
      gather(turn.before, at.unit, slots[at.unit] = at.slot, in_backward);
      if (!at.if_sharded) continue;
      for (auto i = first; i < turn.before.size(); ++i) turn.before[i].when = only_if(starts_sharded);
    }
  }
  [[gnu::cold]] void compute(Turn& turn, Primitive primitive, Slots const& slots, bool writes_gradients) const {
    for (auto const u : plan_.units_of(path_, turn.index_in_path)) {
      auto operation = computation(primitive, u, slots[u], writes_gradients);
      operation.beside = u != turn.unit;
      if (!operation.beside)
        turn.compute = operation;
      else if (operation.size > 0)
        turn.beside.push_back(std::move(operation));
    }
  }
  void drop(Operations& to, std::uint32_t u, Slots& slots, StepFlags when) const {
    close(to, u, Buffers::whole(Pool::gather, std::exchange(slots[u], Program::none)), when);
  }
  /// Opens the buffers of the gradients of a use. The slot that was reduced last comes first: a wait for it implies the
  /// waits for the others.
  [[gnu::cold]] void open_gradients(Operations& to, std::size_t use, std::vector<std::uint32_t>& last_users) const {
    auto const units = plan_.units_of(path_, use);
    for (auto const* at = units.end(); at != units.begin();) {
      auto const u = *--at;
      if (!path_.writes[u]) continue;
      open_gradients(to, u);
      if (!plan_.units[u].writes_shards) last_users[placed_.gradient_slots[u]] = u;
    }
  }

  /// Appends an operation. @return it, for its sizes; valid until the next one is appended
  /// @note One function, so that the growth of a vector is compiled once.
  [[gnu::cold, gnu::noinline]] static Operation& append(Operations& to, Primitive primitive, StreamKind stream,
                                                        std::uint32_t u, std::initializer_list<step::Access> accesses,
                                                        StepFlags when = any_flags) {
    to.push_back(step::make_operation(primitive, stream, u, accesses, when));
    return to.back();
  }
  /// Opens a buffer for a content of the unit, of `bytes`.
  [[gnu::cold, gnu::noinline]] static void open(Operations& to, StreamKind stream, std::uint32_t u, Cells cells,
                                                std::int64_t bytes, StepFlags when = any_flags) {
    append(to, Primitive::open, stream, u, {writes(cells)}, when).bytes = bytes;
  }
  /// Closes a buffer: its content is not used any more.
  [[gnu::cold, gnu::noinline]] static void close(Operations& to, std::uint32_t u, Cells cells,
                                                 StepFlags when = any_flags) {
    append(to, Primitive::close, StreamKind::compute, u, {reads(cells)}, when);
  }

  /// The cells of a unit's content in a slot. If no other rank shares the unit, the own slice is all of it.
  Cells content(std::uint32_t u, Pool pool, std::uint32_t slot) const {
    return plan_.units[u].shard_ranks > 1 ? Buffers::whole(pool, slot) : Buffers::own(pool, slot);
  }
  Cells gradient_shard(std::uint32_t u) const { return buffers_.cells.of_unit(Pool::gradient, u); }
  /// The cells of a unit's gradient shard, or, if the shard is in host memory, the slot that it is staged in.
  Cells gradient_on_device(std::uint32_t u) const {
    return plan_.input.offload.gradients ? Buffers::staged(Pool::staged_gradient, plan_.units[u].staging_slot)
                                         : gradient_shard(u);
  }
  /// The cells that backward writes.
  Cells gradients_of(std::uint32_t u) const {
    return plan_.units[u].writes_shards ? gradient_shard(u)
                                        : content(u, Pool::gradient_slot, placed_.gradient_slots[u]);
  }
  std::int64_t param_bytes(std::uint32_t u, std::int64_t elements) const {
    return plan_.units[u].param_bytes(elements);
  }
  std::int64_t gradient_bytes(std::uint32_t u, std::int64_t elements) const {
    return plan_.units[u].gradient_bytes(elements);
  }
  /// Bytes of gradients as they are sent.
  std::int64_t reduce_bytes(std::uint32_t u, std::int64_t elements) const {
    return plan_.input.wire ? elements * static_cast<std::int64_t>(size_of(*plan_.input.wire))
                            : gradient_bytes(u, elements);
  }

  /// Fills a slot with the unit's full parameters: from the shards of all ranks that share it, or from kept slices.
  [[gnu::cold]] void gather(Operations& to, std::uint32_t u, std::uint32_t slot, bool in_backward) const {
    auto const& unit = plan_.units[u];
    auto const whole = Buffers::whole(Pool::gather, slot), own = Buffers::own(Pool::gather, slot);
    auto const full = param_bytes(u, unit.elements);
    auto const all_gather = [&](step::Group group, int ranks, Cells from, Cells into) -> Operation& {
      return append(to, Primitive::all_gather, StreamKind::gather, u, {reads(from), writes(into)})
          .moving(unit.elements / ranks, full)
          .among(group, ranks);
    };
    open(to, StreamKind::gather, u, whole, full);
    if (in_backward && path_.keeps_slice[u]) {
      all_gather(step::Group::kept, plan_.input.reshard_ranks, Buffers::kept(unit.kept_slot), whole)
          .beginning_span(Primitive::all_gather, full)
          .ending_span();
      return;
    }
    bool const several = unit.shard_ranks > 1;
    auto& cast = append(to, Primitive::cast, StreamKind::gather, u,
                        {reads(buffers_.cells.of_unit(Pool::master, u)), writes(own)})
                     .moving(unit.shard(), param_bytes(u, unit.shard()))
                     .beginning_span(several ? Primitive::all_gather : Primitive::cast, full);
    if (!several)
      cast.ending_span();
    else
      all_gather(step::Group::gather, unit.shard_ranks, own, Buffers::rest(Pool::gather, slot)).ending_span();
  }
  [[gnu::cold]] void keep_slice(Operations& to, std::uint32_t u, std::uint32_t slot) const {
    auto const cells = Buffers::kept(plan_.units[u].kept_slot);
    auto const elements = plan_.units[u].elements / plan_.input.reshard_ranks;
    auto const bytes = param_bytes(u, elements);
    open(to, StreamKind::compute, u, cells, bytes);
    append(to, Primitive::copy, StreamKind::compute, u, {reads(Buffers::whole(Pool::gather, slot)), writes(cells)})
        .moving(elements, bytes)
        .beginning_span(Primitive::copy, bytes)
        .ending_span();
  }
  [[gnu::cold]] Operation computation(Primitive primitive, std::uint32_t u, std::uint32_t slot,
                                      bool writes_gradients) const {
    auto const on_compute = [&](std::initializer_list<step::Access> accesses) {
      return step::make_operation(primitive, StreamKind::compute, u, accesses);
    };
    auto const& unit = plan_.units[u];
    if (unit.empty()) return on_compute({});
    auto const parameters =
        reads(unit.reads_masters ? buffers_.cells.of_unit(Pool::master, u) : content(u, Pool::gather, slot));
    auto operation = writes_gradients && path_.writes[u] ? on_compute({parameters, sums(gradients_of(u))})
                                                         : on_compute({parameters});
    return operation.moving(unit.elements, param_bytes(u, unit.elements));
  }

  /// Opens the buffer that backward writes the unit's gradients to.
  [[gnu::cold]] void open_gradients(Operations& to, std::uint32_t u) const {
    auto const& unit = plan_.units[u];
    auto const gradients = gradients_of(u);
    bool const padded = plan_.units[u].padded;
    auto const on_compute = [&](Primitive primitive, StepFlags when) -> Operation& {
      return append(to, primitive, StreamKind::compute, u, {writes(gradients)}, when);
    };
    if (!unit.writes_shards) {
      bool const by_unit = plan_.waits_in_slot(u) && plan_.waits_by_unit();
      // A slot that still holds unreduced gradients stays open: backward adds to them.
      auto const when =
          plan_.waits_in_slot(u) && !by_unit ? only_if(waiting_flags & ~plan_.unreduced_flags(u)) : any_flags;
      auto const slot = placed_.gradient_slots[u];
      open(to, StreamKind::compute, u, Buffers::whole(Pool::gradient_slot, slot), gradient_bytes(u, unit.elements),
           when);
      if (by_unit) to.back().condition = step::Condition::none_waits;
      if (buffers_.gradient_slots[slot].zeroed || !padded) return;
      auto& zero = on_compute(Primitive::zero_padding, when);
      if (by_unit) zero.condition = step::Condition::opened;
      return;
    }
    if (!path_.sets_gradients[u])
      on_compute(Primitive::zero, any_flags).moving(unit.elements, unit.elements * fp32).unless_begun = true;
    else if (padded)
      on_compute(Primitive::zero_padding, any_flags).unless_begun = true;
    on_compute(Primitive::open, any_flags);
  }
  /// Writes the operations that follow when backward has written all gradients of a unit to its slot: add them to the
  /// accumulator, or add the accumulator to them and reduce.
  [[gnu::cold]] void end_gradients(Operations& to, std::uint32_t u, std::uint32_t wire) const {
    auto const& unit = plan_.units[u];
    auto const reduces = plan_.reducing_flags(u);
    if (plan_.units[u].accumulates) {
      auto const accumulator = buffers_.cells.of_unit(Pool::accumulator, u);
      auto const when = only_if(sync_flags & ~reduces);
      open(to, StreamKind::reduce, u, accumulator, unit.elements * fp32, when);
      accumulate(to, u, StreamKind::reduce, gradients_of(u), accumulator, unit.elements, when)
          .beginning_span(Primitive::accumulate, gradient_bytes(u, unit.elements))
          .ending_span();
      zero_slot(to, u, StreamKind::reduce, when);
      auto& sum = append(to, Primitive::add, StreamKind::reduce, u, {reads(accumulator), adds(gradients_of(u))},
                         only_if(plan_.waits_by_unit() ? reduces : reduces | plan_.unreduced_flags(u)))
                      .moving(unit.elements, gradient_bytes(u, unit.elements));
      if (plan_.waits_by_unit()) sum.condition = step::Condition::sum_waits;
    }
    reduce(to, u, wire, only_if(reduces));
  }
  /// Zeroes a slot: it may hold another unit's gradients.
  [[gnu::cold]] void zero_slot(Operations& to, std::uint32_t u, StreamKind stream, StepFlags when) const {
    auto const slot = placed_.gradient_slots[u];
    auto const& planned = buffers_.gradient_slots[slot];
    if (planned.zeroed)
      append(to, Primitive::zero, stream, u, {writes(Buffers::whole(Pool::gradient_slot, slot))}, when)
          .moving(planned.bytes / gradient_bytes(u, 1), planned.bytes);
  }
  /// Reduces a unit's gradients: see [Note: Ways to reduce].
  [[gnu::cold]] void reduce(Operations& to, std::uint32_t u, std::uint32_t wire, StepFlags when) const {
    auto const& unit = plan_.units[u];
    bool const rounded = wire != Program::none, several = unit.shard_ranks > 1, replicated = unit.replicas > 1;
    auto const pool = rounded ? Pool::wire : Pool::gradient_slot;
    auto const slot = rounded ? wire : placed_.gradient_slots[u];
    auto const own = Buffers::own(pool, slot);
    auto const full = reduce_bytes(u, unit.elements);
    if (rounded) {
      open(to, StreamKind::reduce, u, Buffers::whole(pool, slot), full, when);
      append(to, Primitive::round, StreamKind::reduce, u, {reads(gradients_of(u)), writes(content(u, pool, slot))},
             when)
          .moving(unit.elements, full)
          .beginning_span(Primitive::round, gradient_bytes(u, unit.elements))
          .ending_span();
      zero_slot(to, u, StreamKind::reduce, when);
    }
    auto const completes = unit.waits_for_replicas ? only_if(syncs_all) : when;
    if (plan_.input.offload.gradients) move_gradient(to, Primitive::fetch, u, completes).if_begun = true;
    if (several) {
      auto& scatter = append(to, Primitive::reduce_scatter, StreamKind::reduce, u,
                             {adds(own), reads(Buffers::rest(pool, slot))}, when)
                          .moving(unit.shard(), full)
                          .among(step::Group::reduce, unit.shard_ranks)
                          .beginning_span(Primitive::reduce_scatter, full);
      scatter.span.ends = replicated;  // else the accumulation is in this span
    }
    if (unit.waits_for_replicas) {
      auto const partial = buffers_.cells.of_unit(Pool::partial, u);
      accumulate(to, u, StreamKind::reduce, own, partial, unit.shard(), when)
          .beginning_span(Primitive::accumulate, gradient_bytes(u, unit.shard()))
          .ending_span();
      if (!rounded) zero_slot(to, u, StreamKind::reduce, when);
      replicate(to, u, partial, unit.shard() * fp32, completes);
      return complete(to, u, StreamKind::replicate, completes);
    }
    if (replicated) {
      replicate(to, u, own, reduce_bytes(u, unit.shard()), when);
    } else {
      auto& sum = accumulate(to, u, StreamKind::reduce, own, gradient_on_device(u), unit.shard(), when).ending_span();
      if (!several) sum.beginning_span(Primitive::accumulate, full);
    }
    if (!rounded) zero_slot(to, u, replicated ? StreamKind::replicate : StreamKind::reduce, when);
    complete(to, u, replicated ? StreamKind::replicate : StreamKind::reduce, when);
  }
  /// Sums a shard of `bytes` over replicas, and adds the mean over all ranks to the gradient shard.
  [[gnu::cold]] void replicate(Operations& to, std::uint32_t u, Cells shard, std::int64_t bytes, StepFlags when) const {
    auto const& unit = plan_.units[u];
    append(to, Primitive::all_reduce, StreamKind::replicate, u, {adds(shard)}, when)
        .moving(unit.shard(), bytes)
        .among(replicas_of(u), unit.replicas)
        .beginning_span(Primitive::all_reduce, bytes);
    accumulate(to, u, StreamKind::replicate, shard, gradient_on_device(u), unit.shard(), when).ending_span();
  }
  [[gnu::cold, gnu::noinline]] static Operation& accumulate(Operations& to, std::uint32_t u, StreamKind stream,
                                                            Cells from, Cells sum, std::int64_t elements,
                                                            StepFlags when) {
    return append(to, Primitive::accumulate, stream, u, {reads(from), sums(sum)}, when)
        .moving(elements, elements * fp32);
  }
  /// Runs functions of the caller on the reduced gradient shard, after the zeroing of its slot, which another unit may
  /// wait for.
  [[gnu::cold]] void hook(Operations& to, std::uint32_t u, StreamKind stream, StepFlags when) const {
    auto const& unit = plan_.units[u];
    if (!unit.hooked) return;
    append(to, Primitive::hook, stream, u, {adds(gradient_on_device(u))}, when)
        .moving(unit.shard(), unit.shard() * fp32)
        .beginning_span(Primitive::hook, unit.shard() * fp32)
        .ending_span();
  }
  /// Completes a unit whose gradients were in a slot: runs functions of the caller, and stores an offloaded shard.
  [[gnu::cold]] void complete(Operations& to, std::uint32_t u, StreamKind stream, StepFlags when) const {
    hook(to, u, stream, when);
    if (plan_.input.offload.gradients) move_gradient(to, Primitive::store, u, when);
  }
  /// Fetches a gradient shard from host memory, or stores it.
  [[gnu::cold]] Operation& move_gradient(Operations& to, Primitive primitive, std::uint32_t u, StepFlags when) const {
    auto const home = gradient_shard(u), staged = gradient_on_device(u);
    bool const fetches = primitive == Primitive::fetch;
    auto const shard = plan_.units[u].shard();
    return append(to, primitive, StreamKind::copy, u, {reads(fetches ? home : staged), writes(fetches ? staged : home)},
                  when)
        .moving(shard, shard * fp32)
        .beginning_span(primitive, shard * fp32)
        .ending_span();
  }
  step::Group replicas_of(std::uint32_t u) const {
    return plan_.units[u].replicas == plan_.input.shards * plan_.input.replicas ? step::Group::all_replicas
                                                                                : step::Group::replicas;
  }

  /// All-reduces the buckets that are complete when backward has written a gradient shard.
  [[gnu::cold]] void end_direct_gradients(Operations& to, std::uint32_t u, BucketProgress& at) const {
    bool const alone = plan_.units[u].replicas == 1;
    auto const when = only_if(alone ? syncs_group | syncs_all : syncs_all);
    close(to, u, gradients_of(u), when);
    if (alone) hook(to, u, StreamKind::compute, when);
    at.write(
        u, [&](std::uint32_t bucket) { all_reduce(to, u, bucket); },
        [&](std::uint32_t reduced) { hook(to, reduced, StreamKind::replicate, when); });
  }
  /// Averages a bucket of gradient shards over ranks.
  [[gnu::cold]] void all_reduce(Operations& to, std::uint32_t u, std::uint32_t bucket) const {
    auto const size = buffers_.buckets[bucket].size();
    auto const sent = reduce_bytes(u, size);
    auto const gradients = buffers_.cells.bucket(buffers_.buckets[bucket]);
    bool const rounded = buffers_.bucket_wire != Program::none;
    auto const wire = rounded ? Buffers::own(Pool::wire, buffers_.bucket_wire) : gradients;
    auto const of_bucket = [&](Primitive primitive, std::int64_t bytes,
                               std::initializer_list<step::Access> accesses) -> Operation& {
      auto& operation =
          append(to, primitive, StreamKind::replicate, u, accesses, only_if(syncs_all)).moving(size, bytes);
      operation.bucket = bucket;
      return operation;
    };
    if (rounded) {
      open(to, StreamKind::replicate, u, wire, sent, only_if(syncs_all));
      of_bucket(Primitive::round, sent, {reads(gradients), writes(wire)})
          .beginning_span(Primitive::round, size * fp32)
          .ending_span();
    }
    auto& mean = of_bucket(Primitive::all_reduce, sent, {adds(wire)})
                     .among(replicas_of(u), plan_.units[u].replicas)
                     .beginning_span(Primitive::all_reduce, sent);
    mean.mean = true;
    mean.span.ends = !rounded;
    if (rounded) of_bucket(Primitive::accumulate, size * fp32, {reads(wire), writes(gradients)}).ending_span();
  }

  /// Closes buffers of reduced gradients at the end of a pass.
  /// @param last_users  by slot: the unit that had it last; none: the path does not use it. @param last  of the pass
  [[gnu::cold]] void close_buffers(Operations& to, std::uint32_t last,
                                   std::vector<std::uint32_t> const& last_users) const {
    for (std::uint32_t slot = 0; slot < last_users.size(); ++slot)
      if (last_users[slot] != Program::none)
        close(to, last_users[slot], Buffers::whole(Pool::gradient_slot, slot),
              plan_.waits_in_slot(last_users[slot]) ? only_if(plan_.reducing_flags(last_users[slot])) : any_flags);
    for (std::uint32_t u = 0; u < plan_.units.size(); ++u)
      if (plan_.units[u].accumulates && path_.writes[u])
        close(to, u, buffers_.cells.of_unit(Pool::accumulator, u),
              only_if(plan_.waits_by_unit() ? plan_.reducing_flags(u)
                                            : plan_.reducing_flags(u) | plan_.unreduced_flags(u)));
    for (std::uint32_t wire = 0; wire < buffers_.wires.size(); ++wire)
      close(to, last, Buffers::whole(Pool::wire, wire));
  }

  UnitPlan const& plan_;
  PlacedBuffers const& buffers_;
  PathPlan const& path_;
  PathBuffers const& placed_;
};

/// @param plan, buffers  the program takes over their lists
[[gnu::cold]] inline Program write_operations(UnitPlan&& plan, PlacedBuffers&& buffers) {
  Program program;
  auto const& input = plan.input;
  program.set_paths(plan.paths.size());
  for (std::size_t path = 0; path < plan.paths.size(); ++path) {
    program.name_path(path, plan.paths[path].order.path());
    OperationWriter(plan, buffers, path).write_passes(program, path);
  }
  for (std::uint32_t u = 0; u < plan.units.size(); ++u) OperationWriter(plan, buffers, 0).write_update(program, u);
  for (std::size_t use = 0; use < plan.paths[0].order.size(); ++use)
    program.modules.push_back(input.modules.empty() ? std::to_string(use) : input.modules[use]);
  program.units = std::move(plan.units);
  program.gather_slots = std::move(buffers.gather_slots);
  program.kept_slots = std::move(buffers.kept_slots);
  program.gradient_slots = std::move(buffers.gradient_slots);
  program.wires = std::move(buffers.wires);
  program.bucket_wire = buffers.bucket_wire;
  program.wire = input.wire;
  program.kept_ranks = input.reshard_ranks;
  program.scratch_bytes = plan.scratch_bytes;
  program.staged_masters = buffers.staged_masters;
  program.staged_gradients = buffers.staged_gradients;
  program.accumulator_elements = plan.accumulator_elements;
  program.gradient_order = std::move(buffers.gradient_order);
  program.buckets = std::move(buffers.buckets);
  program.buffers = std::move(buffers.cells);
  return program;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
