// SPDX-License-Identifier: Apache-2.0
// Draws scenarios: a training run, and what goes wrong in it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/fuzz/scenario.hpp"
#include "tests/support/trial/draw.hpp"

namespace fuzz {

class Scenarios {
 public:
  /// @param ranks  0: drawn
  explicit Scenarios(std::uint64_t seed, int ranks = 0) : draw_(seed), ranks_(ranks) {}

  Scenario next() {
    using Kind = void (Scenarios::*)();
    static constexpr std::array kinds{&Scenarios::nothing,
                                      &Scenarios::module_throws,
                                      &Scenarios::module_throws,
                                      &Scenarios::module_throws,
                                      &Scenarios::all_catch,
                                      &Scenarios::all_catch,
                                      &Scenarios::forward_again,
                                      &Scenarios::barred_until_discard,
                                      &Scenarios::one_catches,
                                      &Scenarios::returns_early,
                                      &Scenarios::caller_throws,
                                      &Scenarios::other_order,
                                      &Scenarios::wrong_call_caught,
                                      &Scenarios::other_declaration,
                                      &Scenarios::other_declaration,
                                      &Scenarios::half_forward,
                                      &Scenarios::half_backward,
                                      &Scenarios::half_on_one_rank,
                                      &Scenarios::refused_calls,
                                      &Scenarios::refused_calls,
                                      &Scenarios::alone,
                                      &Scenarios::alone,
                                      &Scenarios::once_more,
                                      &Scenarios::reader_throws,
                                      &Scenarios::memory_ends,
                                      &Scenarios::call_in_module,
                                      &Scenarios::several,
                                      &Scenarios::several,
                                      &Scenarios::engine_afresh,
                                      &Scenarios::old_norm};
    static_assert(std::is_same_v<decltype(kinds)::value_type, Kind>);
    begin();
    (this->*draw_.of(std::vector<Kind>(kinds.begin(), kinds.end())))();
    if (draw_.once_in(4))
      for (auto& plan : made_.ranks) plan.delay_us = draw_.of({0, 100, 400});
    return std::move(made_);
  }

 private:
  static constexpr float nan = std::numeric_limits<float>::quiet_NaN();

  // --- The run without a fault.

  void begin() {
    trial::Limits limits{.least_parts = 2,
                         .most_parts = 5,
                         .most_ranks = 5,
                         .most_elements = 130,
                         .least_steps = 1,
                         .most_steps = 3,
                         .infinities = false};
    if (ranks_ > 0) limits.least_ranks = limits.most_ranks = ranks_;
    made_ = {};
    trial_ = trial::draw_trial(draw_, limits);
    auto const setting = trial::draw_setting(draw_, trial_);
    std::vector<Call> calls;
    for (auto const& op : trial_.script) expand(op, calls);
    made_.ranks.assign(static_cast<std::size_t>(trial_.ranks),
                       Plan{trial_, setting, std::move(calls), {}, {}, -1, 0, {}});
  }
  /// A pass becomes a call for each part.
  void expand(Op const& op, std::vector<Call>& calls) const {
    auto const parts = trial_.model.parts.size();
    for (std::size_t i = 0; i < parts; ++i) {
      auto one = op;
      if (op.kind == Op::forward) one.from = i, one.to = i + 1;
      if (op.kind == Op::backward) one.from = parts - 1 - i, one.to = parts - i;
      calls.push_back({one});
      if (op.kind != Op::forward && op.kind != Op::backward) return;
    }
  }

  // --- Places in it.

