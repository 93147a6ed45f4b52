// SPDX-License-Identifier: Apache-2.0
// Leases the buffers that backward writes gradients into, and reduces them into the gradient shards.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/gradient_sums.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/slots.hpp"
#include "fsdp/kernels/elementwise.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/trace/trace.hpp"

namespace fsdp {

/// Owns the reduce and replicate streams, their communicators and the gradient slots.
///
/// [Note: Ways to reduce] Where several ranks share a unit, backward writes into a slot: reduce-scatter in place,
/// all-reduce of the own slice over replicas, accumulation into the gradient shard with the factor 1/W, zeroing of the
/// slot for its next lease, unless modules begin their sums themselves. Where replicas may wait
/// (EngineOptions::no_replica_sync), slices are added up in a partial shard of fp32 instead, and that is
/// all-reduced: the slot is free as soon as the group has read it. Where a rank has the unit for itself and gradients
/// are fp32 (NoShard, or a world of one) the gradient shard is the full gradient: backward writes it where it is
/// (*direct*), and buckets of it become means in place. Where ranks sum in a narrower type
/// (EngineOptions::reduce_dtype), what travels is rounded into a wire buffer first: see [Note: Wires].
template <Communicator C, class P>
class Reducer {
 public:
  using D = typename C::Device;
  using Stream = typename D::Stream;
  using Unit = FlatParam<D, P>;
  using Reduce = typename P::Reduce;

  /// @param wire  what fp32 gradients are rounded to for the sum over ranks; not set: nothing
  /// @throws ConfigError if the communicator does not sum that
  [[gnu::cold]] Reducer(D const& device, int rank, MemoryAccount& account, History const& history,
                        std::optional<DType> wire)
      : device_(device),
        rounded_(wire ? Sums::narrow(*wire, rank) : Sums{}),
        account_(&account),
        history_(&history),
        scattered_(device),
        reduce_(device.make_stream("reduce", StreamPriority::high)) {}

  /// Units that several ranks share are reduced within `group`.
  [[gnu::cold]] void set_shard_group(C group) { shard_comm_.emplace(std::move(group)); }
  /// Units that have as many replicas as `group` has ranks are summed over it. There may be two such groups: the
  /// replicas of shards, and the world, for what every rank keeps whole.
  [[gnu::cold]] void add_replicate_group(C group) {
    if (!replicate_) replicate_.emplace(device_.make_stream("replicate", StreamPriority::high));
    (replicate_comms_[0] ? replicate_comms_[1] : replicate_comms_[0]).emplace(std::move(group));
  }

  /// @param slots    what the pool and the wires are placed in
  /// @param direct   gradient shards that backward writes itself; `partial`: those that wait for replicas
  /// @note Collective: yes, over the communicators that want to know.
  [[gnu::cold]] void register_memory(AccountedMemory<C> const& slots, AccountedMemory<C> const& direct,
                                     AccountedMemory<C> const& partial) {
    register_with(shard_comm_, slots);
    for (auto& replicas : replicate_comms_)
      for (auto const* memory : {&slots, &direct, &partial}) register_with(replicas, *memory);
  }

  BufferPool<D>& pool() { return pool_; }
  BufferPool<D>& wires() { return wires_; }
  Stream& stream() { return reduce_; }
  std::optional<Stream>& replicate_stream() { return replicate_; }
  void set_tracer(Tracer<D>* tracer) { trace_.attach(tracer); }

  /// Zeroes all slots: once, after they were placed, and the units were declared.
  /// @param gradients  the gradient shards that backward writes itself, as Program::gradient_order says
  template <class Units>
  [[gnu::cold]] void prepare(Units const& units, Program const& program, float* gradients) {
    gradients_ = gradients;
    program.for_each(Phase::backward, plain_step, [&](Operation const& operation) {
      if (operation.action == Action::lease && operation.slot != Operation::no_slot)
        pool_[operation.slot].zeroed |= !units[operation.unit]->sets_gradients;
    });
    for (auto& slot : pool_) {
      zero(slot, reduce_);
      slot.free.signal(device_, reduce_);
    }
  }

