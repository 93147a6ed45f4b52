// SPDX-License-Identifier: Apache-2.0
// The trace holds a span for everything that moves or computes, with its bytes and step, and spans begin after waits.
// skip-asan
#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/local_run.hpp"

namespace {

using Spans = std::vector<fsdp::TraceSpan>;

/// Rank 0's spans of two steps of the toy network, traced from the first on.
template <class D = fsdp::host::Device>
Spans two_steps(fsdp::ShardingStrategy const& strategy, int ranks, D const& device = {},
                fsdp::EngineOptions options = {}) {
  Spans spans;
  fsdp::local::run(ranks, device, [&](fsdp::local::Communicator<D> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, strategy, options);
    toy::Network network(engine, {});
    fsdp::AdamW adamw(engine);
    engine.start_trace(1000, 7);
    for (int step = 0; step < 2; ++step) {
      network.step(step);
      auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
      adamw.step(norm);
    }
    auto mine = engine.stop_trace();
    network.step(2);
    adamw.step();
    engine.synchronize();
    if (first) spans = std::move(mine);
  });
  return spans;
}

/// "stream what" of the spans of one step.
std::map<std::string, int> counts(Spans const& spans, std::int64_t step) {
  std::map<std::string, int> found;
  for (auto const& span : spans)
    if (span.step == step) ++found[std::string(name(span.kind)) + " " + span.what];
  return found;
}

}  // namespace

TEST_CASE("a step leaves a span for every gather, pass, reduction, norm and update") {
  auto const spans = two_steps(fsdp::FullShard{}, 2);
  std::map<std::string, int> const expected{
      {"compute all-reduce", 1}, {"compute backward", 6},  {"compute clip factor", 1}, {"compute forward", 6},
      {"compute norm", 1},       {"compute optimizer", 5}, {"gather all-gather", 8},   {"reduce reduce-scatter", 5}};
  CHECK(counts(spans, 7) == expected);
  CHECK(counts(spans, 8) == expected);
  CHECK(counts(spans, 9).empty());
  CHECK(std::all_of(spans.begin(), spans.end(),
                    [](auto const& span) { return span.begin_ns > 0 && span.end_ns >= span.begin_ns; }));
}

TEST_CASE("hybrid shards leave all-reduces on a stream of their own; buckets too") {
  auto const hybrid = two_steps(fsdp::HybridShard<>{.group = 2}, 4);
  CHECK(counts(hybrid, 7)["reduce reduce-scatter"] == 5);
  CHECK(counts(hybrid, 7)["replicate all-reduce"] == 5);
  auto const ddp = two_steps(fsdp::NoShard{}, 2);
  CHECK(counts(ddp, 7)["replicate all-reduce"] == 1);
  CHECK(counts(ddp, 7).count("gather all-gather") == 0);
}

TEST_CASE("slices that are kept and sums that wait for replicas are spans, too") {
  auto const kept = two_steps(fsdp::FullShard{}, 4, fsdp::host::Device{}, {.reshard_ranks = 2});
  CHECK(counts(kept, 7)["compute keep slice"] > 0);
  auto const partial =
      two_steps(fsdp::HybridShard<>{.group = 2}, 4, fsdp::host::Device{}, {.allow_no_replica_sync = true});
  CHECK(counts(partial, 7)["reduce accumulate"] == 5);
  CHECK(counts(partial, 7)["replicate all-reduce"] == 5);
}

TEST_CASE("rounding for a narrower sum is a span, and collectives carry the bytes that travel") {
  auto const sharded = two_steps(fsdp::FullShard{}, 2, fsdp::host::Device{}, {.reduce_dtype = fsdp::DType::bf16});
  CHECK(counts(sharded, 7)["reduce round"] == 5);
  for (auto const& span : sharded)
    if (span.unit == "layers.1" && span.what == "reduce-scatter") CHECK(span.bytes == 896 * 2);
  auto const ddp = two_steps(fsdp::NoShard{}, 2, fsdp::host::Device{}, {.reduce_dtype = fsdp::DType::bf16});
  CHECK(counts(ddp, 7)["replicate round"] == 1);
  std::int64_t wide = 0, narrow = 0;
  for (auto const& span : ddp) {
    if (span.what == "round") wide += span.bytes;
    if (span.what == "all-reduce" && span.kind == fsdp::StreamKind::replicate) narrow += span.bytes;
  }
  CHECK(wide > 0);
  CHECK(narrow * 2 == wide);
}

