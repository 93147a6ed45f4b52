// SPDX-License-Identifier: Apache-2.0
// A training step as data: operations at each use of a unit, and the buffers that they access. It does not depend on a
// rank or a device. compile_program() writes it. Executor, plans, checks and printers read it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A pass over the uses. `frozen_backward` is a backward pass that writes no gradients of parameters.
enum class PassKind : unsigned char {
  forward,
  backward,
  evaluation,
  frozen_backward,
  activations [[deprecated("write frozen_backward")]] = frozen_backward
};
using Phase [[deprecated("write PassKind")]] = PassKind;
inline constexpr std::array pass_kinds{PassKind::forward, PassKind::backward, PassKind::evaluation,
                                       PassKind::frozen_backward};

constexpr std::string_view name(PassKind kind) {
  constexpr std::array<std::string_view, pass_kinds.size()> names{"forward", "backward", "evaluation", "activations"};
  return names[static_cast<std::size_t>(kind)];
}

/// A use of a unit by a module. `recompute`: the module's forward is computed again, in a backward pass.
enum class UseKind : unsigned char { forward, backward, recompute };
using Pass = UseKind;  ///< the name that callers of HeldUse write

constexpr std::string_view name(UseKind kind) {
  constexpr std::array<std::string_view, 3> names{"forward", "backward", "recompute"};
  return names[static_cast<std::size_t>(kind)];
}

namespace step {

/// A unit of a step. Declarations are equal on all ranks; the stages of the compiler fill in the rest.
struct Unit {
  static constexpr std::uint32_t none = Operation::none;

  // Declared.
  std::int64_t elements = 0;           ///< padded
  std::string name{};                  ///< for texts
  bool sharded = true;                 ///< false: every rank keeps it whole
  bool reshards_after_forward = true;  ///< false: unsharded from forward until after backward
  bool sets_gradients = false;         ///< its modules store fresh gradients: only padding is zeroed for them
  bool padded = false;                 ///< some elements belong to no tensor
  bool frozen = false;                 ///< it does not train: no gradient, no update
  bool skips_gradients = false;        ///< its modules do not write gradients that are not wanted
  bool hooked = false;                 ///< functions of the caller follow its reductions
  ElementTypes types{};                ///< as declared; the shard in device memory has gathered_type()
  bool offloads_masters = false;       ///< its masters are fp32 in host memory
  /// A module's tensors of several kinds lie in several units. For all but the first: the index of the first, which has
  /// the module's uses. none: the unit has uses of its own.
  std::uint32_t first = none;

  // Planned: see UnitPlan.
  int shard_ranks = 1;      ///< ranks that share its parameters
  int replicas = 1;         ///< groups of such ranks
  bool in_backward = true;  ///< a backward pass of some path comes to some use of it
  /// Set if compute reads the master shard and nothing is gathered: the unit has one shard, and masters have the
  /// parameters' type; or it has no parameters.
  bool reads_masters = false;
  /// Set if backward writes the gradient shard, without a slot: the unit has one shard, and gradients have the shard's
  /// type; or it does not train.
  bool writes_shards = false;
  bool waits_for_replicas = false;  ///< sums within its shard group may wait, in a partial shard
  bool accumulates = false;         ///< full gradients may wait, in an accumulator

  // Placed: see PlacedBuffers.
  std::uint32_t gather_slot = none, kept_slot = none, gradient_slot = none;  ///< its own
  std::uint32_t staging_slot = 0;                                            ///< of its state in host memory

  int world() const { return shard_ranks * replicas; }
  std::int64_t shard() const { return elements / shard_ranks; }  ///< elements of a shard
  /// Bytes of so many elements: of parameters, of gradients as backward writes them.
  std::int64_t param_bytes(std::int64_t count) const {
    return count * static_cast<std::int64_t>(size_of(types.parameter));
  }
  std::int64_t gradient_bytes(std::int64_t count) const {
    return count * static_cast<std::int64_t>(size_of(types.gradient));
  }
  /// The type of the shard that is in device memory, from which the unit is gathered.
  DType gathered_type() const { return offloads_masters ? types.parameter : types.master; }
  /// Whether the unit has no parameters: its uses move nothing.
  bool empty() const { return elements == 0; }
  /// Whether the unit has parameters and is not frozen: it has gradients, and optimizers update it.
  bool trains() const { return !empty() && !frozen; }
};

}  // namespace step

