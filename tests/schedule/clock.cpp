// SPDX-License-Identifier: Apache-2.0
// skip-sanitizers
// The operations of a step under a clock: the times that docs/performance.md derives, exactly.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/hazards.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/simulate.hpp"
#include "tests/catch.hpp"
#include "tests/support/step_inputs.hpp"

namespace {

using fsdp::Costs;
using fsdp::Simulation;
using fsdp::step::Group;
using fsdp::step::Operation;
using fsdp::step::Primitive;
using fsdp::testing::equal_units;
using fsdp::testing::PaperStep;
using fsdp::testing::with_prefetch;

/// Forward computes a unit in c, backward in 2c; a collective takes m. Numbers are sums of powers of two: exact.
Costs unit_costs(double c, double m) {
  Costs costs;
  costs[Primitive::forward].fixed = c;
  costs[Primitive::backward].fixed = 2 * c;
  for (auto const collective : {Primitive::all_gather, Primitive::reduce_scatter, Primitive::all_reduce})
    costs[collective].fixed = m;
  return costs;
}

/// @param ranks  see Simulator
Simulation simulated(PaperStep const& of, std::vector<Costs> const& ranks) {
  return simulate(of.program, of.list, ranks);
}
Simulation simulated(PaperStep const& of, Costs const& costs) { return simulated(of, std::vector{costs}); }

struct Times {
  double forward, backward;
};
/// Times of a forward and a backward pass; backward begins when forward has ended, and ends with its last reduction.
Times times(fsdp::StepInput input, double c, double m) {
  PaperStep of(std::move(input));
  of.run.micro_step();
  auto const timed = simulated(of, unit_costs(c, m));
  auto const forward = timed.end_of(Primitive::forward);
  return {forward, timed.end() - forward};
}

}  // namespace

TEST_CASE("clock: an operation waits for what it accesses, and for its stream") {
  using fsdp::StreamKind;
  using fsdp::step::Buffers;
  using fsdp::step::Mode;
  using fsdp::step::Pool;
  auto const operation = [](Primitive primitive, StreamKind stream,
                            std::initializer_list<fsdp::step::Access> accesses) {
    auto made = fsdp::step::make_operation(primitive, stream, Operation::none, accesses);
    if (is_ordered(primitive)) made.conflicts.fill(fsdp::step::all_accessors);
    return made;
  };
  PaperStep const of(equal_units(3, 4));
  auto const own = Buffers::own(Pool::gather, 0), rest = Buffers::rest(Pool::gather, 0),
             whole = Buffers::whole(Pool::gather, 0), other = Buffers::whole(Pool::gather, 1);
  struct Case {
    fsdp::step::Access first, then;
    Primitive primitive;  ///< of the second
    double begin;         ///< of the second, on another stream; the first one takes 4
  };
  for (auto const& [first, then, primitive, begin] :
       {Case{{own, Mode::write}, {own, Mode::read}, Primitive::copy, 4},
        Case{{own, Mode::read}, {own, Mode::write}, Primitive::cast, 4},
        Case{{own, Mode::write}, {own, Mode::write}, Primitive::cast, 4},
        Case{{own, Mode::add}, {own, Mode::read}, Primitive::copy, 4},
        Case{{own, Mode::read}, {own, Mode::add}, Primitive::cast, 4},
        Case{{own, Mode::read}, {own, Mode::read}, Primitive::copy, 0},
        Case{{own, Mode::write}, {rest, Mode::write}, Primitive::cast, 0},
        Case{{whole, Mode::write}, {rest, Mode::read}, Primitive::copy, 4},
        Case{{whole, Mode::write}, {other, Mode::write}, Primitive::cast, 0},
        // The next content's own slice may be where the last one's rest was.
        Case{{rest, Mode::read}, {whole, Mode::write}, Primitive::open, 4},
        Case{{rest, Mode::write}, {whole, Mode::read}, Primitive::close, 0}}) {
    CAPTURE(name(first.mode), name(then.mode), name(primitive), begin);
    std::vector const list{operation(Primitive::forward, StreamKind::compute, {first}),
                           operation(primitive, StreamKind::gather, {then}),
                           operation(Primitive::forward, StreamKind::compute, {})};
    fsdp::Simulator simulator(of.program, {unit_costs(4, 0)});
    for (auto const& next : list) simulator.run({next, {}});
    CHECK(simulator.spans()[1].begin == begin);
    CHECK(simulator.spans()[2].begin == 4);
    fsdp::step::Hazards hazards(of.program.buffers);
    hazards.after(list[0]);
    CHECK(hazards.before(list[1]).some() == (begin > 0));
    CHECK_FALSE(hazards.before(list[2]).some());
  }
}

