// SPDX-License-Identifier: Apache-2.0
// skip-sanitizers
// Symbolic contents of buffers while operations of a run execute: every reader finds what it needs, in runs of all
// kinds of steps; and each fault that is put into a list of operations is found.
// full-run: [symbols]
// timeout: 3600
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/check_program.hpp"
#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "tests/catch.hpp"
#include "tests/support/random_inputs.hpp"
#include "tests/support/step_inputs.hpp"

namespace {

using fsdp::BackwardFlags;
using fsdp::StepInput;
using fsdp::step::Buffers;
using fsdp::step::Executed;
using fsdp::step::Mode;
using fsdp::step::Operation;
using fsdp::step::Pool;
using fsdp::step::Primitive;
using fsdp::step::RunPosition;
using fsdp::testing::equal_units;
using fsdp::testing::input_at_random;
using fsdp::testing::offloading;
using fsdp::testing::PaperStep;
using List = std::vector<Executed>;

std::vector<std::string> problems(PaperStep const& of, List const& list) {
  std::vector<bool> padded;
  for (auto const& unit : of.input.units) padded.push_back(unit.padded);
  fsdp::step::Symbols symbols(of.program, std::move(padded));
  for (auto const& executed : list) symbols.run(executed);
  return symbols.problems();
}

BackwardFlags flags_at_random(PaperStep const& of, std::mt19937& random) {
  for (;;) {
    BackwardFlags const flags{random() % 2 == 0, random() % 2 == 0, random() % 2 == 0};
    if (missing_option(of.program, of.input, flags).option.empty()) return flags;
  }
}
/// A pass that is left after some uses, or none.
void half_a_pass(PaperStep& of, std::mt19937& random) {
  auto const uses = of.input.uses.size();
  auto const flags = flags_at_random(of, random);
  bool const in_backward = random() % 2 == 0;
  for (std::size_t use = 0; use < (in_backward ? uses : random() % uses); ++use) of.run.forward(use);
  if (!in_backward) return;
  auto const& turns = of.program.turns(fsdp::PassKind::backward);
  auto const done = 1 + random() % turns.size();
  for (std::size_t i = 0; i < done; ++i) of.run.backward(turns[i].use, flags, turns[i].recomputes());
}
void run_at_random(PaperStep& of, std::mt19937& random) {
  for (int step = 0; step < 3; ++step) {
    for (auto micro_steps = random() % 4; micro_steps > 0; --micro_steps) {
      of.run.micro_step(flags_at_random(of, random));
      if (random() % 4 == 0) of.run.evaluation();
      if (random() % 4 == 0) half_a_pass(of, random), of.run.discard();
    }
    of.run.micro_step();
    of.run.norm();
    of.run.update();
  }
}
void check_at_random(unsigned seed, int trials) {
  std::mt19937 random(seed);
  for (int trial = 0; trial < trials; ++trial) {
    PaperStep of(input_at_random(random), random() % 2 == 0, random() % 2 == 0);
    run_at_random(of, random);
    auto const found = problems(of, of.list);
    CAPTURE(seed, trial, to_text(of.program));
    REQUIRE(found == std::vector<std::string>{});
    REQUIRE(check_program(of.program, of.input) == "");
  }
}

/// Declarations whose lists differ in their primitives.
std::vector<StepInput> kinds_of_steps() {
  std::vector<StepInput> inputs{equal_units(5, 4), equal_units(5, 2, 2), equal_units(5, 1, 4), equal_units(5, 1, 1)};
  auto const add = [&](StepInput input, auto const& change) {
    change(input);
    inputs.push_back(std::move(input));
  };
  add(equal_units(5, 4), [](StepInput& input) { input.uses.push_back(0); });
  add(equal_units(5, 4), [](StepInput& input) { input.allow_no_sync = true; });
  add(equal_units(5, 4), [](StepInput& input) {
    input.reshard_ranks = 2;
    input.keep_last = false;
  });
  add(equal_units(5, 2, 2), [](StepInput& input) { input.allow_no_replica_sync = true; });
  add(equal_units(6, 4), [](StepInput& input) {
    input = fsdp::testing::with_prefetch(fsdp::testing::with_segments(std::move(input), {{0, 1}, {3, 5}}), 1, 2);
  });
  add(equal_units(5, 4), [](StepInput& input) {
    input = fsdp::testing::with_segments(std::move(input), {{0, 1}, {2, 2}, {3, 4}});
    input.reshard_ranks = 2;
    input.keep_last = false;
  });
  add(equal_units(5, 2, 2), [](StepInput& input) { input.wire = fsdp::DType::bf16; });
  add(equal_units(5, 2, 2), [](StepInput& input) {
    fsdp::testing::set_types(input, {fsdp::DType::bf16, fsdp::DType::bf16, fsdp::DType::f32});
    input.allow_no_sync = true;
  });
  add(equal_units(5, 1, 4), [](StepInput& input) {
    input.bucket_bytes = 6000;
    input.first_bucket_bytes = 2000;
  });
  add(equal_units(5, 1, 4), [](StepInput& input) { input.wire = fsdp::DType::bf16; });
  for (auto const& [shards, replicas] : {std::pair(4, 1), {2, 2}, {1, 4}, {1, 1}}) {
    auto input = equal_units(5, shards, replicas);
    fsdp::testing::set_types(input, {fsdp::DType::bf16, fsdp::DType::f32, fsdp::DType::f32});
    inputs.push_back(offloading(input, {.masters = true, .gradients = true}));
    inputs.push_back(offloading(input, {.moments = true}));
  }
  for (auto input : std::vector(inputs)) {  // the same with functions on some or all reduced gradients
    auto const every = inputs.size() % 2 + 1;
    for (std::size_t u = 0; u < input.units.size(); u += every) input.units[u].hooked = true;
    inputs.push_back(std::move(input));
  }
  return inputs;
}
/// Three steps of two micro-steps, of which the first does not reduce where it need not.
void three_steps(PaperStep& of) {
  for (int step = 0; step < 3; ++step) {
    BackwardFlags first{!of.input.allow_no_sync, !of.input.allow_no_replica_sync || of.input.allow_no_sync};
    of.run.micro_step(first);
    of.run.micro_step();
    of.run.update();
  }
}

/// Puts faults into the lists of all kinds of steps: `mutate(PaperStep, list, index, found)` calls `found(list, where)`
/// for each list that it has made by a fault at an operation of the second step. The first text that says what is wrong
/// has `where`.
/// @return how many there were
template <class Mutate>
int expect_all_found(Mutate const& mutate, bool sets_gradients = false, bool padded = false) {
  int mutants = 0;
  for (auto const& input : kinds_of_steps()) {
    PaperStep of(input, sets_gradients, padded);
    three_steps(of);
    auto const& list = of.list;
    REQUIRE(problems(of, list) == std::vector<std::string>{});
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].at.step != 1) continue;
      mutate(of, list, i, [&](List const& mutant, std::string const& where = {}) {
        ++mutants;
        INFO(fmt::format("operation {}, {} of unit {}\n{}", i, name(list[i].operation.primitive),
                         list[i].operation.unit, to_text(of.program)));
        auto const texts = problems(of, mutant);
        CHECK((!texts.empty() && texts.front().find(where) != std::string::npos));
      });
    }
  }
  return mutants;
}
List without(List list, std::size_t index) {
  list.erase(list.begin() + static_cast<std::ptrdiff_t>(index));
  return list;
}
/// Operation `from` comes before operation `to`.
void move_before(List& list, std::size_t from, std::size_t to) {
  auto const at = [&](std::size_t index) { return list.begin() + static_cast<std::ptrdiff_t>(index); };
  std::rotate(at(to), at(from), at(from + 1));
}
bool is_gather(Operation const& operation) {
  return operation.stream == fsdp::StreamKind::gather &&
         (operation.primitive != Primitive::open || operation.all[0].cells.pool == Pool::gather);
}

}  // namespace