/// The operations of a step, and its buffers.
class Program {
 public:
  /// No slot.
  static constexpr std::uint32_t none = step::Operation::none;
  using Unit [[deprecated("write step::Unit")]] = step::Unit;

  /// A turn of a pass: a use of a unit, and of the units beside it. In a backward pass, a use of a segment has two
  /// turns: it is recomputed first.
  struct Turn {
    std::uint32_t use = 0;            ///< in the declared order
    std::uint32_t unit = 0;           ///< the first one
    std::uint32_t index_in_path = 0;  ///< of the use: see [Note: Paths]
    std::vector<step::Operation> before;
    step::Operation compute;  ///< the module's kernels
    /// Accesses of these kernels to units beside its first. They are ordered and recorded as operations of their own.
    std::vector<step::Operation> beside;
    std::vector<step::Operation> after;
    bool recomputes() const { return compute.primitive == step::Primitive::recompute; }
  };

  /// The turns of a pass of a path, in order; path 0 is the declared order. Without StepInput::allow_frozen_parameters,
  /// `frozen_backward` has none.
  detail::FixedArray<Turn> const& turns(PassKind kind, std::size_t path = 0) const {
    return paths_[path].turns[static_cast<std::size_t>(kind)];
  }
  detail::FixedArray<Turn>& turns(PassKind kind, std::size_t path = 0) {
    return paths_[path].turns[static_cast<std::size_t>(kind)];
  }
  /// Number of paths, the declared order among them.
  std::size_t paths() const { return paths_.size(); }
  /// Empty: the declared order.
  std::string const& path_name(std::size_t path) const { return paths_[path].name; }
  /// Sets the number of paths, for the compiler.
  void set_paths(std::size_t count) { paths_ = detail::FixedArray<Path>(count); }
  void name_path(std::size_t path, std::string name) { paths_[path].name = std::move(name); }
  /// Number of uses of a forward pass.
  std::size_t uses(std::size_t path = 0) const { return turns(PassKind::forward, path).size(); }
  /// The last use of a backward pass; if units are frozen, the lowest use of a unit that trains. Below it nothing is
  /// gathered, unless it is recomputed: see [Note: Segments].
  /// @return its index in the path; uses(): nothing trains
  std::size_t backward_end(std::size_t path = 0) const {
    auto const& all = turns(PassKind::backward, path);
    return all.empty() ? uses(path) : all.back().index_in_path;
  }
  /// The turn of a use in a pass. @param index  of the use in the path
  /// @pre the use has a turn: in backward, index >= backward_end(), or the use is recomputed
  Turn const& turn(PassKind kind, std::size_t index, bool recomputes = false, std::size_t path = 0) const {
    auto const& all = turns(kind, path);
    if (kind == PassKind::forward || kind == PassKind::evaluation) return all[index];
    auto at = recomputes ? 0 : uses(path) - 1 - index;
    while (all[at].index_in_path != index || all[at].recomputes() != recomputes) ++at;
    return all[at];
  }

  /// Calls `visit(Operation const&)` for each operation of a pass in a micro-step with these flags, in order.
  template <class Visit>
  void for_each(PassKind kind, StepFlags flags, Visit&& visit, std::size_t path = 0) const {
    for (auto const& turn : turns(kind, path)) {
      for (auto const& operation : turn.before)
        if (operation.runs(flags)) visit(operation);
      visit(turn.compute);
      for (auto const& operation : turn.beside) visit(operation);
      for (auto const& operation : turn.after)
        if (operation.runs(flags)) visit(operation);
    }
  }

  /// The next unit that trains from `unit` on; units.size(): there is none.
  std::size_t next_that_trains(std::size_t unit) const {
    while (unit < units.size() && !units[unit].trains()) ++unit;
    return unit;
  }
  /// Calls `visit(Operation const&)` for each operation of an update, in order, of units that train and for which
  /// `has_update(unit)` is true.
  template <class Visit, class HasUpdate>
  void for_each_update(Visit&& visit, HasUpdate const& has_update) const {
    auto const fetch = [&](std::size_t unit) {
      if (fetches[unit].size > 0) visit(fetches[unit]);
      if (gradient_fetches[unit].size > 0) visit(gradient_fetches[unit]);
    };
    auto fetched = units.size();
    for (auto unit = next_that_trains(0); unit < units.size(); unit = next_that_trains(unit + 1)) {
      if (!has_update(unit)) continue;
      if (fetched != unit) fetch(unit);
      if (auto const next = next_that_trains(unit + 1); next < units.size() && has_update(next)) fetch(fetched = next);
      visit(updates[unit]);
      if (stores[unit].size > 0) visit(stores[unit]);
    }
  }

