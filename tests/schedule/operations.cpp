// SPDX-License-Identifier: Apache-2.0
// The operations of a run of a program against what the engine enqueues, over a table of engines: the same operations
// in the same order on the same streams, each with the same bytes read and written here, and read by peers. In symbols,
// every reader of a buffer finds the content that it needs. No event is recorded late, but after half a pass. A
// simulation of the operations ends each when what was enqueued would end it. Nothing is offloaded here: recorded.cpp
// looks at these accesses.
// skip-sanitizers
// full-run: [operations]
// timeout: 3600
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/simulate.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/table_row.hpp"
#include "tests/support/recording.hpp"
#include "tests/support/step_memory.hpp"

namespace {

using engine_table::Call;
using engine_table::Precision;
using engine_table::Row;
using fsdp::step::Executed;
using fsdp::step::Group;
using fsdp::step::Primitive;
using fsdp::testing::Enqueued;
using fsdp::testing::Recording;
using fsdp::testing::Stretch;
using Device = fsdp::testing::RecordingDevice<fsdp::host::Device>;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<fsdp::testing::Recorder<Local>>;

template <class Run>
void repeat(Call const& call, Run& run) {
  switch (call.kind) {
    case Call::Kind::forward: return run.forward(call.use);
    case Call::Kind::backward: return run.backward(call.use, call.flags, call.recomputes);
    case Call::Kind::activations: return run.frozen_backward(call.use, call.flags.reshard, call.recomputes);
    case Call::Kind::begin_evaluation: return run.begin_evaluation();
    case Call::Kind::end_evaluation: return run.end_evaluation();
    case Call::Kind::discard: return run.discard();
    case Call::Kind::norm: return run.norm();
    case Call::Kind::update: return run.update();
  }
}

/// An entry of a recording is the primitive, or one part of it.
bool is_primitive(Enqueued const& entry, fsdp::step::Operation const& operation, std::string_view unit) {
  namespace kernels = fsdp::kernels::detail;
  auto const is = [&](std::type_info const& kernel) { return entry.what == kernel.name(); };
  auto const collective = [&](std::string_view name) { return entry.what == fmt::format("{} of {}", name, unit); };
  switch (operation.primitive) {
    case Primitive::cast: return is(typeid(kernels::Cast)) || entry.what == "copy";  // of equal narrow types
    case Primitive::round: return is(typeid(kernels::Cast));
    case Primitive::copy: return entry.what == "copy";
    case Primitive::zero:
    case Primitive::zero_padding: return entry.what == "zero";
    case Primitive::accumulate: return is(typeid(kernels::Accumulate));
    case Primitive::add: return is(typeid(kernels::Add));
    case Primitive::all_gather: return collective("all_gather");
    case Primitive::reduce_scatter: return collective("reduce_scatter");
    case Primitive::all_reduce: return collective("all_reduce");
    case Primitive::hook: return is(typeid(engine_table::ChangeReduced));
    case Primitive::forward:
    case Primitive::recompute: return is(typeid(engine_table::ReadParameters));
    case Primitive::backward:
      if (operation.size == 1) return is(typeid(engine_table::ReadParameters));
      return is(typeid(engine_table::AddGradients)) || is(typeid(engine_table::SetGradients));
    case Primitive::norm: return is(typeid(kernels::NormPartials<fsdp::NormKind::l2>));
    case Primitive::update: return is(typeid(kernels::Sgd<false>));
    default: return false;
  }
}

std::string text(std::vector<Stretch> const& stretches) {
  std::string words;
  for (auto const& part : stretches)
    words += fmt::format(" {}{} {:#x}-{:#x}", part.reads ? "r" : "", part.writes ? "w" : "", part.begin, part.end);
  return words;
}

/// Enqueued work of one rank that accesses memory of the program, in order.
struct Recorded {
  struct Operation {
    std::size_t index;
    Enqueued const* entry;
    std::vector<fsdp::testing::Access> accesses;
  };
  std::vector<Operation> operations;
  std::string problem;

