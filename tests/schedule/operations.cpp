// SPDX-License-Identifier: Apache-2.0
// The list of operations that a program is lowered to against the engine, over a table of engines: the same operations
// in the same order on the same streams, each with the same bytes read and written here, and read by peers. What the
// list says each buffer holds is what every reader of it needs. Waits that are derived from the list's accesses, in the
// place of the engine's own, order all accesses of all ranks.
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
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/table_row.hpp"
#include "tests/support/hazards.hpp"
#include "tests/support/recording.hpp"
#include "tests/support/step/lowering.hpp"
#include "tests/support/step/operation.hpp"
#include "tests/support/step/symbols.hpp"
#include "tests/support/step/waits.hpp"
#include "tests/support/step_memory.hpp"

namespace {

using engine_table::Call;
using engine_table::Precision;
using engine_table::Row;
using fsdp::step::Group;
using fsdp::step::Primitive;
using fsdp::testing::Enqueued;
using fsdp::testing::Hazards;
using fsdp::testing::Recording;
using fsdp::testing::Stretch;
using Device = fsdp::testing::RecordingDevice<fsdp::host::Device>;
using Local = fsdp::local::Communicator<Device>;
using Comm = toy::Counting<fsdp::testing::Recorder<Local>>;

void repeat(Call const& call, fsdp::step::Lowering& lowering) {
  switch (call.kind) {
    case Call::Kind::forward: return lowering.forward(call.use);
    case Call::Kind::backward: return lowering.backward(call.use, call.flags);
    case Call::Kind::begin_evaluation: return lowering.begin_evaluation();
    case Call::Kind::end_evaluation: return lowering.end_evaluation();
    case Call::Kind::discard: return lowering.discard();
    case Call::Kind::norm: return lowering.norm();
    case Call::Kind::update: return lowering.update();
  }
}

/// An entry of a recording is the primitive, or one part of it.
bool is_primitive(Enqueued const& entry, fsdp::step::Operation const& operation, std::string_view unit) {
  namespace kernels = fsdp::kernels::detail;
  auto const is = [&](std::type_info const& kernel) { return entry.what == kernel.name(); };
  auto const collective = [&](std::string_view name) { return entry.what == fmt::format("{} of {}", name, unit); };
  switch (operation.primitive) {
    case Primitive::cast:
    case Primitive::round: return is(typeid(kernels::Cast));
    case Primitive::copy: return entry.what == "copy";
    case Primitive::zero:
    case Primitive::zero_padding: return entry.what == "zero";
    case Primitive::accumulate: return is(typeid(kernels::Accumulate));
    case Primitive::add: return is(typeid(kernels::Add));
    case Primitive::all_gather: return collective("all_gather");
    case Primitive::reduce_scatter: return collective("reduce_scatter");
    case Primitive::all_reduce: return collective("all_reduce");
    case Primitive::forward: return is(typeid(engine_table::ReadParameters));
    case Primitive::backward: return is(typeid(engine_table::AddGradients)) || is(typeid(engine_table::SetGradients));
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

/// What one rank has enqueued that accesses memory of the program, in order.
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

/// Entries of a recording that are one operation of a list.
struct Entries {
  std::size_t first = 0, count = 0;
};

/// Where a rank has enqueued something else than the list says; "" if nowhere.
/// @param entries  of each operation that is found
template <class Memory>
std::string difference(fsdp::step::List const& list, fsdp::Program const& program, Recording const& recording,
                       std::size_t first, Memory const& memory, std::vector<Entries>& entries) {
  entries.resize(list.operations.size());
  Recorded const recorded(recording, first, memory);
  if (!recorded.problem.empty()) return recorded.problem;
  std::map<Group, std::string> communicators;
  std::map<std::string, Group> groups;
  std::size_t next = 0;
  for (std::size_t i = 0; i < list.operations.size(); ++i) {
    auto const& operation = list.operations[i];
    auto const expected = memory.bytes(list, operation, false);
    // A module or a shard may be without tensors.
    if (!moves(operation.primitive) || expected.empty()) continue;
    auto const what = fmt::format("operation {}, {} of unit {} on {}", i, name(operation.primitive), operation.unit,
                                  name(operation.stream));
    fsdp::testing::Footprint footprint, input;
    for (auto parts = memory.parts(operation); parts-- > 0; ++next) {
      if (next == recorded.operations.size()) return what + ": the engine has stopped before it";
      auto const& [index, entry, accesses] = recorded.operations[next];
      if (entries[i].count == 0) entries[i].first = index;
      entries[i].count = index + 1 - entries[i].first;
      auto const& stream = recording.streams[static_cast<std::size_t>(entry->stream)];
      auto const& unit = operation.unit == fsdp::step::Operation::none ? "" : program.units[operation.unit].name;
      if (stream != name(operation.stream) || !is_primitive(*entry, operation, unit))
        return fmt::format("{}: the engine has {} on {}", what, entry->what, stream);
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
    auto const peers = memory.bytes(list, operation, true);
    if (auto const found = input.stretches(); found != peers)
      return fmt::format("{}: expected that peers read{}, they read{}", what, text(peers), text(found));
  }
  if (next == recorded.operations.size()) return {};
  auto const& more = *recorded.operations[next].entry;
  return fmt::format("after the last operation, the engine has {} on {}", more.what,
                     recording.streams[static_cast<std::size_t>(more.stream)]);
}

/// The recording with derived waits in the place of the engine's own. When the engine was sealed, all streams are
/// awaited: what came before is in no list.
std::shared_ptr<Recording> with_derived_waits(Recording const& recording, std::size_t sealed,
                                              fsdp::step::List const& list, fsdp::step::Buffers const& buffers,
                                              std::vector<Entries> const& entries) {
  fsdp::step::Waits const waits(list, buffers);
  auto const awaited = waits.awaited();
  auto result = std::make_shared<Recording>();
  result->streams = recording.streams;
  result->events = recording.events + static_cast<int>(list.operations.size());
  auto const event_of = [&](std::size_t operation) { return recording.events + static_cast<int>(operation); };
  std::vector<std::string> communicators;  // of the list
  for (std::size_t i = 0; i < entries.size(); ++i)
    if (entries[i].count > 0) communicators.push_back(recording.entries[entries[i].first].communicator);
  auto const is_own_wait = [&](Enqueued const& entry) {
    if (entry.kind == Enqueued::Kind::wait_for_peers)
      return std::find(communicators.begin(), communicators.end(), entry.communicator) != communicators.end();
    return entry.kind == Enqueued::Kind::record || entry.kind == Enqueued::Kind::wait ||
           entry.kind == Enqueued::Kind::await_event;
  };
  std::size_t next = 0;
  auto const copy_until = [&](std::size_t end) {
    for (; next < end; ++next) {
      for (int stream = 0; next == sealed && stream < static_cast<int>(recording.streams.size()); ++stream)
        result->add({.kind = Enqueued::Kind::await_stream, .stream = stream});
      if (next < sealed || !is_own_wait(recording.entries[next])) result->add(recording.entries[next]);
    }
  };
  for (std::size_t i = 0; i < list.operations.size(); ++i) {
    auto const stream = result->stream_of(name(list.operations[i].stream));
    if (entries[i].count > 0) copy_until(entries[i].first);
    for (auto const [operation, peers] : waits.of(i)) {
      if (!peers) {
        result->add({.kind = Enqueued::Kind::wait, .stream = stream, .event = event_of(operation)});
        continue;
      }
      auto wait = recording.entries[entries[operation].first];
      wait.kind = Enqueued::Kind::wait_for_peers;
      wait.stream = stream;
      result->add(std::move(wait));
    }
    if (entries[i].count > 0) copy_until(entries[i].first + entries[i].count);
    if (awaited[i]) result->add({.kind = Enqueued::Kind::record, .stream = stream, .event = event_of(i)});
  }
  copy_until(recording.entries.size());
  return result;
}

/// @return what the ranks have enqueued, with derived waits
template <class P>
Hazards::Recordings run_row(Row const& row) {
  Hazards::Recordings derived(static_cast<std::size_t>(row.ranks));
  fsdp::local::run(
      row.ranks, [](int) { return Device{}; },
      [&](Local comm) {
        auto const recording = comm.device().recording;
        auto tally = std::make_shared<toy::Tally>();
        engine_table::Rank<Comm, P> rank(Comm(fsdp::testing::Recorder(std::move(comm)), tally), tally, row);
        auto const sealed = recording->entries.size();
        rank.train();
        auto& engine = rank.engine();
        auto const shards = engine.shards();
        std::vector<fsdp::step::GradientFacts> facts;
        for (std::size_t u = 0; u < shards.size(); ++u)
          facts.push_back({shards[u].sets_gradients, !shards[u].padding().empty()});
        fsdp::step::Lowering lowering(engine.program(), engine.plan_input(), facts, 0);
        lowering.prepare();
        for (auto const& call : rank.calls()) repeat(call, lowering);
        fsdp::testing::StepMemory const memory(engine, *recording, lowering.buffers());
        std::vector<Entries> entries;
        auto const found = difference(lowering.list(), engine.program(), *recording, sealed, memory, entries);
        if (!found.empty()) engine_table::wrong(fmt::format("rank {}: {}", engine.rank(), found));
        derived[static_cast<std::size_t>(engine.rank())] =
            with_derived_waits(*recording, sealed, lowering.list(), lowering.buffers(), entries);
        if (engine.rank() != 0) return;  // the list is the same on all ranks
        fsdp::step::Symbols symbols(engine.program(), lowering.buffers(), lowering.facts());
        symbols.run(lowering.list());
        if (!symbols.problems().empty()) engine_table::wrong(symbols.problems().front());
      });
  return derived;
}
Hazards::Recordings run_row_of_any_precision(Row const& row) {
  switch (row.precision) {
    case Precision::fp32:
    case Precision::fp32_in_bf16: return run_row<fsdp::Fp32>(row);
    case Precision::bf16:
    case Precision::bf16_in_fp16: return run_row<fsdp::Bf16>(row);
    case Precision::bf16_reduce: break;
  }
  return run_row<fsdp::Bf16Reduce>(row);
}
/// What is wrong with a row; "" if nothing is.
std::string problem(fsdp::testing::TableRow const& at, int setting) {
  auto row = engine_table::row_of(at);
  row.setting = setting;
  try {
    Hazards const hazards(run_row_of_any_precision(row));
    auto const unordered = hazards.find({}, 1);
    if (!unordered.empty()) engine_table::wrong("with derived waits, " + unordered.front());
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

}  // namespace

TEST_CASE("operations: the lowered program is what the engine enqueues, for all pairs of what engines differ in") {
  check(fsdp::testing::all_pairs(engine_table::axes));
}

TEST_CASE("operations: so it is for engines at random") { check(engine_table::rows_at_random(100, 8)); }

TEST_CASE("operations: and for many more", "[.][operations]") { check(engine_table::rows_at_random(5000, 9)); }

TEST_CASE("operations: derived waits order contents of one slot that are cut into other cells") {
  // The slot of a sharded unit's gradients is next that of a unit with one shard, whose modules set their gradients.
  CHECK(problem({1, 1, 1, 1, 1, 0, 0, 2, 2}, 1) == "");
}
