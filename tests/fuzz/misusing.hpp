// SPDX-License-Identifier: Apache-2.0
// Scenarios of calls that are out of order, too few, or refused.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/fuzz/plans.hpp"

namespace fuzz {

/// A call of another part than is due; legal only where a forward pass may begin.
inline Op wrong_call(Plans& run, std::size_t at) {
  auto op = run.calls()[at].op;
  auto const parts = run.base.model.parts.size();
  auto const due = op.from;
  do {
    op.from = run.draw.below(parts);
  } while (op.from == due);
  op.to = op.from + 1;
  // Half a forward pass, then backward; half a backward pass, then forward of another part than the first.
  if (!run.begins_pass(at) && run.draw.once_in(3))
    op.kind = op.kind == Op::forward || op.from == 0 ? Op::backward : Op::forward;
  return op;
}

inline std::size_t place_for_wrong_call(Plans& run) {
  return run.draw.of(
      run.places([&](std::size_t at) { return run.kind(at) == Op::forward || run.kind(at) == Op::backward; }));
}

inline void other_order(Plans& run) {
  auto const at = place_for_wrong_call(run);
  auto const op = wrong_call(run, at);
  for (auto const rank : run.some_ranks()) run.made.ranks[rank].calls[at].op = op;
  run.made.causes = {"in the order in which they were added", "before the forward pass was complete",
                     "without a forward pass", "is incomplete"};
  run.name("another module than declared", Ending::errors);
}

inline void wrong_call_caught(Plans& run) {
  auto const at = place_for_wrong_call(run);
  Call const call{wrong_call(run, at), Trick::refused, true};
  for (auto const rank : run.some_ranks()) run.insert(run.made.ranks[rank], at, {call});
  run.name("a call out of order is refused and changes nothing", Ending::reference);
}

inline void call_in_module(Plans& run) {
  auto const at = run.place_with_modules();
  auto const parts = run.base.model.parts.size();
  auto const part = run.draw.below(parts);
  auto const other = run.draw.of(std::vector<Op>{{.kind = Op::forward, .from = part, .to = part + 1},
                                                 {.kind = Op::backward, .from = part, .to = part + 1},
                                                 {.kind = Op::evaluate},
                                                 {.kind = Op::step, .value = 0.1f}});
  for (auto const rank : run.some_ranks()) {
    run.made.ranks[rank].calls[at].trick = Trick::nested;
    run.made.ranks[rank].calls[at].other = other;
  }
  run.name("a module makes another call", Ending::reference);
}

inline void half_forward(Plans& run) {
  auto const at = run.place_inside(Op::forward);
  auto calls = run.copied(run.pass_of(at), at);
  calls.insert(calls.begin(), run.draw.once_in(2) ? run.discard() : Call{{.kind = Op::evaluate, .data = 500}});
  run.insert_everywhere(at, calls);
  run.name("half a forward, an evaluation or a discarding, and the forward again", Ending::reference);
}

/// Gradients of earlier micro-steps are discarded in a module's forward, or before its backward begins.
inline void discard_in_pass(Plans& run) {
  run.name("gradients are discarded in a pass, which goes on", Ending::reference);
  if (run.draw.once_in(2)) {
    auto const at = run.any(Op::forward);
    for (auto& plan : run.made.ranks) plan.calls[at].trick = Trick::calls, plan.calls[at].other = run.discard().op;
  } else {
    auto const at = run.any_pass(Op::backward);
    run.insert_everywhere(at, {run.discard()});
  }
}

inline void half_backward(Plans& run) {
  auto const at = run.place_inside(Op::backward);
  if (run.draw.once_in(2)) {
    auto redo = run.copied(run.step_of(at), at);
    redo.insert(redo.begin(), run.discard());
    run.insert_everywhere(at, redo);
    return run.name("half a backward, discarded", Ending::reference);
  }
  auto const end = run.end_of_pass(at);
  run.name("half a backward, and nobody minds", run.discards(end) ? Ending::reference : Ending::errors);
  for (auto& plan : run.made.ranks) run.erase(plan, at, end);
  // Whoever comes next names a unit of which the gradient is missing.
  for (auto const& unit : run.base.model.units) run.made.causes.push_back("'" + unit + "'");
}

inline void barred_until_discard(Plans& run) {
  auto const at = run.place_inside(Op::backward);
  bool const throws = run.draw.once_in(2);
  auto redo = run.copied(run.step_of(at), throws ? at + 1 : at);
  auto const barred = run.draw.of(std::vector<Op>{{.kind = Op::forward, .to = 1},
                                                  {.kind = Op::evaluate},
                                                  {.kind = Op::clip, .value = 1.0f},
                                                  {.kind = Op::step, .value = 0.1f}});
  redo.insert(redo.begin(), {Call{barred, Trick::refused, true}, run.discard()});
  for (auto& plan : run.made.ranks) {
    if (throws) plan.calls[at].trick = Trick::throws, plan.calls[at].caught = true;
    run.insert(plan, throws ? at + 1 : at, redo);
  }
  run.name("after half a backward all but discarding is refused", Ending::reference);
}

inline void half_on_one_rank(Plans& run) {
  auto const at = run.place_inside(run.draw.of({Op::forward, Op::backward}));
  auto const end = run.end_of_pass(at);
  run.name("half a pass on one rank", run.discards(end) ? Ending::either : Ending::errors);
  run.erase(run.made.ranks[run.one_rank()], at, end);
}

/// A norm is measured, then gradients change.
inline void old_norm(Plans& run) {
  auto const at = run.any(Op::step);
  auto pass = at;
  while (!(run.kind(pass) == Op::forward && run.begins_pass(pass))) --pass;
  std::vector<Call> calls{{{.kind = Op::clip, .data = 1, .value = 0.01f}}};
  for (auto place = pass; place < at; ++place)
    if (run.kind(place) == Op::forward || run.kind(place) == Op::backward) calls.push_back({run.calls()[place].op});
  calls.push_back({run.calls()[at].op, Trick::refused, true});
  calls.push_back({{.kind = Op::clip, .data = 1, .value = 0.5f}});
  run.insert_everywhere(at, calls);
  run.name("a norm that was measured before another backward is refused", Ending::reference);
}

inline bool has_reduced(Plans const& run, std::size_t at) {
  for (auto place = run.step_of(at); place < at; ++place)
    if (run.kind(place) == Op::backward) return true;
  return false;
}

inline void refused_calls(Plans& run) {
  auto const ranks = run.some_ranks();
  std::vector<Call> calls;
  std::size_t at = 0;
  auto const refuse = [&](Op const& op) { calls.push_back({op, Trick::refused, true}); };
  auto const before_step = run.places([&](std::size_t place) { return run.kind(place) == Op::step; });
  switch (run.draw.between(1, 7)) {
    case 1:
      at = run.draw.of(before_step) + 1;
      refuse({.kind = Op::step, .value = 0.1f});
      run.name("a second step is refused", Ending::reference);
      break;
    case 2:
      at = run.draw.of(before_step) + 1;
      refuse({.kind = Op::clip, .value = 1.0f});
      run.name("clipping after the step is refused", Ending::reference);
      break;
    case 3:
      at = 0;
      refuse({.kind = run.draw.of({Op::step, Op::clip})});
      run.name("a step before any backward is refused", Ending::reference);
      break;
    case 4:
      at = run.draw.of(before_step);
      refuse({.kind = Op::clip, .value = run.draw.of({0.0f, -1.0f, NAN})});
      run.name("a bad norm is refused", Ending::reference);
      break;
    case 5:
      at = run.draw.of(before_step);
      refuse({.kind = Op::step, .value = run.draw.of({-1.0f, NAN, INFINITY})});
      if (run.draw.once_in(2)) calls.push_back(calls[0]);
      run.name("a bad learning rate is refused", Ending::reference);
      break;
    case 6:
      at = 0;
      refuse({.kind = Op::gradients});
      run.name("gradients before any backward are refused", Ending::reference);
      break;
    default:
      at = run.any(Op::backward);
      refuse({.kind = Op::step, .value = 0.1f});
      if (has_reduced(run, at)) calls.clear();  // it would be a step: of earlier micro-steps
      run.name("a step in the middle of a micro-step", Ending::reference);
      break;
  }
  for (auto const rank : ranks) run.insert(run.made.ranks[rank], at, calls);
}

}  // namespace fuzz