  /// @param first  entry after the engine was sealed; before it, only the reduce stream does what a list has
  template <class Memory>
  Recorded(Recording const& recording, std::size_t first, Memory const& memory) {
    for (std::size_t i = 0; i < recording.entries.size(); ++i) {
      auto const& entry = recording.entries[i];
      if (entry.kind != Enqueued::Kind::operation && entry.kind != Enqueued::Kind::collective) continue;
      auto const& stream = recording.streams[static_cast<std::size_t>(entry.stream)];
      if (i < first && stream != "reduce") continue;
      Operation operation{i, &entry, {}};
      for (auto const& access : entry.accesses) {
        // Norms and optimizers also access scalars and moments, which are not the program's.
        if (memory.contains(access.begin, access.end)) {
          operation.accesses.push_back(access);
        } else if (stream != "compute") {
          problem = fmt::format("entry {}, {} on {}, accesses other memory than the program's", i, entry.what, stream);
        }
      }
      if (!operation.accesses.empty()) operations.push_back(std::move(operation));
    }
  }
};

/// By operation of a list: the entries of a recording that do it, each of them or a part.
using Places = std::vector<std::vector<std::size_t>>;

/// Where a rank has enqueued something else than the list says; "" if nowhere.
template <class Memory>
std::string difference(std::vector<Executed> const& list, fsdp::Program const& program, Recording const& recording,
                       std::size_t first, Memory const& memory, Places& places) {
  places.assign(list.size(), {});
  Recorded const recorded(recording, first, memory);
  if (!recorded.problem.empty()) return recorded.problem;
  std::map<Group, std::string> communicators;
  std::map<std::string, Group> groups;
  std::size_t next = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    auto const& operation = list[i].operation;
    auto const expected = memory.bytes(operation, false);
    // A module or a shard may be without tensors.
    if (!moves(operation.primitive) || expected.empty()) continue;
    auto const what = fmt::format("operation {}, {} of unit {} on {}", i, name(operation.primitive), operation.unit,
                                  name(operation.stream));
    fsdp::testing::Footprint footprint, input;
    for (auto parts = memory.parts(operation); parts-- > 0; ++next) {
      if (next == recorded.operations.size()) return what + ": the engine has stopped before it";
      auto const& [index, entry, accesses] = recorded.operations[next];
      auto const& stream = recording.streams[static_cast<std::size_t>(entry->stream)];
      auto const& unit = operation.unit == fsdp::step::Operation::none ? "" : program.units[operation.unit].name;
      if (stream != name(operation.stream) || !is_primitive(*entry, operation, unit))
        return fmt::format("{}: the engine has {} on {}", what, entry->what, stream);
      places[i].push_back(index);
      for (auto const& access : accesses) footprint.add(access.begin, access.end, !access.writes, access.writes);
      for (auto const& access : entry->input) input.add(access.begin, access.end, true, false);
      if (!is_collective(operation.primitive)) continue;
      auto const& communicator = communicators.try_emplace(operation.group, entry->communicator).first->second;
      auto const group = groups.try_emplace(entry->communicator, operation.group).first->second;
      if (communicator != entry->communicator || group != operation.group || entry->members != operation.ranks)
        return fmt::format("{}: the engine has communicator {} of {} ranks, not {} of {}", what, entry->communicator,
                           entry->members, communicator, operation.ranks);
    }
    if (auto const found = footprint.stretches(); found != expected)
      return fmt::format("{}: expected{}, the engine accesses{}", what, text(expected), text(found));
    auto const peers = memory.bytes(operation, true);
    if (auto const found = input.stretches(); found != peers)
      return fmt::format("{}: expected that peers read{}, they read{}", what, text(peers), text(found));
  }
  if (next == recorded.operations.size()) return {};
  auto const& more = *recorded.operations[next].entry;
  return fmt::format("after the last operation, the engine has {} on {}", more.what,
                     recording.streams[static_cast<std::size_t>(more.stream)]);
}

/// When each entry of the ranks' recordings begins and ends, from what was enqueued alone: streams run their entries in
/// order, and wait for events and peers; members of a collective begin together. The hosts take no time and never wait.
class Timeline {
 public:
  /// Times of entries; others take no time. By rank and entry.
  using Times = std::vector<std::map<std::size_t, double>>;