  /// Gives `unit` a slot to write gradients into: zeroed, or fresh for modules that begin their sums themselves.
  /// @note Stream: compute waits until the slot is free.
  void lease(Unit& unit, Slot<D>& slot, Stream& compute) {
    lease_bytes(slot, unit.full_numel(), sizeof(Reduce));
    unit.reduce_slot = &slot;
    unit.full_gradient = reinterpret_cast<Reduce*>(slot.data);
    slot.free.await(device_, compute, WaitSite::compute_gradient_slot);
    unit.begin_gradients();
    if (!slot.zeroed) zero_padding(unit, unit.full_gradient, compute);
  }
  /// The same where the gradient shard is what backward writes.
  /// @note Stream: compute waits until an all-reduce of an earlier micro-step is done with it.
  void lease_direct(Unit& unit, Stream& compute) {
    if constexpr (std::is_same_v<Reduce, float>) unit.full_gradient = unit.gradient;
    unit.reduced.await_pending(device_, compute, WaitSite::compute_gradient_slot);
    if (!std::exchange(unit.fresh, false)) return;
    unit.begin_gradients();
    if (unit.sets_gradients) {
      zero_padding(unit, unit.gradient, compute);
    } else {
      device_.zero_async(compute, unit.gradient, static_cast<std::size_t>(unit.shard_numel()) * sizeof(float));
    }
  }

  /// Adds what `compute` has written into the unit's gradients to its accumulator, for a later reduce().
  ///
  /// [Note: Gradients that wait] Gradients in the shard's type wait in their slot, which backward adds to. Narrower
  /// ones are added up in a full-size fp32 accumulator, and rounded once, when they are reduced.
  /// @note Stream: reduce waits for compute, where there is an accumulator.
  void hold(Unit& unit, Stream& compute) {
    unit.gradients_ready.signal(device_, compute);
    unit.gradients_ready.await(device_, reduce_, WaitSite::reduce_gradients);
    auto span = begin_span(reduce_, StreamKind::reduce, unit, "accumulate", unit.full_numel());
    kernels::accumulate(device_, reduce_, static_cast<Reduce const*>(unit.full_gradient), unit.accumulator,
                        unit.full_numel(), 1.0f, !unit.accumulated);
    span.end();
    if (!std::exchange(unit.accumulated, true)) lease_accumulator(unit, 1);
    recycle(unit, reduce_);
  }
  /// Adds what the accumulator holds to what `compute` has written, for the reduce() that follows.
  /// @note Stream: reduce waits for compute.
  void add_held(Unit& unit, Stream& compute) {
    unit.gradients_ready.signal(device_, compute);
    unit.gradients_ready.await(device_, reduce_, WaitSite::reduce_gradients);
    kernels::add(device_, reduce_, static_cast<float const*>(unit.accumulator), unit.full_gradient, unit.full_numel());
    unit.accumulated = false;
  }

  /// Reduces what `compute` has written into the unit's gradients so far.
  /// @param wire           the wire buffer that they are rounded into; Operation::no_slot: they travel as they are
  /// @param over_replicas  false: within the shard group only; the result waits in the partial shard
  /// @note Stream: reduce waits for compute, and for the last use of the wire buffer, replicate for reduce;
  /// `unit.reduced` says that the gradient shard is complete.
  /// @note Collective: one reduce-scatter of shard_numel elements a rank; with replicas one all-reduce of shard_numel
  /// elements.
  void reduce(Unit& unit, std::uint32_t wire, Stream& compute, bool over_replicas) {
    unit.gradients_ready.signal(device_, compute);
    unit.gradients_ready.await(device_, reduce_, WaitSite::reduce_gradients);
    auto* const rounded = wire == Operation::no_slot ? nullptr : &wires_[wire];
    auto const& sums = rounded == nullptr ? written_ : rounded_;
    void* sum = rounded == nullptr ? static_cast<void*>(unit.full_gradient) : round_into(*rounded, unit);
    Ticket scattered{}, replicated{};
    bool const several = unit.placement().shards > 1, replicated_too = unit.placement().replicas > 1;
    auto span = begin_span(reduce_, StreamKind::reduce, unit, several ? "reduce-scatter" : "accumulate",
                           unit.full_numel(), sums.element_bytes);
    if (several)
      sum = sums.reduce_scatter(*shard_comm_, reduce_, sum, unit.shard(), history_->label(unit.name(), "backward"),
                                scattered);
    if (unit.partial != nullptr) {
      span.end();
      add_to_partial(unit, sums, sum);
      if (several) shard_comm_->wait_for_peers(reduce_, scattered, WaitSite::reduce_peers_read);
      if (rounded == nullptr) recycle(unit, reduce_);
      if (over_replicas) replicate_partial(unit);
      return;
    }
    auto* stream = &reduce_;
    if (replicated_too) {
      span.end();
      scattered_.signal(device_, reduce_);
      stream = &*replicate_;
      scattered_.await(device_, *stream, WaitSite::replicate_scattered);
      span = begin_span(*stream, StreamKind::replicate, unit, "all-reduce", unit.shard_numel(), sums.element_bytes);
      replicated = sums.all_reduce(replicas_of(unit), *stream, sum, unit.shard_numel(),
                                   history_->label(unit.name(), "backward"));
    }
    add_to_shard(unit, sums, sum, *stream);
    span.end();
    if (several)
      shard_comm_->wait_for_peers(*stream, scattered,
                                  replicated_too ? WaitSite::replicate_scatter_peers : WaitSite::reduce_peers_read);
    if (replicated_too) replicas_of(unit).wait_for_peers(*stream, replicated, WaitSite::replicate_peers_read);
    if (rounded == nullptr) return recycle(unit, *stream);
    if (replicated_too) rounded->free.signal(device_, *stream);
  }

