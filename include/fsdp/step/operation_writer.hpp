// SPDX-License-Identifier: Apache-2.0
// The operations of each event at a use: a gather, a drop, a computation, a reduction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "fsdp/step/buffer_planner.hpp"
#include "fsdp/step/operation.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"

namespace fsdp::detail {

/// [Note: Ways to reduce] Where several ranks share a unit, backward writes into a slot: reduce-scatter in place,
/// all-reduce of the own slice over replicas, accumulation into the gradient shard with the factor 1/W, zeroing of the
/// slot for its next unit, unless modules begin their sums themselves. Where replicas may wait
/// (EngineOptions::allow_no_replica_sync), slices are added up in a partial shard of fp32 instead, and that is
/// all-reduced: the slot is free as soon as the group has read it. Where a rank has the unit for itself and gradients
/// are fp32 (NoShard, or a world of one) the gradient shard is the full gradient: backward writes it where it is
/// (*direct*), and buckets of it become means in place. Where ranks sum in a narrower type
/// (EngineOptions::reduce_dtype), what travels is rounded into a wire buffer first: see [Note: Wires].
///
/// [Note: Gradients that wait] Gradients in the shard's type wait in their slot, which backward adds to. Narrower ones
/// are added up in a full-size fp32 accumulator, and rounded once, when they are reduced.
///
/// [Note: Kept slices] With EngineOptions::reshard_ranks, compute copies a slice of a unit aside when its forward ends,
/// and backward gathers the slices of a few consecutive ranks instead of the shards of all.
class OperationWriter : protected BufferPlanner {
 protected:
  using BufferPlanner::BufferPlanner;
  using Operation = step::Operation;
  using Operations = std::vector<Operation>;
  using Buffers = step::Buffers;
  using Cells = step::Cells;
  using Pool = step::Pool;
  using Primitive = step::Primitive;
  static constexpr std::int64_t fp32 = sizeof(float);

  [[gnu::cold, gnu::noinline]] static Operation make(Primitive primitive, StreamKind stream, std::uint32_t unit,
                                                     Facts when = any_facts) {
    Operation operation;
    operation.primitive = primitive;
    operation.stream = stream;
    operation.unit = unit;
    operation.when = when;
    return operation;
  }
  [[gnu::cold, gnu::noinline]] static Operation sized(Operation operation, std::int64_t elements,
                                                      std::size_t element_bytes) {
    operation.elements = elements;
    operation.bytes = elements * static_cast<std::int64_t>(element_bytes);
    return operation;
  }
  [[gnu::cold, gnu::noinline]] static Operation among(Operation operation, step::Group group, int ranks) {
    operation.group = group;
    operation.ranks = ranks;
    return operation;
  }
  [[gnu::cold, gnu::noinline]] static Operation spanned(Operation operation, Primitive name, bool ends,
                                                        std::int64_t bytes) {
    operation.span = {name, ends, bytes};
    return operation;
  }
  [[gnu::cold, gnu::noinline]] static Operation end_span(Operation operation) {
    operation.span.ends = true;
    return operation;
  }

  /// One function, so that the growth of a vector is compiled once.
  [[gnu::cold, gnu::noinline]] static void emit(Operations& to, Operation const& operation,
                                                std::initializer_list<step::Access> accesses = {}) {
    to.push_back(operation);
    for (auto const& access : accesses) to.back().all[to.back().size++] = access;
  }

