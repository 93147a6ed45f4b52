// SPDX-License-Identifier: Apache-2.0
// Compiles the program of a step, in four stages. The last one is here: it decides which operations record an event,
// and which accesses others conflict with. Files of a target that links fsdp::compiled see the declaration alone.
#pragma once

#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Compiles the step that runs as declared.
[[gnu::cold]] Program compile_program(StepInput const& input);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if !FSDP_COMPILED || defined(FSDP_DEFINE_BODIES)
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/step/hazards.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/place_buffers.hpp"
#include "fsdp/detail/step/plan_units.hpp"
#include "fsdp/detail/step/write_operations.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Marks accesses to cells that another stream or peers access too. Other accesses need no book-keeping. If a rank
/// shares no unit with other ranks, no access is marked.
class ConflictMarker {
 public:
  [[gnu::cold]] explicit ConflictMarker(Program const& program) : accessors_(program.buffers) {}

  [[gnu::cold]] void add(step::Operation const& operation) {
    if (!is_ordered(operation)) return;
    for (auto const& access : operation.accesses()) {
      auto const accessor = step::accessor(operation.stream);
      bool const for_peers = peers_read(operation.primitive, access);
      for (auto& cell : accessors_[access.cells]) {
        cell.all |= for_peers ? accessor | step::peers : accessor;
        if (access.mode != step::Mode::read) cell.writers |= accessor;
      }
    }
  }
  /// @pre all operations are added
  [[gnu::cold]] void mark(step::Operation& operation) const {
    if (!is_ordered(operation)) return;
    for (std::size_t i = 0; i < operation.size; ++i) {
      auto const& access = operation.all[i];
      unsigned accessors = peers_read(operation.primitive, access) ? step::peers : 0u;
      for (auto const& cell : accessors_[access.cells])
        accessors |= access.mode == step::Mode::read ? cell.writers : cell.all;
      operation.conflicts[i] = static_cast<step::Accessors>(accessors & ~unsigned{step::accessor(operation.stream)});
    }
  }

 private:
  struct CellAccessors {
    step::Accessors writers = 0, all = 0;
  };

  /// Whether the operation's accesses are ordered. After the open of a buffer by unit, its cells have the same
  /// addresses as before.
  static bool is_ordered(step::Operation const& operation) {
    if (operation.primitive != step::Primitive::open) return step::is_ordered(operation.primitive);
    return step::Buffers::has_slots(operation.all[0].cells.pool);
  }

  step::PerCell<CellAccessors> accessors_;
};

/// Finds operations that other operations wait for, in runs of all kinds of micro-steps, pairs of them, and
/// evaluations.
///
/// [Note: Events] Results do not depend on where an event is recorded. If a stream must wait for an operation without
/// an event, the executor records a *late* event, after everything that was enqueued until then. Such a wait may take
/// longer.
class EventPlanner final : public step::BasicRun {
 public:
  [[gnu::cold]] explicit EventPlanner(Program const& program) : BasicRun(program), hazards_(program.buffers) {
    for (auto& stream : done_) stream.push_back({});
  }

  [[gnu::cold]] void run(Program const& program, StepInput const& input) {
    AllowedFlags const allowed(program, input);
    prepare();
    for (auto const first : allowed) {
      for (auto const second : allowed) {
        micro_step(first);
        micro_step(second);
        last_micro_step();
        if (!second.gradient_sync || !second.replica_sync) continue;
        micro_step(first);
        last_micro_step(second);
        last_micro_step();
      }
      for (int times = 0; times < 2; ++times) last_micro_step();
      evaluation();
    }
    last_micro_step();
    if (!program.turns(PassKind::frozen_backward).empty()) run_frozen_backward(allowed);
    if (program.paths() > 1) run_paths(program, allowed);
  }