  /// Backward has written the unit's gradient shard itself.
  void end_direct(Unit& unit, Stream& compute) {
    unit.gradients_ready.signal(device_, compute);
    unit.full_gradient = nullptr;
    unit.reduced_once = true;
    unit.incomplete = unit.placement().replicas > 1;
  }
  /// @note Stream: replicate waits for what compute has written until then, other units' included.
  void await_direct(Unit& unit) { unit.gradients_ready.await(device_, *replicate_, WaitSite::reduce_gradients); }
  /// Sums a bucket over replicas, in place or in its wire buffer, and makes it a mean.
  /// @param unit  completes it
  /// @note Collective: one all-reduce.
  void all_reduce(Unit& unit, Program const& program, std::uint32_t index) {
    auto const bucket = program.buckets[index];
    float* const begin = gradients_ + bucket.begin;
    auto& world = replicas_of(unit);
    auto const label = history_->label(unit.name(), "backward");
    auto* const wire = program.bucket_wire == Operation::no_slot ? nullptr : &wires_[program.bucket_wire];
    if (wire != nullptr) {
      lease_bytes(*wire, bucket.size(), rounded_.element_bytes);
      auto rounding = begin_span(*replicate_, StreamKind::replicate, unit, "round", bucket.size(), sizeof(float));
      rounded_.round(device_, *replicate_, begin, wire->data, bucket.size());
      rounding.end();
    }
    auto span = begin_span(*replicate_, StreamKind::replicate, unit, "all-reduce", bucket.size(),
                           wire == nullptr ? sizeof(float) : rounded_.element_bytes);
    if (wire == nullptr) {
      Sums::average(world, *replicate_, begin, bucket.size(), label);
    } else {
      rounded_.average_into(world, device_, *replicate_, wire->data, begin, bucket.size(), label);
    }
    span.end();
  }
  /// All of the unit's buckets are under way: `unit.reduced` says when its gradient shard is complete.
  void complete_direct(Unit& unit) {
    unit.incomplete = false;
    mark_reduced(unit, *replicate_);
  }

  /// The backward pass is complete: what it has reduced counts as returned.
  void settle(Slot<D>& slot) { account_->lease(MemoryTag::reduce, -std::exchange(slot.counted, 0)); }
  void settle_accumulator(Unit const& unit) { lease_accumulator(unit, -1); }

  /// Forgets the gradients of all units, whether they are whole, left half-way, or wait for a reduction: the next
  /// backward pass begins their sums anew. Reductions under way are not forgotten: what is written next waits for them
  /// as always.
  /// @note Stream: slots that were leased and not reduced are zeroed on compute.
  template <class Units>
  void discard(Units const& units, Stream& compute) {
    for (auto& unit : units) {
      if (unit->full_gradient != nullptr && unit->reduce_slot != nullptr) recycle(*unit, compute);
      unit->accumulated = false;
      unit->full_gradient = nullptr;
      unit->partial_pending = unit->reduced_once = false;
      unit->fresh = true;
      // A bucket may have taken a part of a unit whose other part waits for the next bucket.
      if (std::exchange(unit->incomplete, false)) mark_reduced(*unit, *replicate_);
    }
    for (auto* const pool : {&pool_, &wires_})
      for (auto& slot : *pool) settle(slot);
    account_->lease(MemoryTag::reduce, -std::exchange(accumulator_bytes_, 0));
  }

 private:
  using Sums = detail::GradientSums<C>;

  [[nodiscard]] auto begin_span(Stream& stream, StreamKind kind, Unit const& unit, std::string_view what,
                                std::int64_t elements, std::size_t element = sizeof(Reduce)) {
    return trace_.begin(stream, kind, unit.name(), what, "backward", elements * static_cast<std::int64_t>(element));
  }
  /// The slot's memory counts as in use.
  void lease_bytes(Slot<D>& slot, std::int64_t elements, std::size_t element) {
    auto const bytes = elements * static_cast<std::int64_t>(element);
    account_->lease(MemoryTag::reduce, bytes - std::exchange(slot.counted, bytes));
  }
  void zero(Slot<D>& slot, Stream& stream) { device_.zero_async(stream, slot.data, slot.bytes); }
  /// No module writes padding, but norms and sums read it.
  template <class T>
  void zero_padding(Unit const& unit, T* gradients, Stream& compute) {
    for (auto const gap : unit.padding())
      device_.zero_async(compute, gradients + gap.begin, static_cast<std::size_t>(gap.size()) * sizeof(T));
  }