  /// The cells of a unit's content in a slot. If no other rank shares the unit, the own slice is all of it.
  Cells content(std::uint32_t u, Pool pool, std::uint32_t slot) const {
    return program_.units[u].shards > 1 ? Buffers::whole(pool, slot) : Buffers::own(pool, slot);
  }
  Cells gradients_of(std::uint32_t u) const {
    return program_.units[u].writes_shards ? program_.buffers.of_unit(Pool::gradient, u)
                                           : content(u, Pool::gradient_slot, gradient_slots_[u]);
  }
  std::int64_t param_bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(program_.param_bytes);
  }
  std::int64_t gradient_bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(program_.gradient_bytes);
  }
  std::int64_t reduce_bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(program_.reduce_bytes);
  }

  /// Fills a slot with the unit's full parameters: from the shards of all ranks that share it, or from kept slices.
  [[gnu::cold]] void gather(Operations& to, std::uint32_t u, std::uint32_t slot, bool in_backward) const {
    auto const& unit = program_.units[u];
    auto const whole = Buffers::whole(Pool::gather, slot), own = Buffers::own(Pool::gather, slot);
    auto const full = param_bytes(unit.elements);
    auto open = make(Primitive::open, StreamKind::gather, u).with({writes(whole)});
    open.bytes = full;
    emit(to, open);
    auto const all_gather = [&](step::Group group, int ranks) {
      auto operation = among(make(Primitive::all_gather, StreamKind::gather, u), group, ranks);
      operation.elements = unit.elements / ranks;
      operation.bytes = full;
      return operation;
    };
    if (in_backward && unit.kept_slot != Program::none) {
      auto const ranks = static_cast<int>(unit.elements / program_.kept_slots[unit.kept_slot].elements);
      emit(to, spanned(all_gather(step::Group::kept, ranks), Primitive::all_gather, true, full),
           {reads(Buffers::kept(unit.kept_slot)), writes(whole)});
      return;
    }
    bool const several = unit.shards > 1;
    auto const cast = sized(make(Primitive::cast, StreamKind::gather, u), unit.shard(), program_.param_bytes);
    emit(to, spanned(cast, several ? Primitive::all_gather : Primitive::cast, !several, full),
         {reads(program_.buffers.of_unit(Pool::master, u)), writes(own)});
    if (several)
      emit(to, end_span(all_gather(step::Group::gather, unit.shards)),
           {reads(own), writes(Buffers::rest(Pool::gather, slot))});
  }
  [[gnu::cold]] void keep_slice(Operations& to, std::uint32_t u, std::uint32_t slot) const {
    auto const kept = program_.units[u].kept_slot;
    auto const copy =
        sized(make(Primitive::copy, StreamKind::compute, u), program_.kept_slots[kept].elements, program_.param_bytes);
    auto open = make(Primitive::open, StreamKind::compute, u).with({writes(Buffers::kept(kept))});
    open.bytes = copy.bytes;
    emit(to, open);
    emit(to, spanned(copy, Primitive::copy, true, copy.bytes),
         {reads(Buffers::whole(Pool::gather, slot)), writes(Buffers::kept(kept))});
  }
  /// The buffer's content is not used any more.
  [[gnu::cold]] static void close(Operations& to, std::uint32_t u, Cells cells, Facts when = any_facts) {
    emit(to, make(Primitive::close, StreamKind::compute, u, when), {reads(cells)});
  }
  [[gnu::cold]] Operation compute(Primitive primitive, std::uint32_t u, std::uint32_t slot) const {
    auto operation = make(primitive, StreamKind::compute, u);
    auto const& unit = program_.units[u];
    if (unit.empty()) return operation;
    operation = sized(operation, unit.elements, program_.param_bytes);
    auto const parameters =
        reads(unit.reads_masters ? program_.buffers.of_unit(Pool::master, u) : content(u, Pool::gather, slot));
    if (primitive == Primitive::forward) return std::move(operation).with({parameters});
    return std::move(operation).with({parameters, sums(gradients_of(u))});
  }

  /// Backward gets a buffer for the unit's gradients.
  [[gnu::cold]] void begin_gradients(Operations& to, std::uint32_t u) const {
    auto const& unit = program_.units[u];
    bool const padded = input_.units[u].padded;
    auto const when = waits_in_slot(u) ? only(waiting_answers & ~held(u)) : any_facts;
    auto padding = make(Primitive::zero_padding, StreamKind::compute, u, when).with({writes(gradients_of(u))});
    if (!unit.writes_shards) {
      auto const slot = gradient_slots_[u];
      auto open =
          make(Primitive::open, StreamKind::compute, u, when).with({writes(Buffers::whole(Pool::gradient_slot, slot))});
      open.bytes = gradient_bytes(unit.elements);
      emit(to, open);
      if (!program_.gradient_slots[slot].zeroed && padded) emit(to, padding);
      return;
    }
    if (!unit.sets_gradients) {
      auto zero = sized(make(Primitive::zero, StreamKind::compute, u), unit.elements, sizeof(float))
                      .with({writes(gradients_of(u))});
      zero.unless_begun = true;
      emit(to, zero);
    } else if (padded) {
      padding.unless_begun = true;
      emit(to, padding);
    }
    emit(to, make(Primitive::open, StreamKind::compute, u), {writes(gradients_of(u))});
  }
  /// A micro-step that does not sum over replicas reduces the unit all the same: it has none, or shards to sum within.
  bool reduces_in_group(std::uint32_t unit) const {
    return input_.units[unit].shards || program_.units[unit].replicas == 1;
  }
  /// The unit's gradients wait on their rank: if it is reduced over replicas alone, also where sums wait for those.
  Facts held(std::uint32_t unit) const { return reduces_in_group(unit) ? gradients_wait : gradients_wait | sums_wait; }
  /// Micro-steps that end with the unit's gradients reduced, at least within its shard group.
  Facts reducing(std::uint32_t unit) const { return reduces_in_group(unit) ? syncs_group | syncs_all : syncs_all; }

  /// Backward has written all of a unit's gradients, in a slot.
  [[gnu::cold]] void end_gradients(Operations& to, std::uint32_t u, std::uint32_t wire) const {
    auto const& unit = program_.units[u];
    auto const reduces = reducing(u);
    if (waits_in_accumulator(u)) {
      auto const accumulator = program_.buffers.of_unit(Pool::accumulator, u);
      auto const when = only(sync_answers & ~reduces);
      auto open = make(Primitive::open, StreamKind::reduce, u, when).with({writes(accumulator)});
      open.bytes = unit.elements * fp32;
      emit(to, open);
      auto const accumulate =
          sized(make(Primitive::accumulate, StreamKind::reduce, u, when), unit.elements, sizeof(float));
      emit(to, spanned(accumulate, Primitive::accumulate, true, gradient_bytes(unit.elements)),
           {reads(gradients_of(u)), sums(accumulator)});
      recycle(to, u, StreamKind::reduce, when);
      emit(to,
           sized(make(Primitive::add, StreamKind::reduce, u, only(reduces | held(u))), unit.elements,
                 program_.gradient_bytes),
           {reads(accumulator), adds(gradients_of(u))});
    }
    reduce(to, u, wire, only(reduces));
  }
  /// The slot may hold another unit's gradients.
  void recycle(Operations& to, std::uint32_t u, StreamKind stream, Facts when) const {
    auto const slot = gradient_slots_[u];
    if (!program_.gradient_slots[slot].zeroed) return;
    auto zero = make(Primitive::zero, stream, u, when).with({writes(Buffers::whole(Pool::gradient_slot, slot))});
    zero.elements = program_.gradient_slots[slot].elements;
    zero.bytes = slot_bytes(zero.elements, program_.gradient_bytes);
    emit(to, zero);
  }
  /// See [Note: Ways to reduce].
  [[gnu::cold]] void reduce(Operations& to, std::uint32_t u, std::uint32_t wire, Facts when) const {
    auto const& unit = program_.units[u];
    bool const rounded = wire != Program::none, several = unit.shards > 1, replicated = unit.replicas > 1;
    auto const pool = rounded ? Pool::wire : Pool::gradient_slot;
    auto const slot = rounded ? wire : gradient_slots_[u];
    auto const own = Buffers::own(pool, slot);
    auto const full = reduce_bytes(unit.elements);
    if (rounded) {
      auto open = make(Primitive::open, StreamKind::reduce, u, when).with({writes(Buffers::whole(pool, slot))});
      open.bytes = full;
      emit(to, open);
      auto const round =
          sized(make(Primitive::round, StreamKind::reduce, u, when), unit.elements, program_.reduce_bytes);
      emit(to, spanned(round, Primitive::round, true, gradient_bytes(unit.elements)),
           {reads(gradients_of(u)), writes(content(u, pool, slot))});
      recycle(to, u, StreamKind::reduce, when);
    }
    bool const joined = !unit.waits_for_replicas && !replicated;  // the accumulation is in the span of the collective
    if (several) {
      auto scatter =
          among(make(Primitive::reduce_scatter, StreamKind::reduce, u, when), step::Group::reduce, unit.shards);
      scatter.elements = unit.shard();
      scatter.bytes = full;
      emit(to, spanned(scatter, Primitive::reduce_scatter, !joined, full),
           {adds(own), reads(Buffers::rest(pool, slot))});
    }
    if (unit.waits_for_replicas) {
      auto const partial = program_.buffers.of_unit(Pool::partial, u);
      auto const accumulate =
          sized(make(Primitive::accumulate, StreamKind::reduce, u, when), unit.shard(), sizeof(float));
      emit(to, spanned(accumulate, Primitive::accumulate, true, gradient_bytes(unit.shard())),
           {reads(own), sums(partial)});
      if (!rounded) recycle(to, u, StreamKind::reduce, when);
      replicate(to, u, partial, sizeof(float), only(syncs_all));
      return;
    }
    if (replicated) {
      replicate(to, u, own, program_.reduce_bytes, when);
    } else {
      auto const sum = accumulate(u, own, StreamKind::reduce, when);
      emit(to, several ? end_span(sum) : spanned(sum, Primitive::accumulate, true, full));
    }
    if (!rounded) recycle(to, u, replicated ? StreamKind::replicate : StreamKind::reduce, when);
  }
  /// Sums a shard over replicas, and adds the mean over all ranks to the gradient shard.
  [[gnu::cold]] void replicate(Operations& to, std::uint32_t u, Cells shard, std::size_t element_bytes,
                               Facts when) const {
    auto const& unit = program_.units[u];
    auto const sum =
        sized(among(make(Primitive::all_reduce, StreamKind::replicate, u, when), replicas_of(u), unit.replicas),
              unit.shard(), element_bytes);
    emit(to, spanned(sum, Primitive::all_reduce, false, sum.bytes), {adds(shard)});
    emit(to, end_span(accumulate(u, shard, StreamKind::replicate, when)));
  }
  Operation accumulate(std::uint32_t u, Cells from, StreamKind stream, Facts when) const {
    return sized(make(Primitive::accumulate, stream, u, when), program_.units[u].shard(), sizeof(float))
        .with({reads(from), sums(program_.buffers.of_unit(Pool::gradient, u))});
  }
  step::Group replicas_of(std::uint32_t u) const {
    return program_.units[u].replicas == input_.shards * input_.replicas ? step::Group::all_replicas
                                                                         : step::Group::replicas;
  }

  /// Progress of a backward pass that writes gradient shards, in completion order.
  struct Completion {
    std::size_t written = 0;   ///< units
    std::uint32_t bucket = 0;  ///< the next to be all-reduced
  };
  /// Backward has written a gradient shard: buckets that are complete are all-reduced.
  [[gnu::cold]] void end_direct_gradients(Operations& to, std::uint32_t u, Completion& at) const {
    auto const& p = program_;
    bool const alone = p.units[u].replicas == 1;
    close(to, u, gradients_of(u), only(alone ? syncs_group | syncs_all : syncs_all));
    auto const end = gradient_ends_[at.written++];
    for (; at.bucket < p.buckets.size() && p.buckets[at.bucket].end <= end; ++at.bucket) all_reduce(to, u, at.bucket);
  }
  /// Makes means of a bucket of gradient shards.
  [[gnu::cold]] void all_reduce(Operations& to, std::uint32_t u, std::uint32_t bucket) const {
    auto const& p = program_;
    auto const size = p.buckets[bucket].size();
    auto const gradients = p.buffers.bucket(p.buckets[bucket]);
    auto const operation = [&](Primitive primitive, std::size_t element_bytes) {
      auto of_bucket = sized(make(primitive, StreamKind::replicate, u, only(syncs_all)), size, element_bytes);
      of_bucket.bucket = bucket;
      return of_bucket;
    };
    auto mean = among(operation(Primitive::all_reduce, p.reduce_bytes), replicas_of(u), p.units[u].replicas);
    mean.mean = true;
    if (p.bucket_wire == Program::none) {
      emit(to, spanned(mean, Primitive::all_reduce, true, mean.bytes), {adds(gradients)});
      return;
    }
    auto const wire = Buffers::own(Pool::wire, p.bucket_wire);
    auto open = operation(Primitive::open, p.reduce_bytes).with({writes(wire)});
    open.bucket = Program::none;
    emit(to, open);
    emit(to, spanned(operation(Primitive::round, p.reduce_bytes), Primitive::round, true, size * fp32),
         {reads(gradients), writes(wire)});
    emit(to, spanned(mean, Primitive::all_reduce, false, mean.bytes), {adds(wire)});
    emit(to, end_span(operation(Primitive::accumulate, sizeof(float))), {reads(wire), writes(gradients)});
  }

  /// The pass is complete: buffers of reduced gradients are not in use any more.
  /// @param lessees  by slot: the unit that had it last. @param last  of the pass
  [[gnu::cold]] void close_buffers(Operations& to, std::uint32_t last,
                                   std::vector<std::uint32_t> const& lessees) const {
    for (std::uint32_t slot = 0; slot < lessees.size(); ++slot)
      close(to, lessees[slot], Buffers::whole(Pool::gradient_slot, slot),
            waits_in_slot(lessees[slot]) ? only(reducing(lessees[slot])) : any_facts);
    for (std::uint32_t u = 0; u < program_.units.size(); ++u)
      if (waits_in_accumulator(u))
        close(to, u, program_.buffers.of_unit(Pool::accumulator, u), only(reducing(u) | held(u)));
    for (std::uint32_t wire = 0; wire < program_.wires.size(); ++wire)
      close(to, last, Buffers::whole(Pool::wire, wire));
  }

  [[gnu::cold]] void write_updates(std::uint32_t u) {
    auto const& unit = program_.units[u];
    auto norm = make(Primitive::norm, StreamKind::compute, u), update = make(Primitive::update, StreamKind::compute, u);
    if (!unit.empty()) {
      auto const& buffers = program_.buffers;
      auto const gradient = reads(buffers.of_unit(Pool::gradient, u));
      norm = sized(norm, unit.shard(), 0).with({gradient});
      update = sized(update, unit.shard(), sizeof(float))
                   .with({gradient, adds(buffers.of_unit(Pool::master, u)), adds(buffers.of_unit(Pool::moments, u))});
    }
    program_.norms.push_back(norm);
    program_.updates.push_back(update);
  }
};

}  // namespace fsdp::detail