TEST_CASE("clock: with prefetch, communication is exposed in the first gather and the last reduction") {
  for (int const units : {3, 4, 8, 13}) {
    for (int const prefetch : {1, 2, 3}) {
      for (double const m : {0.125, 0.5, 0.875}) {
        CAPTURE(units, prefetch, m);
        auto const [forward, backward] = times(with_prefetch(equal_units(units, 4), prefetch, prefetch), 1.0, m);
        CHECK(forward == m + units * 1.0);
        CHECK(backward == 2 * units * 1.0 + m);
      }
    }
  }
}

TEST_CASE("clock: without prefetch, every gather is exposed, but none of the unit that forward keeps") {
  for (int const units : {3, 4, 8, 13}) {
    for (double const m : {0.125, 0.5, 0.875, 1.5}) {
      CAPTURE(units, m);
      auto const [forward, backward] = times(with_prefetch(equal_units(units, 4), 0, 0), 1.0, m);
      CHECK(forward == units * (m + 1.0));
      CHECK(backward == 2 * units * 1.0 + (units - 1) * m + m);
    }
  }
}

TEST_CASE("clock: collectives that take longer than compute hide it, but for one unit's") {
  for (int const units : {3, 4, 8, 13}) {
    for (double const m : {1.0, 1.25, 1.75}) {
      CAPTURE(units, m);
      auto const [forward, backward] = times(with_prefetch(equal_units(units, 4), 1, 1), 1.0, m);
      CHECK(forward == units * m + 1.0);
      // Backward computes in 2c, which still hides them.
      CHECK(backward == 2 * units * 1.0 + m);
    }
  }
}

TEST_CASE("clock: all-gathers and reduce-scatters run at once, also where backward is shorter than either") {
  for (int const units : {3, 4, 8, 13}) {
    for (double const m : {2.5, 3.0, 15.0}) {
      CAPTURE(units, m);
      auto const [forward, backward] = times(with_prefetch(equal_units(units, 4), 1, 1), 1.0, m);
      CHECK(forward == units * m + 1.0);
      // The first unit was kept; the last one computes and is reduced after its own gather.
      CHECK(backward == (units - 1) * m + 2 * 1.0 + m);
    }
  }
}

TEST_CASE("clock: a unit that stays unsharded is not gathered again, and NoShard exposes the last bucket") {
  auto input = equal_units(6, 4);
  for (auto& unit : input.units) unit.reshards_after_forward = false;
  auto const [forward, backward] = times(with_prefetch(std::move(input), 0, 0), 1.0, 0.5);
  CHECK(forward == 6 * 1.0 + 0.5);  // there is a buffer for every unit, so that nothing waits for one
  CHECK(backward == 2 * 6 * 1.0 + 0.5);

  auto const replicated = times(equal_units(6, 1, 4), 1.0, 0.5);
  CHECK(replicated.forward == 6 * 1.0);
  CHECK(replicated.backward == 2 * 6 * 1.0 + 0.5);
}

TEST_CASE("clock: the sum over replicas of one unit runs while the next one is reduce-scattered") {
  PaperStep of(with_prefetch(equal_units(8, 2, 2), 1, 1));
  of.run.micro_step();
  auto between_nodes = unit_costs(1.0, 0.5);
  between_nodes[Group::all_replicas] = between_nodes[Group::replicas] = 3;
  auto const timed = simulated(of, between_nodes);
  CHECK(timed.end_of(Primitive::backward) == 0.5 + 8 * 1.0 + 2 * 8 * 1.0);
  CHECK(timed.end() == timed.end_of(Primitive::backward) + 0.5 + 3 * 0.5);
}

TEST_CASE(
    "clock: HybridShard's all-reduces run at once with the next units' reduce-scatters, and free gradient slots") {
  constexpr int units = 6;
  constexpr double c = 1, m = 15;
  auto input = equal_units(units, 2, 2);
  for (auto& unit : input.units) unit.reshards_after_forward = false;
  // A unit's gradients go into the slot of the unit before the last, which is free after its all-reduce.
  std::array<double, 2> slot_free{};
  double computed = 0, scattered = 0, replicated = 0;
  for (std::size_t unit = 0; unit < units; ++unit) {
    computed = std::max(computed, slot_free[unit % 2]) + 2 * c;
    scattered = std::max(scattered, computed) + m;
    replicated = std::max(replicated, scattered) + m;
    slot_free[unit % 2] = replicated;
  }
  auto const whole = times(with_prefetch(input, 1, 1), c, m);
  CHECK(whole.forward == units * m + c);
  CHECK(whole.backward == replicated);
  // Partial shards free the slots before the all-reduce.
  input.allow_no_replica_sync = true;
  auto const partial = times(with_prefetch(input, 1, 1), c, m);
  CHECK(partial.forward == units * m + c);
  CHECK(partial.backward == 2 * c + units * m + m);
}