  /// The unit's slot may be leased again, after what `stream` has been given to do with it.
  void recycle(Unit& unit, Stream& stream) {
    auto& slot = *unit.reduce_slot;
    if (slot.zeroed) zero(slot, stream);
    slot.free.signal(device_, stream);
    unit.full_gradient = nullptr;
  }
  /// Rounds the unit's gradients into a wire buffer, and gives their slot back. @return the buffer
  void* round_into(Slot<D>& wire, Unit& unit) {
    lease_bytes(wire, unit.full_numel(), rounded_.element_bytes);
    wire.free.await_pending(device_, reduce_, WaitSite::reduce_wire_read);
    auto span = begin_span(reduce_, StreamKind::reduce, unit, "round", unit.full_numel());
    if constexpr (std::is_same_v<Reduce, float>)
      rounded_.round(device_, reduce_, unit.full_gradient, wire.data, unit.full_numel());
    span.end();
    recycle(unit, reduce_);
    return wire.data;
  }
  void lease_accumulator(Unit const& unit, std::int64_t sign) {
    auto const bytes = sign * unit.full_numel() * static_cast<std::int64_t>(sizeof(float));
    account_->lease(MemoryTag::reduce, bytes);
    accumulator_bytes_ += bytes;
  }

  /// A sum over all ranks becomes a mean: here, and in all_reduce for direct gradients.
  static float mean_of_sum(Unit const& unit) { return 1.0f / static_cast<float>(unit.placement().world); }
  C& replicas_of(Unit const& unit) {
    auto& first = *replicate_comms_[0];
    return first.size() == unit.placement().replicas ? first : *replicate_comms_[1];
  }
  void add_to_shard(Unit& unit, Sums const& sums, void const* sum, Stream& stream) {
    sums.accumulate(device_, stream, sum, unit.gradient, unit.shard_numel(), mean_of_sum(unit), unit.fresh);
    unit.fresh = false;
    unit.reduced_once = true;
    mark_reduced(unit, stream);
  }
  void mark_reduced(Unit& unit, Stream& stream) { unit.reduced.signal(device_, stream); }
  void add_to_partial(Unit& unit, Sums const& sums, void const* sum) {
    unit.partial_read.await_pending(device_, reduce_, WaitSite::reduce_partial_read);
    auto span = begin_span(reduce_, StreamKind::reduce, unit, "accumulate", unit.shard_numel());
    sums.accumulate(device_, reduce_, sum, unit.partial, unit.shard_numel(), 1.0f, !unit.partial_pending);
    span.end();
    unit.partial_pending = true;
  }
  void replicate_partial(Unit& unit) {
    scattered_.signal(device_, reduce_);
    scattered_.await(device_, *replicate_, WaitSite::replicate_scattered);
    auto span = begin_span(*replicate_, StreamKind::replicate, unit, "all-reduce", unit.shard_numel(), sizeof(float));
    auto& replicas = replicas_of(unit);
    constexpr auto fp32 = Sums::template of<float>();
    auto const replicated = fp32.all_reduce(replicas, *replicate_, unit.partial, unit.shard_numel(),
                                            history_->label(unit.name(), "backward"));
    add_to_shard(unit, fp32, unit.partial, *replicate_);
    span.end();
    replicas.wait_for_peers(*replicate_, replicated, WaitSite::replicate_peers_read);
    unit.partial_read.signal(device_, *replicate_);
    unit.partial_pending = false;
  }

  D device_;
  Sums written_ = Sums::template of<Reduce>();  ///< of what backward writes
  Sums rounded_;                                ///< of what it is rounded to
  std::optional<C> shard_comm_;
  std::array<std::optional<C>, 2> replicate_comms_;
  MemoryAccount* account_;
  History const* history_;
  TraceHook<D> trace_;
  BufferPool<D> pool_, wires_;
  std::int64_t accumulator_bytes_ = 0;  ///< of accumulators that count as in use

  // Direct gradients.
  float* gradients_ = nullptr;

  Fence<D> scattered_;
  Stream reduce_;  // streams last: joined before what their work uses is destroyed
  std::optional<Stream> replicate_;
};

}  // namespace fsdp