 private:
  [[gnu::cold]] void run_frozen_backward(AllowedFlags const& allowed) {
    for (auto const first : allowed) {
      for (auto const second : allowed) {
        micro_step(first);
        frozen_micro_step(second.reshard);
        frozen_micro_step(first.reshard);
        micro_step(second);
        last_micro_step();
        frozen_micro_step(second.reshard);
        last_micro_step();
      }
      frozen_micro_step(first.reshard);
      evaluation();
      frozen_micro_step();
    }
    last_micro_step();
  }
  /// Pairs of passes of different paths, and of each path with the declared order in other kinds of micro-steps. Of
  /// many paths not all pairs: each path precedes itself, the declared order, and paths at distances of 1, 2, 4, ...
  [[gnu::cold]] void run_paths(Program const& program, AllowedFlags const& allowed) {
    auto const paths = program.paths();
    constexpr std::size_t few = 16;
    for (std::size_t first = 0; first < paths; ++first) {
      if (first > 0) forget(program);
      if (paths <= few) {
        for (std::size_t second = 0; second < paths; ++second) run_pair(first, second);
      } else {
        run_pair(first, first);
        if (first > 0) run_pair(first, 0);
        for (std::size_t distance = 1; distance < paths; distance *= 2) run_pair(first, (first + distance) % paths);
      }
      follow(first), evaluation();
      follow(0), last_micro_step();
      for (auto const flags : allowed) {
        follow(first), micro_step(flags), micro_step(), last_micro_step();
        frozen_micro_step(flags.reshard), micro_step(flags);
        follow(0), micro_step(flags);
        follow(first), micro_step();
        follow(0), last_micro_step();
      }
    }
  }
  void run_pair(std::size_t first, std::size_t second) {
    follow(first), last_micro_step();
    follow(second), last_micro_step();
    follow(first), micro_step();
    follow(second), last_micro_step();
  }
  /// Forgets all operations so far: they are done, nobody need wait for them, and their memory is free again.
  [[gnu::cold]] void forget(Program const& program) {
    hazards_ = step::Hazards(program.buffers);
    collectives_ = {};
    for (auto& stream : done_) stream.assign(1, {});
  }
  /// An operation of a stream that is done. Streams count their operations from 1.
  struct Done {
    step::Operation const* operation = nullptr;  ///< nullptr: one that is always recorded, and may be gone
    StepFlags flags{};
    step::Point point;
  };

  /// Runs a micro-step and the optimizer's step.
  void last_micro_step(BackwardFlags flags = {}) {
    micro_step(flags);
    norm();
    update();
  }
  void visit(step::Operation const& operation, step::RunPosition const& at, step::Contents const&) override {
    if (!operation.has_conflicts()) return;
    if (auto const needs = hazards_.before(operation); needs.some()) wait(operation, needs);
    if (!operation.may_be_awaited()) return;
    hazards_.after(operation, step::is_collective(operation.primitive)
                                  ? ++collectives_[static_cast<std::size_t>(operation.group)]
                                  : 0);
    done_[static_cast<std::size_t>(operation.stream)].push_back(
        {operation.records == any_flags ? nullptr : &operation, at.flags, hazards_.point(operation.stream)});
  }
  void wait(step::Operation const& operation, step::Hazards::Needs const& needs) {
    auto const done = [&](StreamKind stream) -> Done const& {
      return done_[static_cast<std::size_t>(stream)][needs.streams.numbers[static_cast<std::size_t>(stream)]];
    };
    step::Point learnt;
    step::for_each_event(
        needs, [&](StreamKind stream) -> step::Point const& { return done(stream).point; },
        [&](StreamKind stream) {
          record(done(stream));
          learnt.join(done(stream).point);
        });
    hazards_.learn(operation.stream, learnt);
    step::for_each_bit(needs.peers.bits, [&](std::size_t group) {
      hazards_.learn(operation.stream, static_cast<step::Group>(group), needs.peers.numbers[group]);
    });
  }
  static void record(Done const& done) {
    if (done.operation == nullptr) return;
    auto& records = const_cast<step::Operation*>(done.operation)->records;  // the program is this planner's to change
    // Updates follow passes of all kinds.
    bool const around =
        done.operation->stream == StreamKind::copy || done.operation->primitive == step::Primitive::update;
    records = around ? any_flags : records | done.flags;
  }

  step::Hazards hazards_;
  std::array<std::vector<Done>, stream_kinds> done_;
  std::array<std::uint64_t, step::groups> collectives_{};
};

/// The accesses of a module's kernels to several units are enqueued together: one event, after the last of them.
[[gnu::cold]] inline void join_events(Program::Turn& turn) {
  if (turn.beside.empty()) return;
  auto* last = turn.compute.may_be_awaited() ? &turn.compute : nullptr;
  for (auto& operation : turn.beside) {
    if (!operation.may_be_awaited()) continue;
    if (last != nullptr) operation.records = operation.records | std::exchange(last->records, StepFlags{});
    last = &operation;
  }
}

/// Marks the conflicts of accesses and the recorded operations of a program.
[[gnu::cold]] inline void plan_events(Program& program, StepInput const& input) {
  ConflictMarker marker(program);
  program.for_each([&](step::Operation const& operation) { marker.add(operation); });
  program.for_each([&](step::Operation& operation) { marker.mark(operation); });
  EventPlanner(program).run(program, input);
  program.for_each_turn(join_events);
  program.for_each([&](step::Operation const& operation) {
    auto const stream = static_cast<std::size_t>(operation.stream);
    if (operation.may_be_awaited()) ++program.awaitable[stream];
    if (operation.records != 0) ++program.events[stream];
  });
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

FSDP_BODY Program compile_program(StepInput const& input) {
  detail::UnitPlan units(input);
  auto buffers = detail::place_buffers(units);
  auto program = detail::write_operations(std::move(units), std::move(buffers));
  detail::plan_events(program, input);
  return program;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
#endif
