// SPDX-License-Identifier: Apache-2.0
// The operations of a run of a program against what the engine enqueues, over a table of engines: the same operations
// in the same order on the same streams, each with the same bytes read and written here, and read by peers. In symbols,
// every reader of a buffer finds the content that it needs. No event is recorded late, but after half a pass.
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
#include "fsdp/step/run.hpp"
#include "fsdp/step/symbols.hpp"
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
    case Call::Kind::backward: return run.backward(call.use, call.flags);
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

/// Where a rank has enqueued something else than the list says; "" if nowhere.
template <class Memory>
std::string difference(std::vector<Executed> const& list, fsdp::Program const& program, Recording const& recording,
                       std::size_t first, Memory const& memory) {
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

template <class P>
void run_row(Row const& row) {
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
        auto const found = difference(list, engine.program(), *recording, sealed, memory);
        if (!found.empty()) engine_table::wrong(fmt::format("rank {}: {}", engine.rank(), found));
        // Half passes are left where others end: what they leave is waited for by late records.
        if (row.between == engine_table::Between::nothing && engine.shards().late_records() > 0)
          engine_table::wrong(fmt::format("rank {}: {} late records", engine.rank(), engine.shards().late_records()));
        if (engine.rank() != 0) return;  // the list is the same on all ranks
        std::vector<bool> padded;
        for (auto const& unit : engine.plan_input().units) padded.push_back(unit.padded);
        fsdp::step::Symbols symbols(engine.program(), padded);
        for (auto const& executed : list) symbols.run(executed);
        if (!symbols.problems().empty()) engine_table::wrong(symbols.problems().front());
      });
}
void run_row_of_any_precision(Row const& row) {
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
    run_row_of_any_precision(row);
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

TEST_CASE("operations: the program is what the engine enqueues, for all pairs of what engines differ in") {
  check(fsdp::testing::all_pairs(engine_table::axes));
}

TEST_CASE("operations: so it is for engines at random") { check(engine_table::rows_at_random(100, 8)); }

TEST_CASE("operations: and for many more", "[.][operations]") { check(engine_table::rows_at_random(5000, 9)); }

TEST_CASE("operations: contents of one slot that are cut into other cells") {
  // The slot of a sharded unit's gradients is next that of a unit with one shard, whose modules set their gradients.
  CHECK(problem({1, 1, 1, 1, 1, 0, 0, 2, 2}, 1) == "");
}