  Timeline(std::vector<std::shared_ptr<Recording const>> const& recordings, Times const& times) : times_(times) {
    for (auto const& recording : recordings) {
      ranks_.push_back({*recording, std::vector<double>(recording->streams.size(), 0.0),
                        std::vector<double>(static_cast<std::size_t>(recording->events), 0.0)});
      spans.emplace_back(recording->entries.size());
    }
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
        while (ranks_[rank].next < ranks_[rank].recording.entries.size() && step(rank)) moved = true;
    }
    for (auto const& rank : ranks_)
      if (rank.next < rank.recording.entries.size()) throw std::logic_error("a rank waits for ever");
  }

  std::vector<std::vector<fsdp::TimeSpan>> spans;  ///< by rank and entry

 private:
  struct Rank {
    Recording const& recording;
    std::vector<double> streams;  ///< when the last entry ends
    std::vector<double> events;
    std::size_t next = 0;
    bool came = false;  ///< to the collective that is next
  };
  struct Meeting {
    int begun = 0, ended = 0;
    double begin = 0, end = 0;  ///< of the last member
  };

  /// Takes a rank's next entry. @return false if it has to wait for other ranks first
  bool step(std::size_t number) {
    auto& rank = ranks_[number];
    auto const& entry = rank.recording.entries[rank.next];
    double none = 0;
    auto& now = entry.stream >= 0 ? rank.streams[static_cast<std::size_t>(entry.stream)] : none;
    auto& event = entry.event >= 0 ? rank.events[static_cast<std::size_t>(entry.event)] : none;
    auto& meeting = meetings_[{entry.communicator, entry.sequence}];
    switch (entry.kind) {
      case Enqueued::Kind::collective:
        if (!std::exchange(rank.came, true)) ++meeting.begun, meeting.begin = std::max(meeting.begin, now);
        if (meeting.begun < entry.members) return false;
        now = meeting.begin;
        take(number, now);
        ++meeting.ended, meeting.end = std::max(meeting.end, now);
        break;
      case Enqueued::Kind::operation: take(number, now); break;
      case Enqueued::Kind::record: event = now; break;
      case Enqueued::Kind::wait: now = std::max(now, event); break;
      case Enqueued::Kind::wait_for_peers:
        if (meeting.ended < entry.members) return false;
        now = std::max(now, meeting.end);
        break;
      case Enqueued::Kind::await_stream:
      case Enqueued::Kind::await_event:
      case Enqueued::Kind::exchange: break;
    }
    ++rank.next;
    rank.came = false;
    return true;
  }
  void take(std::size_t number, double& now) {
    auto const at = ranks_[number].next;
    auto const found = times_[number].find(at);
    auto& span = spans[number][at];
    span.begin = now;
    if (found != times_[number].end()) now += found->second;
    span.end = now;
  }

  Times const& times_;
  std::vector<Rank> ranks_;
  std::map<std::pair<std::string, std::uint64_t>, Meeting> meetings_;
};