TEST_CASE("symbols: every reader finds what it needs, in random runs of random declarations") {
  check_at_random(11, 5000);
}

TEST_CASE("symbols: and in many more", "[.][symbols]") { check_at_random(12, 200000); }

TEST_CASE("symbols: a gather into a wrong slot is found") {
  auto const mutants = expect_all_found([](PaperStep const& of, List const& list, std::size_t i, auto const& found) {
    if (list[i].operation.primitive != Primitive::open || !is_gather(list[i].operation)) return;
    auto const slot = Buffers::index(list[i].operation.all[0].cells);
    for (std::uint32_t wrong = 0; wrong < of.program.gather_slots.size(); ++wrong) {
      if (wrong == slot) continue;
      auto mutant = list;
      for (auto next = i; is_gather(mutant[next].operation) && mutant[next].operation.unit == list[i].operation.unit;
           ++next)
        for (auto& access : mutant[next].operation.accesses())
          if (access.cells.pool == Pool::gather) access.cells.first = 2 * wrong + access.cells.first % 2;
      found(mutant);
    }
  });
  CHECK(mutants > 100);
}

TEST_CASE("symbols: a gradient that is counted twice is found") {
  auto const mutants = expect_all_found([](PaperStep const&, List const& list, std::size_t i, auto const& found) {
    auto const& operation = list[i].operation;
    bool const adds = operation.primitive == Primitive::accumulate || operation.primitive == Primitive::add ||
                      operation.primitive == Primitive::backward;
    if (!adds || operation.bucket != Operation::none) return;
    auto mutant = list;
    auto again = list[i];
    for (auto& access : again.operation.accesses())
      if (access.mode == Mode::write) access.mode = Mode::add;
    mutant.insert(mutant.begin() + static_cast<std::ptrdiff_t>(i) + 1, again);
    found(mutant);
  });
  CHECK(mutants > 100);
}

