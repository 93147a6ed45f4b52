// SPDX-License-Identifier: Apache-2.0
// Scenarios of exceptions: in modules, tasks, readers, callers; caught or not.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <vector>

#include "tests/fuzz/plans.hpp"

namespace fuzz {

inline void module_throws(Plans& run) {
  auto const at = run.place_with_modules();
  auto const ranks = run.some_ranks();
  auto const how = run.draw.of(
      {Trick::throws, Trick::throws_other, Trick::task, Trick::task, Trick::task_waits, Trick::gather_task});
  for (auto const rank : ranks) run.made.ranks[rank].calls[at].trick = how;
  run.name("a module throws", Ending::errors);
  run.blame(ranks);
}

/// A task throws between calls: behind a pass, a norm, a step or whatever comes.
inline void task_throws(Plans& run) {
  auto const at = run.any_place();
  auto const ranks = run.some_ranks();
  for (auto const rank : ranks) run.made.ranks[rank].calls[at].trick = Trick::task_behind;
  run.name("a task throws behind a call", Ending::errors);
  run.blame(ranks);
}

/// Ranks fail in different ways, all in one run.
inline void several(Plans& run) {
  run.name("ranks fail in different ways", Ending::errors);
  for (auto& plan : run.made.ranks) {
    if (run.draw.once_in(3)) continue;
    auto const rank = static_cast<std::size_t>(&plan - run.made.ranks.data());
    auto const at = run.place_with_modules();
    auto const how = run.draw.of({Trick::throws, Trick::task, Trick::task_waits, Trick::gather_task, Trick::task_behind,
                                  Trick::outside, Trick::returns});
    plan.calls[at].trick = how;
    run.blame({rank});
    run.made.causes.push_back(fmt::format("rank {} has left", rank));
  }
  if (run.made.causes.empty()) run.made.ending = Ending::reference;
}

inline void caller_throws(Plans& run) {
  auto const at = run.any_place();
  auto const ranks = run.some_ranks();
  bool const before = run.draw.once_in(8);
  for (auto const rank : ranks) {
    if (before) run.made.ranks[rank].before = Trick::outside;
    run.made.ranks[rank].calls[at].trick = Trick::outside;
  }
  run.name("the caller throws", Ending::errors);
  run.blame(ranks);
}

inline void reader_throws(Plans& run) {
  run.made.ranks[0].end = run.throwing();
  run.name("the reader of an export throws", Ending::errors);
  run.blame({0});
}

inline void memory_ends(Plans& run) {
  auto const rank = run.one_rank();
  run.made.ranks[rank].allocations = run.draw.between(0, 14);
  run.made.causes = {"cannot allocate"};
  run.name("the device has no memory", Ending::either);
}

inline void all_catch(Plans& run) {
  run.name("all ranks catch, discard and begin the step again", Ending::reference);
  do {
    auto const at = run.draw.of(run.places(
        [&](std::size_t place) { return run.runs_modules(place) && run.calls()[place].trick == Trick::none; }));
    auto redo = run.copied(run.step_of(at), at + 1);
    for (auto& call : redo) call = {call.op};
    redo.insert(redo.begin(), run.discard());
    auto const how = run.throwing();
    run.everywhere(at, how, true);
    run.insert_everywhere(at + 1, redo);
  } while (run.draw.once_in(3));
}

inline void forward_again(Plans& run) {
  auto const at = run.any(Op::forward);
  auto redo = run.copied(run.pass_of(at), at + 1);
  auto const how = run.throwing();
  run.everywhere(at, how, true);
  run.insert_everywhere(at + 1, redo);
  run.name("all ranks catch in forward and begin the pass again", Ending::reference);
}

inline void one_catches(Plans& run) {
  auto const at = run.place_with_modules();
  auto& plan = run.made.ranks[run.one_rank()];
  auto redo = run.copied(run.step_of(at), at + 1);
  for (auto const& call : redo)
    if (call.op.kind == Op::import) return run.nothing();  // what came before it cannot be repeated
  redo.insert(redo.begin(), run.discard());
  plan.calls[at].trick = Trick::throws;
  plan.calls[at].caught = true;
  run.insert(plan, at + 1, redo);
  run.name("one rank catches and begins the step again", Ending::either);
}

/// Engines are thrown away after a failure, on all ranks or on one, and made anew over the same communicator.
inline void engine_afresh(Plans& run) {
  auto const at = run.any_place();
  auto const afresh = run.made.ranks[0].calls;
  for (auto& plan : run.made.ranks) plan.afresh = afresh;
  auto const ranks = run.some_ranks();
  for (auto const rank : ranks) run.made.ranks[rank].calls[at].trick = Trick::outside;
  run.name("another engine after a failure",
           ranks.size() == run.made.ranks.size() ? Ending::reference : Ending::either);
}

}  // namespace fuzz