/// Trains the ranks of a row, and repeats their calls in runs of the program. Calls `use` on each rank:
/// use(engine, recording, list of operations, their places).
template <class P, class Use>
void train_row(Row const& row, Use const& use) {
  fsdp::local::run(
      row.ranks, [](int) { return Device{}; },
      [&](Local comm) {
        auto const recording = comm.device().recording;
        auto tally = std::make_shared<toy::Tally>();
        engine_table::Rank<Comm, P> rank(Comm(fsdp::testing::Recorder(std::move(comm)), tally), tally, row);
        auto const sealed = recording->entries.size();
        rank.train();
        auto& engine = rank.engine();
        std::vector<Executed> list;
        fsdp::step::Run run(engine.program(), fsdp::step::record_into(list));
        run.prepare();
        for (auto const& call : rank.calls()) repeat(call, run);
        fsdp::testing::StepMemory const memory(engine, *recording);
        Places places;
        auto const found = difference(list, engine.program(), *recording, sealed, memory, places);
        if (!found.empty()) engine_table::wrong(fmt::format("rank {}: {}", engine.rank(), found));
        use(engine, recording, list, places);
      });
}
template <class P>
void run_row(Row const& row) {
  train_row<P>(row, [&](auto& engine, auto const&, std::vector<Executed> const& list, Places const&) {
    // Half passes are left where others end: what they leave is waited for by late events.
    bool const whole =
        row.between == engine_table::Between::nothing || row.between == engine_table::Between::frozen_passes;
    if (whole && engine.shards().late_events() > 0)
      engine_table::wrong(fmt::format("rank {}: {} late events", engine.rank(), engine.shards().late_events()));
    if (engine.rank() != 0) return;  // the list is the same on all ranks
    std::vector<bool> padded;
    for (auto const& unit : engine.plan_input().units) padded.push_back(unit.padded);
    fsdp::step::Symbols symbols(engine.program(), padded);
    for (auto const& executed : list) symbols.run(executed);
    if (!symbols.problems().empty()) engine_table::wrong(symbols.problems().front());
  });
}

/// Times of a rank's operations: sums of powers of two, exact. Norms take none: see compare_clocks().
/// @param even  all ranks take the same
fsdp::Costs costs_of(std::size_t rank, bool even) {
  fsdp::Costs costs;
  for (std::size_t i = 0; i < fsdp::step::primitives; ++i)
    if (moves(static_cast<Primitive>(i)))
      costs.primitive[i].fixed = static_cast<double>((1 + i * 7 % 13) * (even ? 8 : 7 + 3 * rank % 8)) / 64;
  costs[Primitive::norm].fixed = 0;
  return costs;
}
bool has_planned_events(Row const& row) {
  return row.between == engine_table::Between::nothing && row.micro_steps != engine_table::MicroSteps::at_random;
}
/// The simulation of a run against what was enqueued. An operation of the simulation begins as soon as accesses allow:
/// none ends later than by the streams, events and waits that the engine has enqueued.
///
/// Nor earlier, if each wait is for the event right behind what it needs. So it is in steps of whole
/// micro-steps of the kinds that the plan of events looks at: all pairs, but not any sequence of them (see [Note:
/// Events]). But norms wait together, before the first of them: they may begin, and end, later. And from the first norm
/// on, uneven ranks wait for each other in its all-reduce, which is no operation of the program.
///
/// @param row  units without padding, so that every operation moves something on every rank
template <class P>
void compare_clocks(Row const& row, bool even) {
  std::vector<std::shared_ptr<Recording const>> recordings(static_cast<std::size_t>(row.ranks));
  std::vector<Places> places(recordings.size());
  std::vector<fsdp::Costs> costs;
  for (std::size_t rank = 0; rank < recordings.size(); ++rank) costs.push_back(costs_of(rank, even));
  fsdp::Simulation simulation;
  train_row<P>(row, [&](auto& engine, auto const& recording, std::vector<Executed>& list, Places& found) {
    auto const rank = static_cast<std::size_t>(engine.rank());
    recordings[rank] = recording;
    places[rank] = std::move(found);
    if (rank != 0) return;
    simulation = fsdp::simulate(engine.program(), std::move(list), costs);
  });
  Timeline::Times times(recordings.size());
  auto const is_enqueued = [&](std::size_t i) { return moves(simulation.operations[i].operation.primitive); };
  for (std::size_t rank = 0; rank < recordings.size(); ++rank)
    for (std::size_t i = 0; i < simulation.operations.size(); ++i)
      if (is_enqueued(i))
        times[rank][places[rank][i].at(0)] =
            costs[rank].of(simulation.operations[i].operation, simulation.operations[i].at);
  Timeline const timeline(recordings, times);
  for (std::size_t rank = 0; rank < recordings.size(); ++rank) {
    bool measured = false;
    for (std::size_t i = 0; i < simulation.operations.size(); ++i) {
      if (!is_enqueued(i)) continue;
      auto const& operation = simulation.operations[i].operation;
      auto const end = simulation.spans[rank][i].end, enqueued = timeline.spans[rank][places[rank][i].back()].end;
      measured = measured || operation.primitive == Primitive::norm;
      bool const equal = has_planned_events(row) && operation.primitive != Primitive::norm && (even || !measured);
      if (equal ? end == enqueued : end <= enqueued) continue;
      engine_table::wrong(
          fmt::format("rank {}, {} ranks, operation {}, {} of unit {} on {}: simulated until {}, enqueued until {}",
                      rank, even ? "even" : "uneven", i, name(operation.primitive), operation.unit,
                      name(operation.stream), end, enqueued));
    }
  }
}