TEST_CASE("symbols: a zero that is left out is found, of a buffer or of padding") {
  auto const leave_out = [](Primitive primitive) {
    return [primitive](PaperStep const&, List const& list, std::size_t i, auto const& found) {
      if (list[i].operation.primitive == primitive) found(without(list, i));
    };
  };
  CHECK(expect_all_found(leave_out(Primitive::zero)) > 50);
  CHECK(expect_all_found(leave_out(Primitive::zero_padding), true, true) > 50);
}

TEST_CASE("symbols: a function on reduced gradients that is left out, called twice, or too early is found") {
  auto const is_hook = [](List const& list, std::size_t i) { return list[i].operation.primitive == Primitive::hook; };
  CHECK(expect_all_found([&](PaperStep const&, List const& list, std::size_t i, auto const& found) {
          if (is_hook(list, i) && list[i].at.micro_step % 2 == 0) found(without(list, i), "hooked");
        }) > 20);
  CHECK(expect_all_found([&](PaperStep const&, List const& list, std::size_t i, auto const& found) {
          if (!is_hook(list, i)) return;
          auto mutant = list;
          mutant.insert(mutant.begin() + static_cast<std::ptrdiff_t>(i), list[i]);
          found(mutant, ", hook of");
        }) > 20);
  // Before the last operation that has written the shard.
  CHECK(expect_all_found([&](PaperStep const&, List const& list, std::size_t i, auto const& found) {
          if (!is_hook(list, i)) return;
          auto const shard = list[i].operation.all[0].cells;
          auto const writes = [&](Operation const& operation) {
            for (auto const& access : operation.accesses()) {
              auto const& cells = access.cells;
              bool const meets = cells.pool == Pool::gradient && cells.first < shard.first + shard.count &&
                                 shard.first < cells.first + cells.count;
              if (meets && access.mode != Mode::read && operation.primitive != Primitive::open) return true;
            }
            return false;
          };
          auto to = i;
          while (!writes(list[--to].operation)) {
          }
          auto mutant = list;
          move_before(mutant, i, to);
          found(mutant, ", hook of");
        }) > 20);
}

TEST_CASE("symbols: a gather that comes before the update of its unit is found") {
  auto const mutants = expect_all_found([](PaperStep const&, List const& list, std::size_t i, auto const& found) {
    if (list[i].operation.primitive != Primitive::update) return;
    auto const unit = list[i].operation.unit;
    auto next = i;
    auto const is_its_gather = [&] { return is_gather(list[next].operation) && list[next].operation.unit == unit; };
    while (next < list.size() && !is_its_gather()) ++next;
    if (next == list.size()) return;
    auto mutant = list;
    for (auto to = i; next < list.size() && is_its_gather(); ++next, ++to) move_before(mutant, next, to);
    found(mutant);
  });
  CHECK(mutants > 20);
}

TEST_CASE("symbols: a sum over ranks before backward has written all of it is found") {
  auto const mutants = expect_all_found([](PaperStep const&, List const& list, std::size_t i, auto const& found) {
    auto const& [operation, at] = list[i];
    bool const sums = operation.primitive == Primitive::all_reduce || operation.primitive == Primitive::reduce_scatter;
    if (!sums || at.use == RunPosition::no_use) return;
    auto mutant = list;
    // Where it is rounded first, the rounding comes too early.
    auto from = i;
    while (operation.bucket != Operation::none && list[from].operation.bucket == operation.bucket && from > 0) --from;
    if (operation.bucket == Operation::none) from = i - 1;
    auto const where = fmt::format("use {} ('{}'), {} of", at.use, at.use, name(list[++from].operation.primitive));
    for (; from <= i; ++from) {
      auto to = from;
      while (mutant[to].operation.primitive != Primitive::backward) --to;
      move_before(mutant, from, to);
    }
    found(mutant, where);
  });
  CHECK(mutants > 50);
}

