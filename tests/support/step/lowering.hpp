// SPDX-License-Identifier: Apache-2.0
// Lowers the program of a step to the list of its operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"
#include "tests/support/step/buffers.hpp"
#include "tests/support/step/operation.hpp"

namespace fsdp::step {

/// Declaration of a unit's gradients, as far as operations depend on it.
struct GradientFacts {
  bool sets_gradients = false;  ///< modules store fresh gradients; only padding is zeroed for them
  bool padded = false;          ///< some elements belong to no tensor
};

/// Writes down the operations of a run, call by call. A pass begins with its first use. Like the engine, it depends on
/// the flags of a micro-step, and on the contents that earlier calls have left in the buffers.
class Lowering {
 public:
  /// @param input    what `program` was compiled from
  /// @param facts    by unit
  /// @param moments  optimizer values per parameter
  Lowering(Program const& program, StepInput const& input, std::vector<GradientFacts> facts, int moments)
      : program_(&program),
        buffers_(program),
        facts_of_(std::move(facts)),
        moments_(moments),
        written_bytes_(static_cast<std::int64_t>(input.reduce_bytes)),
        world_(input.shards * input.replicas),
        units_(program.units.size()),
        zeroed_(program.gradient_slots.size(), false) {
    program.for_each(Phase::backward, plain_step, [&](fsdp::Operation const& action) {
      if (action.action == Action::lease && action.slot != fsdp::Operation::no_slot &&
          !facts_of_[action.unit].sets_gradients)
        zeroed_[action.slot] = true;
    });
  }

  List const& list() const { return list_; }
  Buffers const& buffers() const { return buffers_; }
  std::vector<GradientFacts> const& facts() const { return facts_of_; }

  /// The buffers are placed: all gradient slots are zeroed.
  void prepare() {
    at_.use = Position::no_use;
    for (std::uint32_t slot = 0; slot < program_->gradient_slots.size(); ++slot) zero(slot, StreamKind::reduce);
  }

