// SPDX-License-Identifier: Apache-2.0
// Which operations need an event behind them, and which accesses nobody else can meet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/step/facts.hpp"
#include "fsdp/step/hazards.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/run.hpp"
#include "fsdp/step/step_input.hpp"

namespace fsdp::detail {

/// Marks accesses that can meet an access of another stream, or of peers. Others need no book-keeping: of a rank that
/// has its units for itself, there are none at all.
class AccessTracker {
 public:
  [[gnu::cold]] static void mark(Program& program, std::vector<step::Operation*> const& operations) {
    step::PerCell<Streams> cells(program.buffers);
    for (auto* const at : operations) {
      auto const& operation = *at;
      if (!is_ordered(operation)) continue;
      auto const stream = 1u << static_cast<unsigned>(operation.stream);
      for (auto const& access : operation.accesses()) {
        for (auto& cell : cells[access.cells]) {
          if (access.mode != step::Mode::write) cell.readers |= stream;
          if (access.mode != step::Mode::read) cell.writers |= stream;
          cell.peers = cell.peers || peers_read(operation.primitive, access);
        }
      }
    }
    for (auto* const at : operations) {
      auto& operation = *at;
      if (!is_ordered(operation)) continue;
      auto const others = ~(1u << static_cast<unsigned>(operation.stream));
      for (std::size_t i = 0; i < operation.size; ++i) {
        auto const& access = operation.all[i];
        bool meets = peers_read(operation.primitive, access);
        for (auto const& cell : cells[access.cells]) {
          bool const written = access.mode != step::Mode::read;
          meets = meets || (cell.writers & others) != 0 || (written && ((cell.readers & others) != 0 || cell.peers));
        }
        if (meets) operation.tracked = static_cast<std::uint8_t>(operation.tracked | 1u << i);
      }
    }
  }

 private:
  struct Streams {
    unsigned readers = 0, writers = 0;  ///< bits by stream
    bool peers = false;                 ///< peers read it
  };
  /// The open of a buffer by unit gives it no other bytes.
  static bool is_ordered(step::Operation const& operation) {
    if (operation.primitive != step::Primitive::open) return step::is_ordered(operation.primitive);
    return step::Buffers::has_slots(operation.all[0].cells.pool);
  }
};

/// Finds operations that others wait for, in runs of all kinds of micro-steps, pairs of them, and
/// evaluations.
///
/// [Note: Events] An event that is recorded right behind its operation is speed, not correctness: where an operation of
/// a run is waited for and has none, the executor records one late, behind everything that the stream has been given
/// until then.
class EventPlanner {
 public:
  [[gnu::cold]] static void mark(Program& program, StepInput const& input) {
    auto const choices = allowed_flags(program, input);
    EventPlanner of(program);
    step::Run run(program, [&of](step::Operation const& operation, step::Position const& at, step::Contents const&) {
      of.take(operation, at.flags);
    });
    run.prepare();
    auto const update_after = [&run](BackwardFlags flags) {
      run.micro_step(flags);
      run.norm();
      run.update();
    };
    for (auto const first : choices) {
      for (auto const second : choices) {
        run.micro_step(first);
        run.micro_step(second);
        update_after({});
      }
      for (int step = 0; step < 2; ++step) update_after({});
      run.evaluation();
    }
    update_after({});
  }

 private:
  explicit EventPlanner(Program const& program) : hazards_(program.buffers) {
    for (auto& stream : done_) stream.emplace_back();
  }
  /// Of a stream, by number.
  struct Done {
    step::Operation const* operation = nullptr;  ///< nullptr: one that is always recorded, and may be gone
    Facts facts{};
    step::Point point;
  };

  void take(step::Operation const& operation, Facts facts) {
    if (!operation.is_tracked()) return;
    bool const waits = hazards_.must_wait(operation);
    auto const needs = waits ? hazards_.before(operation) : step::Hazards::Needs();
    auto const done = [&](StreamKind stream) -> Done const& {
      return done_[static_cast<std::size_t>(stream)][needs.until[stream]];
    };
    if (waits) {
      step::Point learnt;
      step::for_each_event(
          needs, [&](StreamKind stream) -> step::Point const& { return done(stream).point; },
          [&](StreamKind stream) {
            record(done(stream));
            learnt.join(done(stream).point);
          });
      hazards_.learn(operation.stream, learnt);
    }
    for (std::size_t group = 0; waits && group < step::groups; ++group)
      hazards_.learn(operation.stream, static_cast<step::Group>(group), needs.until.peers[group]);
    hazards_.after(operation, step::is_collective(operation.primitive)
                                  ? ++collectives_[static_cast<std::size_t>(operation.group)]
                                  : 0);
    done_[static_cast<std::size_t>(operation.stream)].push_back(
        {operation.records == any_facts ? nullptr : &operation, facts, hazards_.point(operation.stream)});
  }

  static void record(Done const& done) {
    if (done.operation == nullptr) return;
    auto& records = const_cast<step::Operation*>(done.operation)->records;  // the program is this planner's to change
    // Updates follow passes of all kinds.
    records = done.operation->primitive == step::Primitive::update ? any_facts : records | done.facts;
  }

  step::Hazards hazards_;
  std::array<std::vector<Done>, stream_kinds> done_;
  std::array<std::uint64_t, step::groups> collectives_{};
};

/// Marks tracked accesses and recorded operations of a program.
[[gnu::cold]] inline void plan_events(Program& program, StepInput const& input) {
  auto const operations = program.all();
  AccessTracker::mark(program, operations);
  EventPlanner::mark(program, input);
  for (auto const* const operation : operations)
    if (operation->records != 0) ++program.events[static_cast<std::size_t>(operation->stream)];
}

}  // namespace fsdp::detail