  std::vector<Call> const& calls() const { return made_.ranks[0].calls; }
  Op::Kind kind(std::size_t at) const { return calls()[at].op.kind; }
  bool runs_modules(std::size_t at) const {
    return kind(at) == Op::forward || kind(at) == Op::backward || kind(at) == Op::evaluate;
  }
  bool begins_pass(std::size_t at) const {
    auto const& op = calls()[at].op;
    return (op.kind == Op::forward && op.from == 0) || (op.kind == Op::backward && op.to == trial_.model.parts.size());
  }
  template <class Fits>
  std::vector<std::size_t> places(Fits const& fits) const {
    std::vector<std::size_t> found;
    for (std::size_t at = 0; at < calls().size(); ++at)
      if (fits(at)) found.push_back(at);
    return found;
  }
  std::size_t any_place() { return draw_.below(calls().size()); }
  std::size_t place_with_modules() {
    return draw_.of(places([this](std::size_t at) { return runs_modules(at); }));
  }
  /// Inside a pass of this kind: parts came before, and come after.
  std::size_t place_inside(Op::Kind of) {
    return draw_.of(places([&](std::size_t at) { return kind(at) == of && !begins_pass(at); }));
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
  /// What comes at `at` forgets the gradients.
  bool discards(std::size_t at) const { return at < calls().size() && kind(at) == Op::discard; }
  /// Some of the ranks, all of them now and then.
  std::vector<std::size_t> some_ranks() {
    if (draw_.once_in(4)) return all_ranks();
    std::vector<std::size_t> some{draw_.below(made_.ranks.size())};
    if (draw_.once_in(3)) {
      auto const another = draw_.below(made_.ranks.size());
      if (another != some[0]) some.push_back(another);
    }
    return some;
  }
  std::vector<std::size_t> all_ranks() const {
    std::vector<std::size_t> all;
    for (std::size_t rank = 0; rank < made_.ranks.size(); ++rank) all.push_back(rank);
    return all;
  }
  std::size_t one_rank() { return draw_.below(made_.ranks.size()); }

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
  static Call discard() { return {{.kind = Op::discard}}; }
  void name(std::string text, Ending ending) {
    made_.name = std::move(text);
    made_.ending = ending;
  }
  /// Faults of these ranks are what errors speak of.
  void blame(std::vector<std::size_t> const& ranks) {
    for (auto const rank : ranks) made_.causes.push_back(fmt::format("fault of rank {}", rank));
  }
  Trick throwing() { return draw_.of({Trick::throws, Trick::throws, Trick::throws_other}); }

  // --- What goes wrong.

  void nothing() { name("nothing", Ending::reference); }

  void module_throws() {
    auto const at = place_with_modules();
    auto const ranks = some_ranks();
    auto const how =
        draw_.of({Trick::throws, Trick::throws_other, Trick::task, Trick::task, Trick::task_waits, Trick::gather_task});
    for (auto const rank : ranks) made_.ranks[rank].calls[at].trick = how;
    name("a module throws", Ending::errors);
    blame(ranks);
  }

  void all_catch() {
    name("all ranks catch, discard and begin the step again", Ending::reference);
    do {
      auto const at = draw_.of(
          places([this](std::size_t place) { return runs_modules(place) && calls()[place].trick == Trick::none; }));
      auto redo = copied(step_of(at), at + 1);
      for (auto& call : redo) call = {call.op};
      redo.insert(redo.begin(), discard());
      auto const how = throwing();
      for (auto& plan : made_.ranks) {
        plan.calls[at].trick = how;
        plan.calls[at].caught = true;
        insert(plan, at + 1, redo);
      }
    } while (draw_.once_in(3));
  }

  void forward_again() {
    auto const at = draw_.of(places([this](std::size_t place) { return kind(place) == Op::forward; }));
    auto redo = copied(pass_of(at), at + 1);
    auto const how = throwing();
    for (auto& plan : made_.ranks) {
      plan.calls[at].trick = how;
      plan.calls[at].caught = true;
      insert(plan, at + 1, redo);
    }
    name("all ranks catch in forward and begin the pass again", Ending::reference);
  }

  void barred_until_discard() {
    auto const at = place_inside(Op::backward);
    bool const throws = draw_.once_in(2);
    auto redo = copied(step_of(at), throws ? at + 1 : at);
    auto const barred = draw_.of(std::vector<Op>{{.kind = Op::forward, .to = 1},
                                                 {.kind = Op::evaluate},
                                                 {.kind = Op::clip, .value = 1.0f},
                                                 {.kind = Op::step, .value = 0.1f}});
    redo.insert(redo.begin(), {Call{barred, Trick::refused, true}, discard()});
    for (auto& plan : made_.ranks) {
      if (throws) plan.calls[at].trick = Trick::throws, plan.calls[at].caught = true;
      insert(plan, throws ? at + 1 : at, redo);
    }
    name("after half a backward all but discarding is refused", Ending::reference);
  }

  void one_catches() {
    auto const at = place_with_modules();
    auto& plan = made_.ranks[one_rank()];
    auto redo = copied(step_of(at), at + 1);
    redo.insert(redo.begin(), discard());
    plan.calls[at].trick = Trick::throws;
    plan.calls[at].caught = true;
    insert(plan, at + 1, redo);
    name("one rank catches and begins the step again", Ending::either);
  }

  void returns_early() {
    auto const at = any_place();
    auto const ranks = some_ranks();
    bool const before = draw_.once_in(8);
    for (auto const rank : ranks) {
      if (before) made_.ranks[rank].before = Trick::returns;
      made_.ranks[rank].calls[at].trick = Trick::returns;
      made_.causes.push_back(fmt::format("rank {} has left", rank));
      made_.causes.push_back(fmt::format("rank {} has ended", rank));
    }
    name("ranks return early", Ending::errors);
  }

  void caller_throws() {
    auto const at = any_place();
    auto const ranks = some_ranks();
    bool const before = draw_.once_in(8);
    for (auto const rank : ranks) {
      if (before) made_.ranks[rank].before = Trick::outside;
      made_.ranks[rank].calls[at].trick = Trick::outside;
    }
    name("the caller throws", Ending::errors);
    blame(ranks);
  }

  /// A call of another part than is due; legal only where a forward pass may begin.
  Op wrong_call(std::size_t at) {
    auto op = calls()[at].op;
    auto const parts = trial_.model.parts.size();
    auto const due = op.from;
    do {
      op.from = draw_.below(parts);
    } while (op.from == due);
    op.to = op.from + 1;
    // Half a forward pass, then backward; half a backward pass, then forward of another part than the first.
    if (!begins_pass(at) && draw_.once_in(3))
      op.kind = op.kind == Op::forward || op.from == 0 ? Op::backward : Op::forward;
    return op;
  }
  std::size_t place_for_wrong_call() {
    return draw_.of(places([this](std::size_t at) { return kind(at) == Op::forward || kind(at) == Op::backward; }));
  }

  void other_order() {
    auto const at = place_for_wrong_call();
    auto const op = wrong_call(at);
    for (auto const rank : some_ranks()) made_.ranks[rank].calls[at].op = op;
    made_.causes = {"was expected", "before the forward pass is complete", "half-way", "left half"};
    name("another module than declared", Ending::errors);
  }

  void wrong_call_caught() {
    auto const at = place_for_wrong_call();
    Call const call{wrong_call(at), Trick::refused, true};
    for (auto const rank : some_ranks()) insert(made_.ranks[rank], at, {call});
    name("a call out of order is refused and changes nothing", Ending::reference);
  }

  void other_declaration() {
    if (trial_.ranks == 1) return nothing();
    auto& plan = made_.ranks[one_rank()];
    auto& part = any_part(plan.trial.model);
    auto& options = plan.setting.options;
    name("another declaration on one rank", Ending::errors);
    made_.causes = {"disagree", "differ"};
    switch (draw_.between(1, 15)) {
      case 1:
        if (draw_.once_in(2)) {
          options.prefetch += 1;
        } else {
          plan.setting.ahead.push_back({false, 0, {}});
        }
        break;
      case 2: options.keep_last = !options.keep_last; break;
      case 3: options.seed += 1; break;
      case 4: options.bucket_bytes += 4; break;
      case 5: options.accumulate_unsharded = !options.accumulate_unsharded; break;
      case 6: options.keep_root = !options.keep_root; break;
      case 7: set_everywhere(plan.trial.model, part, tensor_of(part).name, [](auto& t) { t.shape[0] += 1; }); break;
      case 8: rename(plan.trial.model, part); break;
      case 9:
        set_everywhere(plan.trial.model, part, tensor_of(part).name, [](auto& t) { t.deviation += 0.125f; });
        break;
      case 10: set_everywhere(plan.trial.model, part, tensor_of(part).name, [](auto& t) { t.decay = !t.decay; }); break;
      case 11:
        plan.setting.sharding =
            plan.setting.sharding == trial::Sharding::none ? trial::Sharding::grad_op : trial::Sharding::none;
        options.reshard_ranks = 0, options.accumulate_replica = false;
        break;
      case 12:
        if (plan.setting.hybrid()) {
          plan.setting.sharding = plan.setting.sharding == trial::Sharding::hybrid_full
                                      ? trial::Sharding::hybrid_grad_op
                                      : trial::Sharding::hybrid_full;
          options.reshard_ranks = 0;
        } else {
          options.first_bucket_bytes += 4;
        }
        break;
      case 15: {
        auto& parts = plan.trial.model.parts;
        auto const place = 1 + draw_.below(parts.size() - 1);
        if (parts[place - 1].unit == parts[place].unit) return nothing();
        std::swap(parts[place - 1], parts[place]);
        break;
      }
      case 13: plan.trial.optimizer.weight_decay += 0.5f; break;
      case 14:
        plan.trial.optimizer = {.adamw = !plan.trial.optimizer.adamw,
                                .weight_decay = plan.trial.optimizer.weight_decay};
        break;
      default: break;
    }
  }
  trial::PartSpec& any_part(trial::Model& model) { return model.parts[draw_.below(model.parts.size())]; }
  /// A tensor of the part; if it has none, one that no other rank has.
  trial::TensorSpec& tensor_of(trial::PartSpec& part) {
    if (part.tensors.empty()) part.tensors.push_back({"extra", {1}});
    return part.tensors[draw_.below(part.tensors.size())];
  }
  static void rename(trial::Model& model, trial::PartSpec& part) {
    if (part.tensors.empty()) return part.tensors.push_back({"extra", {1}});
    auto const prefix = part.prefix, old = part.tensors[0].name;
    set_everywhere(model, part, old, [](auto& tensor) { tensor.name += "_renamed"; });
  }
  /// Changes a tensor in all parts that it is tied with.
  template <class Change>
  static void set_everywhere(trial::Model& model, trial::PartSpec const& part, std::string const tensor,
                             Change const& change) {
    auto const prefix = part.prefix;
    for (auto& other : model.parts)
      for (auto& t : other.tensors)
        if (other.prefix == prefix && t.name == tensor) change(t);
  }

  void half_forward() {
    auto const at = place_inside(Op::forward);
    if (draw_.once_in(2)) {
      for (auto& plan : made_.ranks) insert(plan, at, {discard()});
      return name("gradients are discarded in the middle of a forward, which goes on", Ending::reference);
    }
    auto calls = copied(pass_of(at), at);
    calls.insert(calls.begin(), Call{{.kind = Op::evaluate, .data = 500}});
    for (auto& plan : made_.ranks) insert(plan, at, calls);
    name("half a forward, an evaluation, and the forward again", Ending::reference);
  }

  void half_backward() {
    auto const at = place_inside(Op::backward);
    if (draw_.once_in(2)) {
      auto redo = copied(step_of(at), at);
      redo.insert(redo.begin(), discard());
      for (auto& plan : made_.ranks) insert(plan, at, redo);
      return name("half a backward, discarded", Ending::reference);
    }
    auto const end = end_of_pass(at);
    name("half a backward, and nobody minds", discards(end) ? Ending::reference : Ending::errors);
    for (auto& plan : made_.ranks) erase(plan, at, end);
    // Whoever comes next names a unit of which the gradient is missing.
    for (auto const& unit : trial_.model.units) made_.causes.push_back("'" + unit + "'");
  }

  void half_on_one_rank() {
    auto const at = place_inside(draw_.of({Op::forward, Op::backward}));
    auto const end = end_of_pass(at);
    name("half a pass on one rank", discards(end) ? Ending::either : Ending::errors);
    erase(made_.ranks[one_rank()], at, end);
  }

  void refused_calls() {
    auto const ranks = some_ranks();
    std::vector<Call> calls;
    std::size_t at = 0;
    auto const refuse = [&](Op const& op) { calls.push_back({op, Trick::refused, true}); };
    auto const before_step = places([this](std::size_t place) { return kind(place) == Op::step; });
    switch (draw_.between(1, 7)) {
      case 1:
        at = draw_.of(before_step) + 1;
        refuse({.kind = Op::step, .value = 0.1f});
        name("a second step is refused", Ending::reference);
        break;
      case 2:
        at = draw_.of(before_step) + 1;
        refuse({.kind = Op::clip, .value = 1.0f});
        name("clipping after the step is refused", Ending::reference);
        break;
      case 3:
        at = 0;
        refuse({.kind = draw_.of({Op::step, Op::clip})});
        name("a step before any backward is refused", Ending::reference);
        break;
      case 4:
        at = draw_.of(before_step);
        refuse({.kind = Op::clip, .value = draw_.of({0.0f, -1.0f, nan})});
        name("a bad norm is refused", Ending::reference);
        break;
      case 5:
        at = draw_.of(before_step);
        refuse({.kind = Op::step, .value = draw_.of({-1.0f, nan, INFINITY})});
        if (draw_.once_in(2)) calls.push_back(calls[0]);
        name("a bad learning rate is refused", Ending::reference);
        break;
      case 6:
        at = 0;
        refuse({.kind = Op::gradients});
        name("gradients before any backward are refused", Ending::reference);
        break;
      default:
        at = draw_.of(places([this](std::size_t place) { return kind(place) == Op::backward; }));
        refuse({.kind = Op::step, .value = 0.1f});
        if (has_reduced(at)) calls.clear();  // it would be a step: of earlier micro-steps
        name("a step in the middle of a micro-step", Ending::reference);
        break;
    }
    for (auto const rank : ranks) insert(made_.ranks[rank], at, calls);
  }
  bool has_reduced(std::size_t at) const {
    for (auto place = step_of(at); place < at; ++place)
      if (kind(place) == Op::backward) return true;
    return false;
  }

  /// A call that the other ranks do not make.
  void alone() {
    auto& plan = made_.ranks[one_rank()];
    auto const steps = places([this](std::size_t place) { return kind(place) == Op::step; });
    name("one rank does what the others do not", trial_.ranks == 1 ? Ending::reference : Ending::either);
    auto const at = draw_.of(steps);
    auto const pass =
        draw_.of(places([this](std::size_t place) { return kind(place) == Op::backward && begins_pass(place); }));
    auto const choice = draw_.between(1, 6);
    if (choice > 4) made_.ending = Ending::either;  // gradients that are never reduced cannot be stepped with
    switch (choice) {
      case 1:
        if (trial_.ranks > 1) made_.ending = Ending::errors;
        insert(plan, at, {{{.kind = Op::clip, .value = 1e30f}}});
        break;
      case 2: {
        auto const clips = places([this](std::size_t place) { return kind(place) == Op::clip; });
        if (clips.empty()) return;
        if (trial_.ranks > 1) made_.ending = Ending::errors;
        auto const clip = draw_.of(clips);
        erase(plan, clip, clip + 1);
        break;
      }
      case 3: insert(plan, at, {{{.kind = Op::evaluate, .data = 501}}}); break;
      case 4: insert(plan, at, {{{.kind = Op::gradients}}}); break;
      case 5: {
        if (plan.setting.options.accumulate_unsharded || plan.setting.shards(trial_.ranks) == 1)
          insert(plan, pass, {{{.kind = Op::gradient_sync, .value = 0.0f}}});
        break;
      }
      default: {
        if (plan.setting.options.accumulate_replica) insert(plan, pass, {{{.kind = Op::replica_sync, .value = 0.0f}}});
        if (plan.setting.keeps) insert(plan, pass, {{{.kind = Op::reshard, .value = 0.0f}}});
        break;
      }
    }
  }

  void once_more() {
    if (trial_.ranks == 1) return nothing();
    auto& plan = made_.ranks[one_rank()];
    auto const at = draw_.of(places([this](std::size_t place) { return kind(place) == Op::step; }));
    auto const step = copied(step_of(at), at + 1);
    insert(plan, at + 1, step);
    name("one rank makes a step more", Ending::errors);
  }

  void reader_throws() {
    made_.ranks[0].end = throwing();
    name("the reader of an export throws", Ending::errors);
    blame({0});
  }

  void memory_ends() {
    auto const rank = one_rank();
    made_.ranks[rank].allocations = draw_.between(0, 14);
    made_.causes = {"cannot allocate"};
    name("the device has no memory", Ending::either);
  }

  void call_in_module() {
    auto const at = place_with_modules();
    auto const parts = trial_.model.parts.size();
    auto const part = draw_.below(parts);
    auto const other = draw_.of(std::vector<Op>{{.kind = Op::forward, .from = part, .to = part + 1},
                                                {.kind = Op::backward, .from = part, .to = part + 1},
                                                {.kind = Op::evaluate},
                                                {.kind = Op::step, .value = 0.1f}});
    for (auto const rank : some_ranks()) {
      made_.ranks[rank].calls[at].trick = Trick::nested;
      made_.ranks[rank].calls[at].other = other;
    }
    name("a module makes another call", Ending::reference);
  }

  /// Ranks fail in different ways, all in one run.
  void several() {
    name("ranks fail in different ways", Ending::errors);
    for (auto& plan : made_.ranks) {
      if (draw_.once_in(3)) continue;
      auto const rank = static_cast<std::size_t>(&plan - made_.ranks.data());
      auto const at = place_with_modules();
      auto const how =
          draw_.of({Trick::throws, Trick::task, Trick::task_waits, Trick::gather_task, Trick::outside, Trick::returns});
      plan.calls[at].trick = how;
      blame({rank});
      made_.causes.push_back(fmt::format("rank {} has left", rank));
    }
    if (made_.causes.empty()) made_.ending = Ending::reference;
  }

  /// Engines are thrown away after a failure, on all ranks or on one, and made anew over the same communicator.
  void engine_afresh() {
    auto const at = any_place();
    auto const afresh = made_.ranks[0].calls;
    for (auto& plan : made_.ranks) plan.afresh = afresh;
    auto const ranks = some_ranks();
    for (auto const rank : ranks) made_.ranks[rank].calls[at].trick = Trick::outside;
    name("another engine after a failure", ranks.size() == made_.ranks.size() ? Ending::reference : Ending::either);
  }

  /// A norm is measured, then gradients change.
  void old_norm() {
    auto const at = draw_.of(places([this](std::size_t place) { return kind(place) == Op::step; }));
    auto pass = at;
    while (!(kind(pass) == Op::forward && begins_pass(pass))) --pass;
    std::vector<Call> calls{{{.kind = Op::clip, .data = 1, .value = 0.01f}}};
    for (auto place = pass; place < at; ++place)
      if (kind(place) == Op::forward || kind(place) == Op::backward) calls.push_back({calls_at(place)});
    calls.push_back({calls_at(at), Trick::refused, true});
    calls.push_back({{.kind = Op::clip, .data = 1, .value = 0.5f}});
    for (auto& plan : made_.ranks) insert(plan, at, calls);
    name("a norm that was measured before another backward is refused", Ending::reference);
  }
  Op const& calls_at(std::size_t place) const { return calls()[place].op; }

  trial::Draw draw_;
  int ranks_;
  trial::Trial trial_;
  Scenario made_;
};

/// The same seed draws the same.
inline Scenario draw_scenario(std::uint64_t seed, int ranks = 0) { return Scenarios(seed, ranks).next(); }

}  // namespace fuzz
