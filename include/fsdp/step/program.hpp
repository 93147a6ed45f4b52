// SPDX-License-Identifier: Apache-2.0
// A training step as data: what is gathered, kept, dropped and reduced at each use of a unit, and in which buffers. It
// knows no rank and no device; compile_program() writes it, and whatever has to know the step reads it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp {

/// What an operation does with its unit.
enum class Action : unsigned char {
  gather,           ///< gather stream: fills `slot` with the full parameters, from shards
  gather_slices,    ///< the same from slices that were kept, among fewer ranks
  await,            ///< compute: waits until they are there
  keep_slice,       ///< compute: copies a slice of them to the kept slot, for a gather among fewer ranks
  drop,             ///< compute: gives the slot back
  drop_slice,       ///< and the kept slice
  lease,            ///< compute: waits until `slot` is free; backward adds to what it holds
  hold,             ///< reduce: what backward wrote is added up in an accumulator, on this rank
  add_held,         ///< reduce: and what the accumulator holds is added to what backward wrote
  reduce_group,     ///< reduce: sums within the shard group; the result waits for the other replicas
  reduce,           ///< reduce, replicate: sums over all ranks into the gradient shard
  end_gradients,    ///< where backward writes gradient shards: the unit's is written
  await_gradients,  ///< replicate: waits until it is
  all_reduce,       ///< replicate: sums bucket `slot` over replicas
  complete,         ///< replicate: the unit's last bucket is under way
  settle,           ///< the pass ends: `slot` of gradients (none: the unit's accumulator) is not in use any more
  settle_wire       ///< and neither is wire buffer `slot`
};

constexpr std::string_view name(Action action) {
  constexpr std::array<std::string_view, 17> names{
      "gather",          "gather slices", "await",    "keep slice",   "drop",       "drop slice",
      "lease",           "hold",          "add held", "reduce group", "reduce",     "end",
      "await gradients", "all-reduce",    "complete", "settle",       "settle wire"};
  return names[static_cast<std::size_t>(action)];
}

/// What is true of a micro-step: one answer to each question, as bits. An operation names the answers under which it
/// runs, so that a question it does not depend on has all of its bits.
enum Facts : unsigned {
  starts_sharded = 1u << 0,    ///< no parameters are left of an earlier backward pass
  starts_unsharded = 1u << 1,  ///< all of them are
  drops = 1u << 2,             ///< backward drops parameters
  keeps = 1u << 3,             ///< backward leaves them
  syncs_none = 1u << 4,        ///< gradients stay on their rank
  syncs_group = 1u << 5,       ///< gradients are reduced within shard groups
  syncs_all = 1u << 6,         ///< gradients are reduced
  nothing_waits = 1u << 7,     ///< of earlier micro-steps, all gradients are reduced
  sums_wait = 1u << 8,         ///< sums within shard groups wait for replicas
  gradients_wait = 1u << 9,    ///< gradients wait on their rank, and maybe such sums as well
  any_facts = (1u << 10) - 1
};
constexpr Facts operator~(Facts a) { return static_cast<Facts>(~unsigned{a} & unsigned{any_facts}); }
constexpr Facts operator|(Facts a, Facts b) { return static_cast<Facts>(unsigned{a} | unsigned{b}); }
constexpr Facts operator&(Facts a, Facts b) { return static_cast<Facts>(unsigned{a} & unsigned{b}); }
/// The answers to each question.
inline constexpr Facts start_answers = starts_sharded | starts_unsharded, drop_answers = drops | keeps,
                       sync_answers = syncs_none | syncs_group | syncs_all,
                       waiting_answers = nothing_waits | sums_wait | gradients_wait;
inline constexpr std::array<unsigned, 4> questions{start_answers, drop_answers, sync_answers, waiting_answers};
/// All facts but the other answers to the questions that `answers` answer.
constexpr Facts only(Facts answers) {
  unsigned facts = 0;
  for (auto const question : questions) facts |= (answers & question) != 0 ? answers & question : question;
  return static_cast<Facts>(facts);
}
/// A micro-step that begins and ends with sharded parameters and reduces its gradients, and so did the one before.
inline constexpr Facts plain_step = starts_sharded | drops | syncs_all | nothing_waits;
/// What is left of a micro-step for the next one.
constexpr Facts left_by(Facts facts) {
  return ((facts & keeps) != 0 ? starts_unsharded : starts_sharded) | ((facts & syncs_none) != 0    ? gradients_wait
                                                                       : (facts & syncs_group) != 0 ? sums_wait
                                                                                                    : nothing_waits);
}

/// What clears one of the flags that follow, while a scope of it is open.
enum class BackwardChange : unsigned char { no_sync, no_replica_sync, keep_unsharded };

constexpr char const* name(BackwardChange change) {
  constexpr std::array<char const*, 3> names{"no_sync", "no_replica_sync", "keep_unsharded"};
  return names[static_cast<std::size_t>(change)];
}