TEST_CASE("collectives carry the bytes of their full buffer") {
  std::map<std::string, std::int64_t> bytes;
  for (auto const& span : two_steps(fsdp::FullShard{}, 2))
    if (span.unit == "layers.1" && span.step == 7) bytes[span.what] = span.bytes;
  // up and down of 13 * 29, a bias of 29: each tensor starts on a multiple of 64, the unit is padded to one of 128
  CHECK(bytes["all-gather"] == 896 * 4);
  CHECK(bytes["reduce-scatter"] == 896 * 4);
  CHECK(bytes["optimizer"] == 448 * 4);
  CHECK(bytes["forward"] == 0);
}

TEST_CASE("a span begins when its work begins, not while it waits for another stream") {
  // Collectives of rank 0 take long: every launch, copy and zeroing is delayed, and compute waits for them.
  using Delayed = fsdp::testing::DelayDevice<fsdp::host::Device>;
  auto const spans = two_steps(fsdp::FullShard{}, 2, Delayed({}, 1, 500));
  std::map<std::string, std::int64_t> gathered;  // when the unit's last gather was over
  std::map<std::string, std::int64_t> computed;
  int checked = 0;
  bool ordered = true;
  for (auto const& span : spans) {
    if (span.what == "all-gather") gathered[span.unit] = span.end_ns;
    if (span.what == "forward" && gathered.count(span.unit) != 0) {
      ordered = ordered && span.begin_ns >= gathered[span.unit];
      ++checked;
    }
    if (span.what == "backward") computed[span.unit] = span.end_ns;
    if (span.what == "reduce-scatter") {
      ordered = ordered && span.begin_ns >= computed[span.unit];
      ++checked;
    }
  }
  CHECK(checked == 2 * (6 + 5));
  CHECK(ordered);
}

TEST_CASE("spans beyond the capacity are counted; what an exception cuts short is left out") {
  std::size_t lost = 0, kept = 0;
  Spans after;
  fsdp::local::run(1, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Network network(engine, {});
    engine.start_trace(3);
    network.step(0);
    lost = engine.tracer()->lost();
    kept = engine.collect_trace().size();
    try {
      auto const scope = engine.forward_scope(fsdp::UseId{0});
      throw std::runtime_error("the user's");
    } catch (std::runtime_error const&) {
    }
    network.forward(1);
    after = engine.stop_trace();
  });
  CHECK(kept == 3);
  CHECK(lost == 12 - 3);     // one rank gathers and reduces nothing: 6 forward, 6 backward
  CHECK(after.size() == 2);  // the one that was cut short had taken the first of three places
}

TEST_CASE(
    "a span that is open when a trace is collected, started again or stopped is left out, and ends no later one") {
  std::vector<std::size_t> kept;
  fsdp::local::run(1, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Network network(engine, {});
    engine.seal();
    auto const shards = engine.shards();
    for (int const again : {0, 1, 2}) {
      engine.start_trace(10);
      auto first = shards.trace_update(shards[0]);
      if (again == 0) static_cast<void>(engine.collect_trace());
      if (again == 1) engine.start_trace(10);
      if (again == 2) static_cast<void>(engine.stop_trace()), engine.start_trace(10);
      static_cast<void>(shards.trace_update(shards[1]));  // never ends
      first.end();
      {
        auto const use = engine.forward_scope(fsdp::UseId{0});
        kept.push_back(engine.collect_trace().size());
      }
      engine.discard_gradients();  // and the pass
      network.forward(1);
      kept.push_back(engine.stop_trace().size());
      {
        auto const use = engine.forward_scope(fsdp::UseId{0});
        engine.start_trace(10);
      }
      kept.push_back(engine.stop_trace().size());
      engine.discard_gradients();
    }
  });
  CHECK(kept == std::vector<std::size_t>{0, 6, 0, 0, 6, 0, 0, 6, 0});
}