  void forward(std::size_t use) {
    if (use == 0) {
      facts_ = left_;
      if ((facts_ & starts_sharded) != 0) reshard();
      left_ = starts_sharded | (left_ & waiting_answers);
      begin(evaluations_ > 0 ? Phase::evaluation : Phase::forward);
    }
    run(use, Primitive::forward);
    pass_ = use + 1 == uses() ? Pass::idle : Pass::forward;
  }
  /// @param flags  of the pass; looked at when it begins
  void backward(std::size_t use, BackwardFlags flags) {
    if (use + 1 == uses()) {
      facts_ = flags.facts() | (left_ & waiting_answers);
      begin(Phase::backward);
    }
    run(use, Primitive::backward);
    pass_ = use == 0 ? Pass::idle : Pass::backward;
    if (use == 0) left_ = left_by(facts_), ++backwards_;
  }
  void begin_evaluation() {
    abandon();
    ++evaluations_;
  }
  void end_evaluation() {
    abandon();
    --evaluations_;
  }
  /// Gradients are forgotten, and a pass that is under way.
  void discard() {
    between();
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      auto& unit = units_[u];
      if (unit.gradient_slot != none) recycle(u, StreamKind::compute);
      unit.accumulated = unit.partial = false;
      unit.fresh = true;
    }
    emit(Primitive::discard, StreamKind::compute, none, {});
    left_ = (left_ & start_answers) | nothing_waits;
    if (pass_ == Pass::backward) ++backwards_;
    if (std::exchange(pass_, Pass::idle) != Pass::idle) abandon();
  }
  /// The gradient norm is measured.
  void norm() {
    between();
    for (std::uint32_t u = 0; u < units_.size(); ++u)
      if (!program_->units[u].empty())
        emit(Primitive::norm, StreamKind::compute, u, {read(buffers_.of_unit(Pool::gradient, u))});
  }
  /// By default, an optimizer reads every gradient shard, and reads and writes moments and master shards, unit by unit.
  void update() {
    between();
    abandon();
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      if (program_->units[u].empty()) continue;
      auto const gradient = read(buffers_.of_unit(Pool::gradient, u));
      auto const master = add(buffers_.of_unit(Pool::master, u)), moments = add(buffers_.of_unit(Pool::moments, u));
      auto const bytes = shard_elements(u) * fp32;
      if (moments_ > 0) {
        emit(Primitive::update, StreamKind::compute, u, {gradient, master, moments}, bytes);
      } else {
        emit(Primitive::update, StreamKind::compute, u, {gradient, master}, bytes);
      }
      units_[u].fresh = true;
    }
    ++at_.step;
  }

  /// A forward and a backward pass.
  void micro_step(BackwardFlags flags = {}) {
    for (std::size_t use = 0; use < uses(); ++use) forward(use);
    for (auto use = uses(); use-- > 0;) backward(use, flags);
  }
  void evaluation() {
    begin_evaluation();
    for (std::size_t use = 0; use < uses(); ++use) forward(use);
    end_evaluation();
  }

 private:
  static constexpr auto none = Operation::none;
  static constexpr std::int64_t fp32 = sizeof(float);
  enum class Pass { idle, forward, backward };

  /// Slots that a unit has now, and the state of its other buffers.
  struct Unit {
    std::uint32_t gather_slot = none, kept_slot = none, gradient_slot = none;
    bool fresh = true;         ///< no gradient in the shard since the last update
    bool accumulated = false;  ///< gradients wait in the accumulator
    bool partial = false;      ///< sums wait in the partial shard
    bool begins_sum = false;   ///< the next use of backward stores the gradients
  };

  static Access read(Cells cells) { return {cells, Mode::read}; }
  static Access write(Cells cells) { return {cells, Mode::write}; }
  static Access add(Cells cells) { return {cells, Mode::add}; }
  /// The first term of a sum is written, others are added.
  static Access sum(Cells cells, bool first) { return {cells, first ? Mode::write : Mode::add}; }

  std::size_t uses() const { return program_->turns(Phase::forward).size(); }
  std::int64_t full_elements(std::uint32_t u) const { return program_->units[u].elements; }
  std::int64_t shard_elements(std::uint32_t u) const { return full_elements(u) / program_->units[u].shards; }
  std::int64_t param_bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(program_->param_bytes);
  }
  std::int64_t reduce_bytes(std::int64_t elements) const {
    return elements * static_cast<std::int64_t>(program_->reduce_bytes);
  }

  Operation& emit(Primitive primitive, StreamKind stream, std::uint32_t unit, std::initializer_list<Access> accesses,
                  std::int64_t bytes = 0) {
    Operation operation{.primitive = primitive, .stream = stream, .unit = unit, .bytes = bytes, .at = at_};
    return list_.add(operation, accesses);
  }
  Operation& emit_collective(Primitive primitive, StreamKind stream, std::uint32_t unit, Group group, int ranks,
                             std::initializer_list<Access> accesses, std::int64_t bytes) {
    auto& operation = emit(primitive, stream, unit, accesses, bytes);
    operation.group = group;
    operation.ranks = ranks;
    return operation;
  }

  void begin(Phase phase) {
    at_.phase = phase;
    at_.micro_step = backwards_ + 1;
  }
  void between() { at_.use = Position::no_use; }
  void run(std::size_t use, Primitive compute) {
    auto const& turn = program_->turn(at_.phase, use);
    at_.use = static_cast<std::uint32_t>(use);
    for (auto const& action : turn.before)
      if (action.runs(facts_)) lower(action);
    lower_compute(turn.unit, compute);
    for (auto const& action : turn.after)
      if (action.runs(facts_)) lower(action);
    between();
  }
  void lower_compute(std::uint32_t u, Primitive compute) {
    auto& unit = units_[u];
    auto const& planned = program_->units[u];
    if (planned.empty()) {
      emit(compute, StreamKind::compute, u, {});
      return;
    }
    auto const parameters =
        read(planned.reads_masters ? buffers_.of_unit(Pool::master, u) : content(u, Pool::gather, unit.gather_slot));
    auto const bytes = param_bytes(full_elements(u));
    if (compute == Primitive::forward) {
      emit(compute, StreamKind::compute, u, {parameters}, bytes);
      return;
    }
    auto const gradients = planned.writes_shards ? buffers_.of_unit(Pool::gradient, u) : full_gradients(u);
    emit(compute, StreamKind::compute, u, {parameters, sum(gradients, std::exchange(unit.begins_sum, false))}, bytes);
  }
  /// What a slot holds of the unit. Without peers, the own slice is all.
  Cells content(std::uint32_t u, Pool pool, std::uint32_t slot) const {
    return program_->units[u].shards > 1 ? Buffers::whole(pool, slot) : Buffers::own(pool, slot);
  }
  Cells full_gradients(std::uint32_t u) const { return content(u, Pool::gradient_slot, units_[u].gradient_slot); }

  void lower(fsdp::Operation const& action) {
    switch (action.action) {
      case Action::gather: return gather(action.unit, action.slot);
      case Action::gather_slices: return gather_slices(action.unit, action.slot);
      case Action::keep_slice: return keep_slice(action.unit, action.slot);
      case Action::drop: return drop(action.unit);
      case Action::drop_slice: return drop_slice(action.unit);
      case Action::lease:
        return action.slot == fsdp::Operation::no_slot ? lease_shard(action.unit) : lease(action.unit, action.slot);
      case Action::hold: return hold(action.unit);
      case Action::add_held: return add_held(action.unit);
      case Action::reduce_group: return reduce(action.unit, action.slot, false);
      case Action::reduce: return reduce(action.unit, action.slot, true);
      case Action::all_reduce: return all_reduce(action.unit, action.slot);
      case Action::await:
      case Action::end_gradients:
      case Action::await_gradients:
      case Action::complete:
      case Action::settle:
      case Action::settle_wire: return;  // these order, or account
    }
  }

  void gather(std::uint32_t u, std::uint32_t slot) {
    open_parameters(u, slot);
    auto const own = Buffers::own(Pool::gather, slot);
    emit(Primitive::cast, StreamKind::gather, u, {read(buffers_.of_unit(Pool::master, u)), write(own)},
         param_bytes(shard_elements(u)));
    if (auto const ranks = program_->units[u].shards; ranks > 1)
      emit_collective(Primitive::all_gather, StreamKind::gather, u, Group::gather, ranks,
                      {read(own), write(Buffers::rest(Pool::gather, slot))}, param_bytes(full_elements(u)));
  }
  void gather_slices(std::uint32_t u, std::uint32_t slot) {
    open_parameters(u, slot);
    auto const kept = units_[u].kept_slot;
    auto const ranks = static_cast<int>(full_elements(u) / program_->kept_slots[kept].elements);
    emit_collective(Primitive::all_gather, StreamKind::gather, u, Group::kept, ranks,
                    {read(Buffers::kept(kept)), write(Buffers::whole(Pool::gather, slot))},
                    param_bytes(full_elements(u)));
  }
  void open_parameters(std::uint32_t u, std::uint32_t slot) {
    units_[u].gather_slot = slot;
    emit(Primitive::open, StreamKind::gather, u, {write(Buffers::whole(Pool::gather, slot))});
  }
  void keep_slice(std::uint32_t u, std::uint32_t slot) {
    auto& unit = units_[u];
    unit.kept_slot = slot;
    emit(Primitive::open, StreamKind::compute, u, {write(Buffers::kept(slot))});
    emit(Primitive::copy, StreamKind::compute, u,
         {read(Buffers::whole(Pool::gather, unit.gather_slot)), write(Buffers::kept(slot))},
         param_bytes(program_->kept_slots[slot].elements));
  }
  void drop(std::uint32_t u) {
    auto const slot = std::exchange(units_[u].gather_slot, none);
    emit(Primitive::close, StreamKind::compute, u, {read(Buffers::whole(Pool::gather, slot))});
  }
  void drop_slice(std::uint32_t u) {
    auto const slot = std::exchange(units_[u].kept_slot, none);
    emit(Primitive::close, StreamKind::compute, u, {read(Buffers::kept(slot))});
  }
  void reshard() {
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      if (units_[u].kept_slot != none) drop_slice(u);
      if (units_[u].gather_slot != none) drop(u);
    }
  }
  /// A pass that is under way is forgotten, and parameters that one has left.
  void abandon() {
    between();
    pass_ = Pass::idle;
    reshard();
    left_ = starts_sharded | (left_ & waiting_answers);
  }

  void lease(std::uint32_t u, std::uint32_t slot) {
    auto& unit = units_[u];
    unit.gradient_slot = slot;
    unit.begins_sum = facts_of_[u].sets_gradients;
    emit(Primitive::open, StreamKind::compute, u, {write(Buffers::whole(Pool::gradient_slot, slot))});
    if (!zeroed_[slot] && facts_of_[u].padded)
      emit(Primitive::zero_padding, StreamKind::compute, u, {write(full_gradients(u))});
  }
  /// Backward writes the gradient shard.
  void lease_shard(std::uint32_t u) {
    if (!std::exchange(units_[u].fresh, false)) return;
    auto const& facts = facts_of_[u];
    units_[u].begins_sum = facts.sets_gradients;
    auto const shard = write(buffers_.of_unit(Pool::gradient, u));
    if (!facts.sets_gradients) {
      emit(Primitive::zero, StreamKind::compute, u, {shard}, full_elements(u) * fp32);
    } else if (facts.padded) {
      emit(Primitive::zero_padding, StreamKind::compute, u, {shard});
    }
  }
  void zero(std::uint32_t slot, StreamKind stream, std::uint32_t u = none) {
    emit(Primitive::zero, stream, u, {write(Buffers::whole(Pool::gradient_slot, slot))},
         program_->gradient_slots[slot].elements * written_bytes_);
  }
  /// The unit's gradient slot is read. It is zeroed for the next unit, unless no unit counts on that.
  void recycle(std::uint32_t u, StreamKind stream) {
    auto const slot = std::exchange(units_[u].gradient_slot, none);
    if (zeroed_[slot]) zero(slot, stream, u);
    emit(Primitive::close, stream, u, {read(Buffers::whole(Pool::gradient_slot, slot))});
  }

  void hold(std::uint32_t u) {
    auto const first = !std::exchange(units_[u].accumulated, true);
    emit(Primitive::accumulate, StreamKind::reduce, u,
         {read(full_gradients(u)), sum(buffers_.of_unit(Pool::accumulator, u), first)}, full_elements(u) * fp32);
    recycle(u, StreamKind::reduce);
  }
  void add_held(std::uint32_t u) {
    units_[u].accumulated = false;
    emit(Primitive::add, StreamKind::reduce, u, {read(buffers_.of_unit(Pool::accumulator, u)), add(full_gradients(u))},
         full_elements(u) * written_bytes_);
  }
  void reduce(std::uint32_t u, std::uint32_t wire, bool over_replicas) {
    auto const& planned = program_->units[u];
    bool const rounded = wire != fsdp::Operation::no_slot;
    auto const pool = rounded ? Pool::wire : Pool::gradient_slot;
    auto const slot = rounded ? wire : units_[u].gradient_slot;
    auto const own = Buffers::own(pool, slot);
    if (rounded) {
      emit(Primitive::open, StreamKind::reduce, u, {write(Buffers::whole(pool, slot))});
      emit(Primitive::round, StreamKind::reduce, u, {read(full_gradients(u)), write(content(u, pool, slot))},
           reduce_bytes(full_elements(u)));
      recycle(u, StreamKind::reduce);
    }
    if (planned.shards > 1)
      emit_collective(Primitive::reduce_scatter, StreamKind::reduce, u, Group::reduce, planned.shards,
                      {add(own), read(Buffers::rest(pool, slot))}, reduce_bytes(full_elements(u)));
    auto const done = [&](StreamKind stream) {
      if (!rounded) return recycle(u, stream);
      emit(Primitive::close, stream, u, {read(Buffers::whole(pool, slot))});
    };
    auto const bytes = shard_elements(u) * fp32;
    if (planned.waits_for_replicas) {
      auto const partial = buffers_.of_unit(Pool::partial, u);
      auto const first = !std::exchange(units_[u].partial, !over_replicas);
      emit(Primitive::accumulate, StreamKind::reduce, u, {read(own), sum(partial, first)}, bytes);
      done(StreamKind::reduce);
      if (!over_replicas) return;
      emit_collective(Primitive::all_reduce, StreamKind::replicate, u, replicas_of(u), planned.replicas, {add(partial)},
                      bytes);
      return accumulate(u, partial, StreamKind::replicate);
    }
    bool const replicated = planned.replicas > 1;
    auto const stream = replicated ? StreamKind::replicate : StreamKind::reduce;
    if (replicated)
      emit_collective(Primitive::all_reduce, stream, u, replicas_of(u), planned.replicas, {add(own)},
                      reduce_bytes(shard_elements(u)));
    accumulate(u, own, stream);
    done(stream);
  }
  /// A sum over all ranks to the gradient shard.
  void accumulate(std::uint32_t u, Cells from, StreamKind stream) {
    auto const first = std::exchange(units_[u].fresh, false);
    emit(Primitive::accumulate, stream, u, {read(from), sum(buffers_.of_unit(Pool::gradient, u), first)},
         shard_elements(u) * fp32);
  }
  /// Of a bucket of gradient shards that backward has written.
  void all_reduce(std::uint32_t u, std::uint32_t bucket) {
    auto const elements = program_->buckets[bucket].size();
    auto const ranks = program_->units[u].replicas;
    auto const gradients = buffers_.bucket(bucket);
    auto const send = [&](Cells cells) {
      auto& operation = emit_collective(Primitive::all_reduce, StreamKind::replicate, u, replicas_of(u), ranks,
                                        {add(cells)}, reduce_bytes(elements));
      operation.mean = true;
      operation.bucket = bucket;
    };
    if (program_->bucket_wire == fsdp::Operation::no_slot) return send(gradients);
    auto const wire = Buffers::own(Pool::wire, program_->bucket_wire);
    emit(Primitive::open, StreamKind::replicate, u, {write(wire)});
    emit(Primitive::round, StreamKind::replicate, u, {read(gradients), write(wire)}, reduce_bytes(elements)).bucket =
        bucket;
    send(wire);
    emit(Primitive::accumulate, StreamKind::replicate, u, {read(wire), write(gradients)}, elements * fp32).bucket =
        bucket;
    emit(Primitive::close, StreamKind::replicate, u, {read(wire)});
  }
  Group replicas_of(std::uint32_t u) const {
    return program_->units[u].replicas == world_ ? Group::all_replicas : Group::replicas;
  }

  Program const* program_;
  Buffers buffers_;
  std::vector<GradientFacts> facts_of_;
  int moments_;
  std::int64_t written_bytes_;  ///< of a gradient as backward writes it
  int world_;
  std::vector<Unit> units_;
  std::vector<bool> zeroed_;  ///< by gradient slot: some unit counts on zeroes
  List list_;
  Position at_;
  Pass pass_ = Pass::idle;            ///< that has begun and is not complete
  Facts facts_ = plain_step;          ///< of the pass
  Facts left_ = left_by(plain_step);  ///< by earlier passes
  std::uint32_t backwards_ = 0;       ///< passes that were completed or discarded
  int evaluations_ = 0;               ///< scopes that are open
};

}  // namespace fsdp::step