/// What a backward pass does when it ends with a unit, as scopes say when it begins.
struct BackwardFlags {
  bool gradient_sync = true;  ///< reduces
  bool replica_sync = true;   ///< and sums over replicas
  bool reshard = true;        ///< drops parameters

  constexpr Facts facts() const {
    return (reshard ? drops : keeps) | (!gradient_sync ? syncs_none : replica_sync ? syncs_all : syncs_group);
  }
};

struct Operation {
  static constexpr std::uint32_t no_slot = ~0u;

  Action action;
  std::uint32_t unit;
  /// In gather_slots; of a slice in kept_slots, of lease in gradient_slots, of reduce in wires; of all_reduce a bucket.
  std::uint32_t slot = no_slot;
  Facts when = any_facts;

  constexpr bool runs(Facts facts) const { return (unsigned{facts} & ~unsigned{when}) == 0; }
  friend bool operator==(Operation const&, Operation const&) = default;
};

/// A pass over the uses.
enum class Phase : unsigned char { forward, backward, evaluation };
inline constexpr std::array phases{Phase::forward, Phase::backward, Phase::evaluation};

constexpr std::string_view name(Phase phase) {
  constexpr std::array<std::string_view, 3> names{"forward", "backward", "evaluation"};
  return names[static_cast<std::size_t>(phase)];
}

/// A buffer that operations name.
struct BufferPlan {
  static constexpr std::uint32_t any_unit = ~0u;

  std::int64_t elements;
  std::uint32_t unit = any_unit;  ///< whose it is alone; any_unit: of several in turn
};

/// The operations of a step, and the buffers that they need.
class Program {
 public:
  /// What happens at one use of a unit, before its computation and after it.
  struct Turn {
    std::uint32_t use = 0, unit = 0;
    std::vector<Operation> before, after;
  };

  /// The uses of a pass, in the order of their turns.
  std::vector<Turn> const& turns(Phase phase) const { return turns_[static_cast<std::size_t>(phase)]; }
  std::vector<Turn>& turns(Phase phase) { return turns_[static_cast<std::size_t>(phase)]; }
  /// The turn of `use` in a pass.
  Turn const& turn(Phase phase, std::size_t use) const {
    auto const& all = turns(phase);
    return all[phase == Phase::backward ? all.size() - 1 - use : use];
  }

  /// Calls `visit(Operation const&)` for what a pass does in such a micro-step, in order.
  template <class Visit>
  void for_each(Phase phase, Facts facts, Visit&& visit) const {
    for (auto const& turn : turns(phase))
      for (auto const* operations : {&turn.before, &turn.after})
        for (auto const& operation : *operations)
          if (operation.runs(facts)) visit(operation);
  }

  struct Unit {
    std::string name;
    std::int64_t elements = 0;  ///< padded
    int shards = 1;             ///< ranks that share its parameters
    int replicas = 1;           ///< and the groups of such ranks
    /// It has no parameters: its uses move nothing.
    bool empty() const { return elements == 0; }
    /// A single shard of the parameters' type is the full parameters: compute reads master weights where they are, and
    /// nothing is gathered.
    bool reads_masters = false;
    /// A single shard of the gradients' type is the full gradients: backward writes where optimizers read, without a
    /// slot.
    bool writes_shards = false;
    bool waits_for_replicas = false;                 ///< sums within its shard group may wait, in a partial shard
    std::uint32_t gather_slot = Operation::no_slot;  ///< its own
    std::uint32_t kept_slot = Operation::no_slot;
    std::uint32_t gradient_slot = Operation::no_slot;  ///< its own
  };
  std::vector<Unit> units;
  std::vector<std::string> modules;        ///< by use
  std::vector<BufferPlan> gather_slots;    ///< of full parameters; those that units share come last
  std::vector<BufferPlan> kept_slots;      ///< of slices that stay after forward
  std::vector<BufferPlan> gradient_slots;  ///< of full gradients; those that units share come last
  /// Of gradients that are rounded for the sum over ranks: those that units take in turn, then the buckets' one.
  std::vector<BufferPlan> wires;
  std::uint32_t bucket_wire = Operation::no_slot;  ///< in wires
  std::optional<DType> wire;                       ///< what they are rounded to
  std::size_t param_bytes = 4;                     ///< size of an element that is gathered
  std::size_t reduce_bytes = 4;                    ///< and of one that is reduced; partial sums over replicas are fp32
  std::int64_t accumulator_elements = 0;           ///< fp32, of gradients that wait where slots are too narrow for sums
  /// Units as their gradient shards lie in memory: those that backward writes itself first, each kind in the order in
  /// which backward completes it, so that buckets of several units are contiguous. Units without parameters have none.
  std::vector<std::size_t> gradient_order;
  std::vector<Range> buckets;  ///< of what backward writes itself: elements

 private:
  std::array<std::vector<Turn>, 3> turns_;
};