TEST_CASE("symbols: a sum over ranks that is left out is found") {
  auto const mutants = expect_all_found([](PaperStep const&, List const& list, std::size_t i, auto const& found) {
    auto const& operation = list[i].operation;
    if (!is_collective(operation.primitive)) return;
    // A mean in place covers what earlier means of the step have left out.
    bool const in_place = operation.all[0].cells.pool == Pool::gradient;
    if (!in_place || list[i].at.micro_step % 2 == 0) found(without(list, i));
  });
  CHECK(mutants > 100);
}

TEST_CASE("symbols: a fault of a program is found in some kind of micro-step") {
  int faults = 0;
  for (auto const& input : kinds_of_steps()) {
    auto const program = fsdp::compile_program(input);
    for (auto const kind : {fsdp::PassKind::forward, fsdp::PassKind::backward}) {
      for (std::size_t turn = 0; turn < program.turns(kind).size(); ++turn) {
        for (bool const before : {true, false}) {
          auto const& operations = before ? program.turns(kind)[turn].before : program.turns(kind)[turn].after;
          for (std::size_t i = 0; i < operations.size(); ++i) {
            if (!moves(operations[i].primitive)) continue;
            auto faulty = program;
            auto& turns = faulty.turns(kind)[turn];
            auto& fewer = before ? turns.before : turns.after;
            fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(i));
            ++faults;
            INFO(name(kind) << ", turn " << turn << ", " << name(operations[i].primitive));
            CHECK(check_program(faulty, input) != "");
          }
        }
      }
    }
    for (auto const list : {&fsdp::Program::fetches, &fsdp::Program::gradient_fetches, &fsdp::Program::stores}) {
      for (std::size_t u = 0; u < program.units.size(); ++u) {
        // The sums that backward ends with are still in the slots.
        if ((program.*list)[u].size == 0 || (list == &fsdp::Program::gradient_fetches && u < 2)) continue;
        auto faulty = program;
        (faulty.*list)[u].size = 0;
        ++faults;
        INFO("around the update of unit " << u << ", " << name((program.*list)[u].primitive));
        CHECK(check_program(faulty, input) != "");
      }
    }
  }
  CHECK(faults > 200);
}

TEST_CASE("symbols: a message names the step, the use, the unit, what was expected and what was found") {
  PaperStep of(equal_units(5, 4));
  three_steps(of);
  auto list = of.list;
  auto const find = [&](Primitive primitive, std::uint32_t step) {
    auto const found = std::find_if(list.begin(), list.end(), [&](Executed const& executed) {
      return executed.operation.primitive == primitive && executed.operation.unit == 1 && executed.at.step == step;
    });
    return static_cast<std::size_t>(found - list.begin());
  };
  auto to = find(Primitive::update, 1);
  for (auto const primitive : {Primitive::open, Primitive::cast, Primitive::all_gather})
    move_before(list, find(primitive, 2), to++);
  auto const found = problems(of, list);
  REQUIRE_FALSE(found.empty());
  CHECK(
      found.front() ==
      "step 2, micro-step 5, forward of use 1 ('1'), forward of 'u1': gather slot 1, own slice: expected parameters of "
      "'u1' of step 2, found parameters of 'u1' of step 1");

  list = of.list;
  auto const sum = std::find_if(list.begin(), list.end(), [](Executed const& executed) {
    return executed.operation.primitive == Primitive::accumulate && executed.operation.unit == 1 &&
           executed.at.micro_step == 4;
  });
  list.insert(sum, Executed(*sum));
  REQUIRE(problems(of, list).size() == 2);
  CHECK(problems(of, list).front() ==
        "step 1, micro-step 4, backward of use 1 ('1'), accumulate of 'u1': gradient slot 1, own slice: expected "
        "gradients of 'u1' of whole micro-steps, 4 among them over all ranks, found used-up gradients of 'u1': "
        "micro-step 4 over all ranks");
  CHECK(problems(of, list).back() ==
        "step 1, update of 'u1': gradient shard of 'u1': expected gradients of 'u1': micro-steps 3-4 over all ranks, "
        "found gradients of 'u1': micro-step 3 over all ranks, micro-step 4 over all ranks 2 times");
}