  /// Calls `visit(Operation&)` for every operation.
  template <class Visit>
  void for_each(Visit&& visit) {
    auto const all = [&](std::vector<step::Operation>& operations) {
      for (auto& operation : operations) visit(operation);
    };
    for_each_turn([&](Turn& turn) {
      all(turn.before);
      visit(turn.compute);
      all(turn.beside);
      all(turn.after);
    });
    all(norms), all(updates), all(fetches), all(gradient_fetches), all(stores), all(reads), all(absent);
  }
  /// Calls `visit(Turn&)` for every turn of all passes and paths.
  template <class Visit>
  void for_each_turn(Visit&& visit) {
    for (auto& path : paths_)
      for (auto& turns : path.turns)
        for (auto& turn : turns) visit(turn);
  }

  detail::FixedArray<step::Unit> units;
  std::vector<std::string> modules;  ///< by use
  std::vector<Slot> gather_slots;    ///< of full parameters; shared slots come last
  std::vector<Slot> kept_slots;      ///< of slices that stay after forward
  std::vector<Slot> gradient_slots;  ///< of full gradients; shared slots come last
  /// Buffers of rounded gradients: first those that units take in turn, then the one for buckets.
  std::vector<Slot> wires;
  std::uint32_t bucket_wire = none;  ///< in wires
  std::optional<DType> wire;         ///< the type that gradients are rounded to
  int kept_ranks = 0;                ///< over which kept slices divide a unit; 0: none are kept
  /// Bytes of the buffer for gradients that modules write although they are not wanted; nothing reads them.
  std::int64_t scratch_bytes = 0;
  std::int64_t staged_masters = 0, staged_gradients = 0;  ///< bytes of each of two staging slots
  std::int64_t accumulator_elements = 0;  ///< fp32, of gradients that wait where slots are too narrow for sums
  /// Order of the gradient shards in memory: first those that backward writes directly, then the others, each group in
  /// the order in which backward completes it. So buckets of several units are contiguous. Units that do not train are
  /// left out.
  std::vector<std::size_t> gradient_order;
  std::vector<Range> buckets;  ///< elements of the gradient shards that backward writes directly
  step::Buffers buffers;
  /// By stream: number of operations of a step that others may wait for, in all passes and updates; and of events after
  /// them.
  std::array<std::size_t, stream_kinds> awaitable{}, events{};
  /// The norm of each unit's gradient shard, and the unit's update by an optimizer. Callers of Shards run them between
  /// passes.
  std::vector<step::Operation> norms, updates;
  /// Moves of each unit's state in host memory, before and after its update (see [Note: Offloading]), and a reader of
  /// it. Operations without accesses do nothing.
  std::vector<step::Operation> fetches, gradient_fetches, stores, reads;
  /// Zeroes each unit's gradient shard, before norms and updates, if no backward pass since the last update has come to
  /// the unit. Programs without further paths, or without `zeros_for_absent`, have none.
  std::vector<step::Operation> absent;

 private:
  struct Path {
    std::string name;
    std::array<detail::FixedArray<Turn>, pass_kinds.size()> turns;
  };
  detail::FixedArray<Path> paths_ = detail::FixedArray<Path>(1);
};

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

/// Size of a gradient that the operation reduces; partial sums over replicas are fp32.
inline std::size_t reduced_bytes(Program const& program, step::Operation const& operation) {
  if (operation.all[0].cells.pool == step::Pool::wire) return size_of(*program.wire);
  if (operation.all[0].cells.pool != step::Pool::gradient_slot) return sizeof(float);
  return size_of(program.units[operation.unit].types.gradient);
}

/// Collectives of a pass of a micro-step.
inline Counts count(Program const& program, PassKind kind, StepFlags flags, std::size_t path = 0) {
  Counts counts;
  program.for_each(
      kind, flags,
      [&](step::Operation const& operation) {
        auto const ranks = operation.ranks;
        switch (operation.primitive) {
          case step::Primitive::all_gather:
            return counts.all_gather.add(operation.elements * ranks,
                                         size_of(program.units[operation.unit].types.parameter));
          case step::Primitive::reduce_scatter:
            return counts.reduce_scatter.add(operation.elements, reduced_bytes(program, operation));
          case step::Primitive::all_reduce:
            return counts.all_reduce.add(operation.elements, reduced_bytes(program, operation));
          default: return;
        }
      },
      path);
  return counts;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
