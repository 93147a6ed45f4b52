// SPDX-License-Identifier: Apache-2.0
// Content of each buffer while a step runs. It decides whether an operation begins a sum or adds to it, and what is
// dropped with an abandoned pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Zeroes a slot of gradients outside the passes: before the first of them, and when gradients are discarded.
[[gnu::cold]] inline Operation zeroing(Program const& program, std::uint32_t slot, StreamKind stream) {
  auto zero =
      make_operation(Primitive::zero, stream, Operation::none, {writes(Buffers::whole(Pool::gradient_slot, slot))});
  zero.conflicts[0] = all_accessors;
  zero.records = any_flags;
  zero.bytes = program.gradient_slots[slot].bytes;
  return zero;
}

/// Contents of buffers, equal on all ranks. The runner of a program applies each operation here once it is enqueued;
/// nothing moves.
class Contents {
 public:
  /// State of a unit's gradient shard.
  enum class Gradient : unsigned char {
    none,  ///< no gradient: the first one is written
    sum,   ///< gradients since the last update: further ones are added
    used   ///< an optimizer has used them: they may be read; the next one is written
  };
  struct UnitState {
    std::uint32_t gather_slot = Operation::none;  ///< of its full parameters; none: there are none, or it reads masters
    std::uint32_t kept_slot = Operation::none;    ///< of the slice kept after forward
    std::uint32_t gradient_slot = Operation::none;  ///< of full gradients that are not reduced
    Gradient gradient = Gradient::none;
    bool written = false;              ///< backward writes the gradient shard, and has not ended
    bool partial = false;              ///< the partial shard holds sums that replicas have not added up
    bool accumulated = false;          ///< the accumulator holds gradients that are not reduced
    bool next_use_begins_sum = false;  ///< the next backward use stores gradients instead of adding to them
    bool opened = false;               ///< backward has got a slot of gradients, and has written nothing to it

    /// Whether gradients of earlier micro-steps wait for a reduction.
    bool waits() const { return gradient_slot != Operation::none || written || accumulated || partial; }
    /// Whether the gradient shard holds reduced gradients since the last update.
    bool is_reduced() const { return gradient == Gradient::sum && !waits(); }
    /// Whether the gradient shard holds reduced gradients, which an optimizer may have used.
    bool is_readable() const { return gradient != Gradient::none && !waits(); }
  };

  Contents() = default;
  [[gnu::cold]] explicit Contents(Program const& program)
      : program_(&program),
        units_(program.units.size()),
        unzeroed_by_(program.gradient_slots.size(), Operation::none) {}

  UnitState const& operator[](std::size_t unit) const { return units_[unit]; }

  /// @return whether the operation runs, by contents
  bool runs(Operation const& operation) const {
    if (operation.unless_begun || operation.if_begun) {
      bool const begun = units_[operation.unit].gradient == Gradient::sum;
      if (operation.if_begun != begun) return false;
    }
    switch (operation.condition) {
      case Condition::always: return true;
      case Condition::none_waits: return units_[operation.unit].gradient_slot == none;
      case Condition::opened: return units_[operation.unit].opened;
      case Condition::sum_waits: return units_[operation.unit].accumulated;
    }
    return true;
  }
  /// @return whether an access in mode `sum` begins the sum
  bool is_first_term(Operation const& operation) const {
    auto const& unit = units_[operation.unit];
    if (operation.primitive == Primitive::backward) return unit.next_use_begins_sum;
    switch (operation.all[1].cells.pool) {
      case Pool::gradient:
      case Pool::staged_gradient: return unit.gradient != Gradient::sum;
      case Pool::partial: return !unit.partial;
      case Pool::accumulator: return !unit.accumulated;
      default: return false;
    }
  }
  /// @return whether the open of a unit's gradient buffer gives it a buffer without sums
  bool is_new_sum(Operation const& open) const {
    return open.all[0].cells.pool == Pool::gradient_slot || units_[open.unit].gradient != Gradient::sum;
  }

  /// Applies an operation that has been enqueued.
  void apply(Operation const& operation) {
    if (operation.primitive == Primitive::discard) return discard();
    if (operation.unit == Operation::none) return;
    auto& unit = units_[operation.unit];
    switch (operation.primitive) {
      case Primitive::open: return open(unit, operation.all[0].cells, operation.unit);
      case Primitive::close: return close(unit, operation.all[0].cells.pool);
      case Primitive::zero:
        if (operation.all[0].cells.pool == Pool::gradient_slot) unzeroed_by_[operation.all[0].cells.first / 2] = none;
        if (operation.all[0].cells.pool == Pool::gradient) unit.gradient = Gradient::sum;
        return;
      case Primitive::backward: unit.next_use_begins_sum = unit.opened = false; return;
      case Primitive::round:
        if (operation.bucket == none) unit.gradient_slot = none;
        return;
      case Primitive::accumulate:
        if (operation.bucket == none) accumulate(unit, operation.all[0].cells.pool, operation.all[1].cells.pool);
        return;
      case Primitive::add: unit.accumulated = false; return;
      case Primitive::update: unit.gradient = Gradient::used; return;
      case Primitive::store:
        if (operation.all[1].cells.pool == Pool::gradient) unit.gradient = Gradient::sum;
        return;
      default: return;
    }
  }