/// @param what  called with a precision
template <class What>
void with_precision(Row const& row, What const& what) {
  switch (row.precision) {
    case Precision::fp32:
    case Precision::fp32_in_bf16: return what(fsdp::Fp32{});
    case Precision::bf16:
    case Precision::bf16_in_fp16: return what(fsdp::Bf16{});
    case Precision::bf16_reduce: break;
  }
  what(fsdp::Bf16Reduce{});
}
/// Errors of a row; "" if there are none.
std::string problem(fsdp::testing::TableRow const& at, int setting) {
  auto row = engine_table::row_of(at);
  row.setting = setting;
  row.offload = {};
  try {
    with_precision(row, [&](auto precision) { run_row<decltype(precision)>(row); });
  } catch (std::exception const& error) {
    return fmt::format("row {}, setting {}: {}\n", engine_table::text(at), setting, error.what());
  }
  return {};
}
/// Modules that set their gradients: in turn none, all, those of every second unit.
void check(fsdp::testing::Table const& table) {
  std::string problems;
  int setting = 0;
  for (auto const& at : table) {
    if (problems.size() < 20000) problems += problem(at, setting);
    setting = (setting + 1) % 3;
  }
  CHECK(problems == "");
}

void check_clocks(fsdp::testing::Table const& table) {
  std::string problems;
  int setting = 0, planned = 0;
  for (auto const& at : table) {
    auto row = engine_table::row_of(at);
    row.elements = 768;
    row.setting = setting = (setting + 1) % 3;
    row.offload = {};
    planned += has_planned_events(row) ? 1 : 0;
    try {
      with_precision(row, [&](auto precision) {
        compare_clocks<decltype(precision)>(row, true);
        if (row.ranks > 1) compare_clocks<decltype(precision)>(row, false);
      });
    } catch (std::exception const& error) {
      if (problems.size() < 20000)
        problems += fmt::format("row {}, setting {}: {}\n", engine_table::text(at), setting, error.what());
    }
  }
  CHECK(problems == "");
  CHECK(planned > 7);
}

}  // namespace

TEST_CASE("operations: the program is what the engine enqueues, for all pairs of what engines differ in") {
  check(fsdp::testing::all_pairs(engine_table::axes));
}

TEST_CASE("operations: the program is what the engine enqueues, for engines at random") {
  check(engine_table::rows_at_random(100, 8));
}

TEST_CASE("operations: the program is what the engine enqueues, for 5,000 engines at random", "[.][operations]") {
  check(engine_table::rows_at_random(5000, 9));
}

TEST_CASE("operations: a step that ends with a micro-step that leaves parameters unsharded") {
  CHECK(problem({1, 2, 2, 0, 2, 1, 3, 0, 4, 0, 0}, 1) == "");
}

TEST_CASE("operations: contents of one slot that are cut into other cells") {
  // The slot of a sharded unit's gradients is next that of a unit with one shard, whose modules set their gradients.
  CHECK(problem({1, 1, 1, 1, 1, 0, 0, 2, 2, 0, 0}, 1) == "");
}

TEST_CASE("operations: a simulation times them as streams, events and waits do that the engine enqueues") {
  check_clocks(fsdp::testing::all_pairs(engine_table::axes));
}

TEST_CASE("operations: a simulation times engines at random as their streams, events and waits do", "[.][operations]") {
  check_clocks(engine_table::rows_at_random(500, 10));
}
