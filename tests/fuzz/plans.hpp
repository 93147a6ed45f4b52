// SPDX-License-Identifier: Apache-2.0
// Parts of scenarios: a training run without a fault, places in it, and ways to change it.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/scenario.hpp"
#include "tests/support/trial/draw.hpp"

namespace fuzz {

class Plans {
 public:
  /// Draws a run in which nothing goes wrong. @param ranks  0: drawn
  explicit Plans(std::uint64_t seed, int ranks = 0) : draw(seed) {
    trial::Limits limits{.least_parts = 2,
                         .most_parts = 5,
                         .most_ranks = 5,
                         .most_elements = 130,
                         .least_steps = 1,
                         .most_steps = 3,
                         .infinities = false};
    if (ranks > 0) limits.least_ranks = limits.most_ranks = ranks;
    base = trial::draw_trial(draw, limits);
    auto const setting = trial::draw_setting(draw, base);
    std::vector<Call> calls;
    for (auto const& op : base.script) expand(op, calls);
    made.ranks.assign(static_cast<std::size_t>(base.ranks), Plan{base, setting, std::move(calls), {}, {}, -1, 0, {}});
  }

  trial::Draw draw;
  trial::Trial base;  ///< the run without a fault
  Scenario made;

  // --- Places in it.

  std::vector<Call> const& calls() const { return made.ranks[0].calls; }
  Op::Kind kind(std::size_t at) const { return calls()[at].op.kind; }
  bool runs_modules(std::size_t at) const {
    return kind(at) == Op::forward || kind(at) == Op::backward || kind(at) == Op::evaluate;
  }
  bool begins_pass(std::size_t at) const {
    auto const& op = calls()[at].op;
    return (op.kind == Op::forward && op.from == 0) || (op.kind == Op::backward && op.to == base.model.parts.size());
  }
  template <class Fits>
  std::vector<std::size_t> places(Fits const& fits) const {
    std::vector<std::size_t> found;
    for (std::size_t at = 0; at < calls().size(); ++at)
      if (fits(at)) found.push_back(at);
    return found;
  }
  std::size_t any_place() { return draw.below(calls().size()); }
  std::size_t any(Op::Kind of) {
    return draw.of(places([&](std::size_t at) { return kind(at) == of; }));
  }
  /// Where a pass of this kind begins.
  std::size_t any_pass(Op::Kind of) {
    return draw.of(places([&](std::size_t at) { return kind(at) == of && begins_pass(at); }));
  }
  std::size_t place_with_modules() {
    return draw.of(places([this](std::size_t at) { return runs_modules(at); }));
  }
  /// Inside a pass of this kind: parts came before, and come after.
  std::size_t place_inside(Op::Kind of) {
    return draw.of(places([&](std::size_t at) { return kind(at) == of && !begins_pass(at); }));
  }
  /// The first call after the optimizer step or the discarding before `at`: what gradients at `at` come of.
  std::size_t step_of(std::size_t at) const {
    while (at > 0 && kind(at - 1) != Op::step && kind(at - 1) != Op::discard) --at;
    return at;
  }
  /// The first call of the forward pass that `at` belongs to.
  std::size_t pass_of(std::size_t at) const {
    while (!begins_pass(at)) --at;
    return at;
  }
  std::size_t end_of_pass(std::size_t at) const {
    auto end = at;
    while (end < calls().size() && kind(end) == kind(at) && !begins_pass(end)) ++end;
    return end;
  }
  /// Whether the call at `at` discards the gradients.
  bool discards(std::size_t at) const { return at < calls().size() && kind(at) == Op::discard; }
  /// Some of the ranks, all of them now and then.
  std::vector<std::size_t> some_ranks() {
    if (draw.once_in(4)) return all_ranks();
    std::vector<std::size_t> some{draw.below(made.ranks.size())};
    if (draw.once_in(3)) {
      auto const another = draw.below(made.ranks.size());
      if (another != some[0]) some.push_back(another);
    }
    return some;
  }
  std::vector<std::size_t> all_ranks() const {
    std::vector<std::size_t> all;
    for (std::size_t rank = 0; rank < made.ranks.size(); ++rank) all.push_back(rank);
    return all;
  }
  std::size_t one_rank() { return draw.below(made.ranks.size()); }

  // --- Changes of plans.

  static void insert(Plan& plan, std::size_t at, std::vector<Call> const& calls) {
    plan.calls.insert(plan.calls.begin() + static_cast<std::ptrdiff_t>(at), calls.begin(), calls.end());
  }
  static void erase(Plan& plan, std::size_t from, std::size_t to) {
    plan.calls.erase(plan.calls.begin() + static_cast<std::ptrdiff_t>(from),
                     plan.calls.begin() + static_cast<std::ptrdiff_t>(to));
  }
  std::vector<Call> copied(std::size_t from, std::size_t to) const {
    return {calls().begin() + static_cast<std::ptrdiff_t>(from), calls().begin() + static_cast<std::ptrdiff_t>(to)};
  }
  /// The call of every rank at `at`.
  void everywhere(std::size_t at, Trick trick, bool caught) {
    for (auto& plan : made.ranks) plan.calls[at].trick = trick, plan.calls[at].caught = caught;
  }
  void insert_everywhere(std::size_t at, std::vector<Call> const& calls) {
    for (auto& plan : made.ranks) insert(plan, at, calls);
  }
  static Call discard() { return {{.kind = Op::discard}}; }
  void name(std::string text, Ending ending) {
    made.name = std::move(text);
    made.ending = ending;
  }
  void nothing() { name("nothing", Ending::reference); }
  /// Faults of these ranks are what errors speak of.
  void blame(std::vector<std::size_t> const& ranks) {
    for (auto const rank : ranks) made.causes.push_back(fmt::format("fault of rank {}", rank));
  }
  Trick throwing() { return draw.of({Trick::throws, Trick::throws, Trick::throws_other}); }

 private:
  /// A pass becomes a call for each part.
  void expand(Op const& op, std::vector<Call>& calls) const {
    auto const parts = base.model.parts.size();
    for (std::size_t i = 0; i < parts; ++i) {
      auto one = op;
      if (op.kind == Op::forward) one.from = i, one.to = i + 1;
      if (op.kind == Op::backward) one.from = parts - 1 - i, one.to = parts - i;
      calls.push_back({one});
      if (op.kind != Op::forward && op.kind != Op::backward) return;
    }
  }
};

}  // namespace fuzz