TEST_CASE("clock: NoShard's buckets are reduced during backward") {
  constexpr int units = 6;
  for (int const in_bucket : {1, 3}) {
    auto input = equal_units(units, 1, 2);
    input.bucket_bytes = input.first_bucket_bytes = in_bucket * 4 * input.units[0].elements;
    auto const [forward, backward] = times(std::move(input), 1.0, 1.5);
    CHECK(forward == units * 1.0);
    CHECK(backward == units * 2.0 + 1.5);
  }
}

TEST_CASE("clock: bytes cost time") {
  auto input = equal_units(4, 4);
  input.units[2].elements = 4096;
  PaperStep of(with_prefetch(std::move(input), 0, 0));
  of.run.micro_step();
  Costs by_bytes;
  by_bytes[Primitive::all_gather] = {1.0, 1.0 / 4096};
  auto const timed = simulated(of, by_bytes);
  CHECK(timed.end_of(Primitive::forward) == (3 * 2.0) + (1.0 + 4.0));
}

TEST_CASE("clock: the next step's first gather waits for the update of its own unit alone") {
  PaperStep of(with_prefetch(equal_units(6, 4), 1, 1));
  for (int step = 0; step < 2; ++step) {
    of.run.micro_step();
    of.run.update();
  }
  auto with_updates = unit_costs(1.0, 0.5);
  with_updates[Primitive::update].fixed = 0.25;
  auto const timed = simulated(of, with_updates);
  auto const reduced = timed.end_of(Primitive::reduce_scatter, 0);
  CHECK(reduced == 0.5 + 6 * 1.0 + 2 * 6 * 1.0 + 0.5);
  // The update of unit 0 waits for the last reduction; gathers run while the other units are updated.
  auto const updated = timed.end_of(Primitive::update, 0);
  CHECK(updated == reduced + 6 * 0.25);
  CHECK(timed.end_of(Primitive::forward, 1) == updated + 6 * 1.0);
}

TEST_CASE("clock: a buffer is written again when the slowest peer has read it") {
  PaperStep of(with_prefetch(equal_units(3, 2), 0, 0));  // one buffer serves all units
  of.run.forward(0);
  of.run.forward(1);
  auto const timed = simulated(of, std::vector{unit_costs(0, 1), unit_costs(0, 3)});
  auto const is_second_cast = [](Operation const& operation, fsdp::step::RunPosition const&) {
    return operation.primitive == Primitive::cast && operation.unit == 1;
  };
  CHECK(timed.end_if(is_second_cast, 0) == 3);
  CHECK(timed.end_if(is_second_cast, 1) == 3);
}

TEST_CASE("clock: a slow peer holds the others back by the buffers that it still uses") {
  constexpr int units = 8;
  constexpr double c = 1, slow = 3, m = 0.5;
  PaperStep of(with_prefetch(equal_units(units, 4), 1, 1));
  of.run.micro_step();
  auto const timed =
      simulated(of, std::vector{unit_costs(c, m), unit_costs(c, m), unit_costs(slow, m), unit_costs(c, m)});
  CHECK(timed.end_of(Primitive::forward, 0, 2) == m + units * slow);
  // Its last gather waits for the last but two of its units.
  CHECK(timed.end_of(Primitive::forward, 0, 0) == (m + (units - 2) * slow) + m + c);
}

TEST_CASE("clock: a slow rank delays its shard group, and over replicas the others") {
  PaperStep of(with_prefetch(equal_units(4, 2, 2), 1, 1));
  of.run.micro_step();
  auto const timed =
      simulated(of, std::vector{unit_costs(1, 0.5), unit_costs(1, 0.5), unit_costs(1, 0.5), unit_costs(2, 0.5)});
  CHECK(timed.end_of(Primitive::forward, 0, 0) == 0.5 + 4 * 1);
  CHECK(timed.end_of(Primitive::forward, 0, 3) == 0.5 + 4 * 2);
  CHECK(timed.end_of(Primitive::all_reduce, 0, 0) == timed.end_of(Primitive::all_reduce, 0, 3));
}

TEST_CASE("a visitor of a run may throw at any operation: the exception goes on, and the visitor is not called again") {
  auto const program = fsdp::compile_program(fsdp::testing::equal_units(3, 4));
  int operations = 0, stop = -1;
  auto const run_all = [&] {
    operations = 0;
    fsdp::step::Run run(program, [&](auto const&...) {
      if (operations++ == stop) throw std::runtime_error("the visitor has seen enough");
    });
    run.micro_step();
    run.evaluation();
    run.micro_step({.gradient_sync = true, .reshard = false});
    run.update();
  };
  run_all();
  auto const all = operations;
  CHECK(all > 30);
  for (stop = 0; stop < all; ++stop) {
    CHECK_THROWS_AS(run_all(), std::runtime_error);
    CHECK(operations == stop + 1);
  }
}