namespace detail {

/// "own", or what a shared slot is called: A, B, ..., Z, A1, ...
inline std::string slot_name(std::vector<BufferPlan> const& slots, std::uint32_t slot, char first, char last) {
  if (slots[slot].unit != BufferPlan::any_unit) return "own";
  unsigned in_turn = 0;
  for (std::uint32_t other = 0; other < slot; ++other) in_turn += slots[other].unit == BufferPlan::any_unit ? 1u : 0u;
  auto const letters = static_cast<unsigned>(last - first + 1);
  auto text = std::string(1, static_cast<char>(first + static_cast<int>(in_turn % letters)));
  return in_turn < letters ? text : text + std::to_string(in_turn / letters);
}

/// "->A", where an operation names a slot or a bucket that a reader wants to know.
inline std::string slot_of(Program const& program, Operation const& operation) {
  switch (operation.action) {
    case Action::gather:
    case Action::gather_slices:
    case Action::drop: return "->" + slot_name(program.gather_slots, operation.slot, 'A', 'Z');
    case Action::lease:
    case Action::settle:
      if (operation.slot == Operation::no_slot) return {};
      return "->" + slot_name(program.gradient_slots, operation.slot, 'x', 'z');
    case Action::reduce:
    case Action::reduce_group:
      if (operation.slot == Operation::no_slot) return {};
      return formatted(" in {}", name(*program.wire));
    case Action::all_reduce:
      if (!program.wire) return formatted(" bucket {}", operation.slot);
      return formatted(" bucket {} in {}", operation.slot, name(*program.wire));
    default: return {};
  }
}

inline std::string conditions_of(Facts when) {
  constexpr std::array<std::string_view, 10> names{
      "sharded at first", "unsharded at first", "dropping",      "keeping", "no sync", "group sync", "sync",
      "nothing waits",    "sums wait",          "gradients wait"};
  std::string text;
  for (auto const question : questions) {
    if ((unsigned{when} & question) == question) continue;
    text += text.empty() ? " if " : " and ";
    bool several = false;
    for (std::size_t bit = 0; bit < names.size(); ++bit) {
      if ((unsigned{when} & question & (1u << bit)) == 0) continue;
      text += formatted("{}{}", several ? " or " : "", names[bit]);
      several = true;
    }
  }
  return text;
}

}  // namespace detail

/// A line for each turn: its operations before the module's computation and after it. Shared gather slots are A, B, C,
/// shared gradient slots x, y. What settles an account when a pass ends moves nothing, and is left out.
/// @param facts  only operations that run in such a micro-step; any_facts: all, with what they depend on
inline std::string to_text(Program const& program, Facts facts = any_facts) {
  std::size_t width = 0;
  for (auto const& module : program.modules) width = std::max(width, module.size());
  std::string text;
  auto const add = [&](std::vector<Operation> const& operations) {
    std::string_view separator = " ";
    for (auto const& operation : operations) {
      if (operation.action >= Action::settle || (facts != any_facts && !operation.runs(facts))) continue;
      text += formatted("{}{} {}", separator, name(operation.action), program.units[operation.unit].name);
      text += detail::slot_of(program, operation);
      if (facts == any_facts) text += detail::conditions_of(operation.when);
      separator = ", ";
    }
  };
  for (auto const phase : phases) {
    for (auto const& turn : program.turns(phase)) {
      text += formatted("{:<10} {:<{}} |", name(phase), program.modules[turn.use], width);
      add(turn.before);
      text += " |";
      add(turn.after);
      text += '\n';
    }
  }
  return text;
}

/// Collectives of a pass, and the elements that a rank has of their results.
struct Counts {
  struct Collective {
    std::int64_t calls = 0, elements = 0, bytes = 0;
    void add(std::int64_t more, std::size_t element_bytes) {
      ++calls, elements += more, bytes += more * static_cast<std::int64_t>(element_bytes);
    }
    friend bool operator==(Collective const&, Collective const&) = default;
  };
  Collective all_gather;      ///< full parameters
  Collective reduce_scatter;  ///< gradient shards
  Collective all_reduce;      ///< gradient shards, or buckets of them

  friend bool operator==(Counts const&, Counts const&) = default;
};

/// What a pass of a micro-step sends.
inline Counts count(Program const& program, Phase phase, Facts facts) {
  Counts counts;
  program.for_each(phase, facts, [&](Operation const& operation) {
    auto const& unit = program.units[operation.unit];
    auto const shard = unit.elements / unit.shards;
    switch (operation.action) {
      case Action::gather:
      case Action::gather_slices:
        if (unit.shards > 1) counts.all_gather.add(unit.elements, program.param_bytes);
        break;
      case Action::reduce_group:
      case Action::reduce:
        if (unit.shards > 1) counts.reduce_scatter.add(shard, program.reduce_bytes);
        if (unit.replicas > 1 && operation.action == Action::reduce)
          counts.all_reduce.add(shard, unit.waits_for_replicas ? sizeof(float) : program.reduce_bytes);
        break;
      case Action::all_reduce:
        counts.all_reduce.add(program.buckets[operation.slot].size(), program.reduce_bytes);
        break;
      default: break;
    }
  });
  return counts;
}

}  // namespace fsdp
