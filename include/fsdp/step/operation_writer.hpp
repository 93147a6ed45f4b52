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

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

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

  /// Appends an operation. @return it, for its sizes; valid until the next one is appended
  /// @note One function, so that the growth of a vector is compiled once.
  [[gnu::cold, gnu::noinline]] static Operation& append(Operations& to, Primitive primitive, StreamKind stream,
                                                        std::uint32_t u, std::initializer_list<step::Access> accesses,
                                                        Facts when = any_facts) {
    to.push_back(step::make_operation(primitive, stream, u, accesses, when));
    return to.back();
  }
  /// Opens a buffer for a content of the unit, of `bytes`.
  [[gnu::cold, gnu::noinline]] static void open(Operations& to, StreamKind stream, std::uint32_t u, Cells cells,
                                                std::int64_t bytes, Facts when = any_facts) {
    append(to, Primitive::open, stream, u, {writes(cells)}, when).bytes = bytes;
  }
  /// Closes a buffer: its content is not used any more.
  [[gnu::cold, gnu::noinline]] static void close(Operations& to, std::uint32_t u, Cells cells, Facts when = any_facts) {
    append(to, Primitive::close, StreamKind::compute, u, {reads(cells)}, when);
  }

  /// The cells of a unit's content in a slot. If no other rank shares the unit, the own slice is all of it.
  Cells content(std::uint32_t u, Pool pool, std::uint32_t slot) const {
    return program_.units[u].shards > 1 ? Buffers::whole(pool, slot) : Buffers::own(pool, slot);
  }
  Cells gradient_shard(std::uint32_t u) const { return program_.buffers.of_unit(Pool::gradient, u); }
  /// The cells of a unit's gradient shard, or, if the shard is in host memory, the slot that it is staged in.
  Cells gradient_on_device(std::uint32_t u) const {
    return input_.offload.gradients ? Buffers::staged(Pool::staged_gradient, program_.units[u].staging_slot)
                                    : gradient_shard(u);
  }
  /// The cells that backward writes.
  Cells gradients_of(std::uint32_t u) const {
    return program_.units[u].writes_shards ? gradient_shard(u)
                                           : content(u, Pool::gradient_slot, path_->gradient_slots[u]);
  }
  std::int64_t param_bytes(std::uint32_t u, std::int64_t elements) const {
    return program_.units[u].param_bytes(elements);
  }
  std::int64_t gradient_bytes(std::uint32_t u, std::int64_t elements) const {
    return program_.units[u].gradient_bytes(elements);
  }
  /// Bytes of gradients as they are sent.
  std::int64_t reduce_bytes(std::uint32_t u, std::int64_t elements) const {
    return program_.wire ? elements * static_cast<std::int64_t>(size_of(*program_.wire)) : gradient_bytes(u, elements);
  }

  /// Fills a slot with the unit's full parameters: from the shards of all ranks that share it, or from kept slices.
  [[gnu::cold]] void gather(Operations& to, std::uint32_t u, std::uint32_t slot, bool in_backward) const {
    auto const& unit = program_.units[u];
    auto const whole = Buffers::whole(Pool::gather, slot), own = Buffers::own(Pool::gather, slot);
    auto const full = param_bytes(u, unit.elements);
    auto const all_gather = [&](step::Group group, int ranks, Cells from, Cells into) -> Operation& {
      return append(to, Primitive::all_gather, StreamKind::gather, u, {reads(from), writes(into)})
          .moving(unit.elements / ranks, full)
          .among(group, ranks);
    };
    open(to, StreamKind::gather, u, whole, full);
    if (in_backward && path_->keeps_slice[u]) {
      all_gather(step::Group::kept, program_.kept_ranks, Buffers::kept(unit.kept_slot), whole)
          .beginning_span(Primitive::all_gather, full)
          .ending_span();
      return;
    }
    bool const several = unit.shards > 1;
    auto& cast = append(to, Primitive::cast, StreamKind::gather, u,
                        {reads(program_.buffers.of_unit(Pool::master, u)), writes(own)})
                     .moving(unit.shard(), param_bytes(u, unit.shard()))
                     .beginning_span(several ? Primitive::all_gather : Primitive::cast, full);
    if (!several)
      cast.ending_span();
    else
      all_gather(step::Group::gather, unit.shards, own, Buffers::rest(Pool::gather, slot)).ending_span();
  }
  [[gnu::cold]] void keep_slice(Operations& to, std::uint32_t u, std::uint32_t slot) const {
    auto const cells = Buffers::kept(program_.units[u].kept_slot);
    auto const elements = program_.units[u].elements / program_.kept_ranks;
    auto const bytes = param_bytes(u, elements);
    open(to, StreamKind::compute, u, cells, bytes);
    append(to, Primitive::copy, StreamKind::compute, u, {reads(Buffers::whole(Pool::gather, slot)), writes(cells)})
        .moving(elements, bytes)
        .beginning_span(Primitive::copy, bytes)
        .ending_span();
  }
  [[gnu::cold]] Operation compute(Primitive primitive, std::uint32_t u, std::uint32_t slot,
                                  bool writes_gradients) const {
    auto const on_compute = [&](std::initializer_list<step::Access> accesses) {
      return step::make_operation(primitive, StreamKind::compute, u, accesses);
    };
    auto const& unit = program_.units[u];
    if (unit.empty()) return on_compute({});
    auto const parameters =
        reads(unit.reads_masters ? program_.buffers.of_unit(Pool::master, u) : content(u, Pool::gather, slot));
    auto operation = writes_gradients && path_->writes[u] ? on_compute({parameters, sums(gradients_of(u))})
                                                          : on_compute({parameters});
    return operation.moving(unit.elements, param_bytes(u, unit.elements));
  }

  /// Opens the buffer that backward writes the unit's gradients to.
  [[gnu::cold]] void begin_gradients(Operations& to, std::uint32_t u) const {
    auto const& unit = program_.units[u];
    auto const gradients = gradients_of(u);
    bool const padded = input_.units[u].padded;
    auto const on_compute = [&](Primitive primitive, Facts when) -> Operation& {
      return append(to, primitive, StreamKind::compute, u, {writes(gradients)}, when);
    };
    if (!unit.writes_shards) {
      bool const by_unit = waits_in_slot(u) && waits_by_unit();
      auto const when = waits_in_slot(u) && !by_unit ? only(waiting_answers & ~held(u)) : any_facts;
      auto const slot = path_->gradient_slots[u];
      open(to, StreamKind::compute, u, Buffers::whole(Pool::gradient_slot, slot), gradient_bytes(u, unit.elements),
           when);
      if (by_unit) to.back().given = step::Given::none_waits;
      if (program_.gradient_slots[slot].zeroed || !padded) return;
      auto& zero = on_compute(Primitive::zero_padding, when);
      if (by_unit) zero.given = step::Given::opened;
      return;
    }
    if (!path_->sets_gradients[u])
      on_compute(Primitive::zero, any_facts).moving(unit.elements, unit.elements * fp32).unless_begun = true;
    else if (padded)
      on_compute(Primitive::zero_padding, any_facts).unless_begun = true;
    on_compute(Primitive::open, any_facts);
  }
  /// @return whether no_replica_sync still reduces the unit: it has no replicas, or it is sharded
  bool reduces_in_group(std::uint32_t unit) const {
    return input_.units[unit].shards || program_.units[unit].replicas == 1;
  }
  /// Flags under which the unit's gradients are unreduced on this rank. `sums_wait` is one of them if the unit is
  /// reduced over replicas only.
  Facts held(std::uint32_t unit) const { return reduces_in_group(unit) ? gradients_wait : gradients_wait | sums_wait; }
  /// Flags of micro-steps that reduce the unit's gradients, at least within its shard group.
  Facts reducing(std::uint32_t unit) const { return reduces_in_group(unit) ? syncs_group | syncs_all : syncs_all; }

  /// Ends a unit whose gradients backward has written to a slot.
  [[gnu::cold]] void end_gradients(Operations& to, std::uint32_t u, std::uint32_t wire) const {
    auto const& unit = program_.units[u];
    auto const reduces = reducing(u);
    if (waits_in_accumulator(u)) {
      auto const accumulator = program_.buffers.of_unit(Pool::accumulator, u);
      auto const when = only(sync_answers & ~reduces);
      open(to, StreamKind::reduce, u, accumulator, unit.elements * fp32, when);
      accumulate(to, u, StreamKind::reduce, gradients_of(u), accumulator, unit.elements, when)
          .beginning_span(Primitive::accumulate, gradient_bytes(u, unit.elements))
          .ending_span();
      recycle(to, u, StreamKind::reduce, when);
      auto& sum = append(to, Primitive::add, StreamKind::reduce, u, {reads(accumulator), adds(gradients_of(u))},
                         only(waits_by_unit() ? reduces : reduces | held(u)))
                      .moving(unit.elements, gradient_bytes(u, unit.elements));
      if (waits_by_unit()) sum.given = step::Given::sum_waits;
    }
    reduce(to, u, wire, only(reduces));
  }
  /// Recycles a slot: it may hold another unit's gradients.
  [[gnu::cold]] void recycle(Operations& to, std::uint32_t u, StreamKind stream, Facts when) const {
    auto const slot = path_->gradient_slots[u];
    auto const& planned = program_.gradient_slots[slot];
    if (planned.zeroed)
      append(to, Primitive::zero, stream, u, {writes(Buffers::whole(Pool::gradient_slot, slot))}, when)
          .moving(planned.bytes / gradient_bytes(u, 1), planned.bytes);
  }
  /// Reduces a unit's gradients: see [Note: Ways to reduce].
  [[gnu::cold]] void reduce(Operations& to, std::uint32_t u, std::uint32_t wire, Facts when) const {
    auto const& unit = program_.units[u];
    bool const rounded = wire != Program::none, several = unit.shards > 1, replicated = unit.replicas > 1;
    auto const pool = rounded ? Pool::wire : Pool::gradient_slot;
    auto const slot = rounded ? wire : path_->gradient_slots[u];
    auto const own = Buffers::own(pool, slot);
    auto const full = reduce_bytes(u, unit.elements);
    if (rounded) {
      open(to, StreamKind::reduce, u, Buffers::whole(pool, slot), full, when);
      append(to, Primitive::round, StreamKind::reduce, u, {reads(gradients_of(u)), writes(content(u, pool, slot))},
             when)
          .moving(unit.elements, full)
          .beginning_span(Primitive::round, gradient_bytes(u, unit.elements))
          .ending_span();
      recycle(to, u, StreamKind::reduce, when);
    }
    auto const completes = unit.waits_for_replicas ? only(syncs_all) : when;
    if (input_.offload.gradients) move_gradient(to, Primitive::fetch, u, completes).if_begun = true;
    if (several) {
      auto& scatter = append(to, Primitive::reduce_scatter, StreamKind::reduce, u,
                             {adds(own), reads(Buffers::rest(pool, slot))}, when)
                          .moving(unit.shard(), full)
                          .among(step::Group::reduce, unit.shards)
                          .beginning_span(Primitive::reduce_scatter, full);
      scatter.span.ends = replicated;  // else the accumulation is in this span
    }
    if (unit.waits_for_replicas) {
      auto const partial = program_.buffers.of_unit(Pool::partial, u);
      accumulate(to, u, StreamKind::reduce, own, partial, unit.shard(), when)
          .beginning_span(Primitive::accumulate, gradient_bytes(u, unit.shard()))
          .ending_span();
      if (!rounded) recycle(to, u, StreamKind::reduce, when);
      replicate(to, u, partial, unit.shard() * fp32, completes);
      return complete(to, u, StreamKind::replicate, completes);
    }
    if (replicated) {
      replicate(to, u, own, reduce_bytes(u, unit.shard()), when);
    } else {
      auto& sum = accumulate(to, u, StreamKind::reduce, own, gradient_on_device(u), unit.shard(), when).ending_span();
      if (!several) sum.beginning_span(Primitive::accumulate, full);
    }
    if (!rounded) recycle(to, u, replicated ? StreamKind::replicate : StreamKind::reduce, when);
    complete(to, u, replicated ? StreamKind::replicate : StreamKind::reduce, when);
  }
  /// Sums a shard of `bytes` over replicas, and adds the mean over all ranks to the gradient shard.
  [[gnu::cold]] void replicate(Operations& to, std::uint32_t u, Cells shard, std::int64_t bytes, Facts when) const {
    auto const& unit = program_.units[u];
    append(to, Primitive::all_reduce, StreamKind::replicate, u, {adds(shard)}, when)
        .moving(unit.shard(), bytes)
        .among(replicas_of(u), unit.replicas)
        .beginning_span(Primitive::all_reduce, bytes);
    accumulate(to, u, StreamKind::replicate, shard, gradient_on_device(u), unit.shard(), when).ending_span();
  }
  [[gnu::cold, gnu::noinline]] static Operation& accumulate(Operations& to, std::uint32_t u, StreamKind stream,
                                                            Cells from, Cells sum, std::int64_t elements, Facts when) {
    return append(to, Primitive::accumulate, stream, u, {reads(from), sums(sum)}, when)
        .moving(elements, elements * fp32);
  }
  /// Runs functions of the caller on the reduced gradient shard, after the zeroing of its slot, which another unit may
  /// wait for.
  [[gnu::cold]] void hook(Operations& to, std::uint32_t u, StreamKind stream, Facts when) const {
    auto const& unit = program_.units[u];
    if (!unit.hooked) return;
    append(to, Primitive::hook, stream, u, {adds(gradient_on_device(u))}, when)
        .moving(unit.shard(), unit.shard() * fp32)
        .beginning_span(Primitive::hook, unit.shard() * fp32)
        .ending_span();
  }
  /// Completes a unit whose gradients were in a slot: runs functions of the caller, and stores an offloaded shard.
  [[gnu::cold]] void complete(Operations& to, std::uint32_t u, StreamKind stream, Facts when) const {
    hook(to, u, stream, when);
    if (input_.offload.gradients) move_gradient(to, Primitive::store, u, when);
  }
  /// Fetches a gradient shard from host memory, or stores it.
  [[gnu::cold]] Operation& move_gradient(Operations& to, Primitive primitive, std::uint32_t u, Facts when) const {
    auto const home = gradient_shard(u), staged = gradient_on_device(u);
    bool const fetches = primitive == Primitive::fetch;
    auto const shard = program_.units[u].shard();
    return append(to, primitive, StreamKind::copy, u, {reads(fetches ? home : staged), writes(fetches ? staged : home)},
                  when)
        .moving(shard, shard * fp32)
        .beginning_span(primitive, shard * fp32)
        .ending_span();
  }
  step::Group replicas_of(std::uint32_t u) const {
    return program_.units[u].replicas == input_.shards * input_.replicas ? step::Group::all_replicas
                                                                         : step::Group::replicas;
  }

  /// All-reduces the buckets that are complete when backward has written a gradient shard.
  [[gnu::cold]] void end_direct_gradients(Operations& to, std::uint32_t u, Completion& at) const {
    auto const& p = program_;
    bool const alone = p.units[u].replicas == 1;
    auto const when = only(alone ? syncs_group | syncs_all : syncs_all);
    close(to, u, gradients_of(u), when);
    if (alone) hook(to, u, StreamKind::compute, when);
    at.write(
        u, [&](std::uint32_t bucket) { all_reduce(to, u, bucket); },
        [&](std::uint32_t reduced) { hook(to, reduced, StreamKind::replicate, when); });
  }
  /// Averages a bucket of gradient shards over ranks.
  [[gnu::cold]] void all_reduce(Operations& to, std::uint32_t u, std::uint32_t bucket) const {
    auto const& p = program_;
    auto const size = p.buckets[bucket].size();
    auto const sent = reduce_bytes(u, size);
    auto const gradients = p.buffers.bucket(p.buckets[bucket]);
    bool const rounded = p.bucket_wire != Program::none;
    auto const wire = rounded ? Buffers::own(Pool::wire, p.bucket_wire) : gradients;
    auto const of_bucket = [&](Primitive primitive, std::int64_t bytes,
                               std::initializer_list<step::Access> accesses) -> Operation& {
      auto& operation = append(to, primitive, StreamKind::replicate, u, accesses, only(syncs_all)).moving(size, bytes);
      operation.bucket = bucket;
      return operation;
    };
    if (rounded) {
      open(to, StreamKind::replicate, u, wire, sent, only(syncs_all));
      of_bucket(Primitive::round, sent, {reads(gradients), writes(wire)})
          .beginning_span(Primitive::round, size * fp32)
          .ending_span();
    }
    auto& mean = of_bucket(Primitive::all_reduce, sent, {adds(wire)})
                     .among(replicas_of(u), p.units[u].replicas)
                     .beginning_span(Primitive::all_reduce, sent);
    mean.mean = true;
    mean.span.ends = !rounded;
    if (rounded) of_bucket(Primitive::accumulate, size * fp32, {reads(wire), writes(gradients)}).ending_span();
  }

  /// Closes buffers of reduced gradients at the end of a pass.
  /// @param lessees  by slot: the unit that had it last; none: the path does not use it. @param last  of the pass
  [[gnu::cold]] void close_buffers(Operations& to, std::uint32_t last,
                                   std::vector<std::uint32_t> const& lessees) const {
    for (std::uint32_t slot = 0; slot < lessees.size(); ++slot)
      if (lessees[slot] != Program::none)
        close(to, lessees[slot], Buffers::whole(Pool::gradient_slot, slot),
              waits_in_slot(lessees[slot]) ? only(reducing(lessees[slot])) : any_facts);
    for (std::uint32_t u = 0; u < program_.units.size(); ++u)
      if (waits_in_accumulator(u) && path_->writes[u])
        close(to, u, program_.buffers.of_unit(Pool::accumulator, u),
              only(waits_by_unit() ? reducing(u) : reducing(u) | held(u)));
    for (std::uint32_t wire = 0; wire < program_.wires.size(); ++wire)
      close(to, last, Buffers::whole(Pool::wire, wire));
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