  /// Calls `run(Operation const&)` for each operation that drops parameters of an abandoned pass.
  template <class Run>
  void drop_parameters(Run&& run) {
    for (std::uint32_t u = 0; u < units_.size(); ++u) {
      auto const [gather, kept] = std::pair(units_[u].gather_slot, units_[u].kept_slot);
      if (kept != none) run(closing(u, Buffers::kept(kept)));
      if (gather != none) run(closing(u, Buffers::whole(Pool::gather, gather)));
    }
  }
  /// Calls `run` for each operation that discards gradients: complete ones, those of an interrupted pass, and those
  /// that wait for a reduction. Slots that must hold zeroes are zeroed on compute. The next backward pass begins all
  /// sums anew.
  template <class Run>
  [[gnu::cold]] void discard_gradients(Run&& run) {
    if (program_ == nullptr) return;
    for (std::uint32_t slot = 0; slot < unzeroed_by_.size(); ++slot) {
      auto const cells = Buffers::whole(Pool::gradient_slot, slot);
      if (unzeroed_by_[slot] != none && program_->gradient_slots[slot].zeroed) {
        auto zero = zeroing(*program_, slot, StreamKind::compute);
        zero.unit = unzeroed_by_[slot];
        run(zero);
      }
      run(closing(0, cells));
    }
    for (std::uint32_t wire = 0; wire < program_->wires.size(); ++wire)
      run(closing(0, Buffers::whole(Pool::wire, wire)));
    for (std::uint32_t u = 0; u < units_.size(); ++u)
      if (program_->units[u].accumulates) run(closing(u, program_->buffers.of_unit(Pool::accumulator, u)));
    run(make_operation(Primitive::discard, StreamKind::compute, none, {}));
  }

 private:
  static constexpr auto none = Operation::none;

  static Operation closing(std::uint32_t unit, Cells cells) {
    return make_operation(Primitive::close, StreamKind::compute, unit, {reads(cells)});
  }
  void open(UnitState& unit, Cells cells, std::uint32_t index) {
    auto const slot = Buffers::has_slots(cells.pool) ? Buffers::index(cells) : none;
    switch (cells.pool) {
      case Pool::gather: unit.gather_slot = slot; return;
      case Pool::kept_slice: unit.kept_slot = slot; return;
      case Pool::gradient_slot:
        unit.gradient_slot = slot;
        unit.next_use_begins_sum = program_->units[index].sets_gradients;
        unit.opened = true;
        unzeroed_by_[slot] = index;
        return;
      case Pool::gradient:
        unit.next_use_begins_sum = program_->units[index].sets_gradients && unit.gradient != Gradient::sum;
        unit.gradient = Gradient::sum;
        unit.written = true;
        return;
      default: return;
    }
  }
  void discard() {
    for (auto& slot : unzeroed_by_) slot = none;
    for (auto& unit : units_) {
      unit.gradient_slot = none;
      unit.gradient = Gradient::none;
      unit.written = unit.partial = unit.accumulated = unit.next_use_begins_sum = unit.opened = false;
    }
  }
  static void close(UnitState& unit, Pool pool) {
    switch (pool) {
      case Pool::gather: unit.gather_slot = none; return;
      case Pool::kept_slice: unit.kept_slot = none; return;
      case Pool::gradient: unit.written = false; return;
      default: return;  // these close when a pass ends: their contents are used up
    }
  }
  static void accumulate(UnitState& unit, Pool from, Pool to) {
    if (from == Pool::gradient_slot) unit.gradient_slot = none;
    if (from == Pool::partial) unit.partial = false;
    if (to == Pool::partial) unit.partial = true;
    if (to == Pool::accumulator) unit.accumulated = true;
    if (to == Pool::gradient) unit.gradient = Gradient::sum;
  }

  Program const* program_ = nullptr;
  fsdp::detail::FixedArray<UnitState> units_;
  std::vector<std::uint32_t>
      unzeroed_by_;  ///< by gradient slot: the unit that has used it since it was last zeroed; none
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
