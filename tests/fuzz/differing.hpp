// SPDX-License-Identifier: Apache-2.0
// Scenarios of ranks that declare or do different things.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <utility>

#include "tests/fuzz/plans.hpp"

namespace fuzz {

/// A tensor of the part; if it has none, one that no other rank has.
inline trial::TensorSpec& any_tensor(Plans& run, trial::PartSpec& part) {
  if (part.tensors.empty()) part.tensors.push_back({"extra", {1}});
  return part.tensors[run.draw.below(part.tensors.size())];
}

/// Changes a tensor in all parts that it is tied between.
template <class Change>
void change_tensor(trial::Model& model, std::string const prefix, std::string const name, Change const& change) {
  for (auto& other : model.parts)
    for (auto& t : other.tensors)
      if (other.prefix == prefix && t.name == name) change(t);
}

inline void other_declaration(Plans& run) {
  if (run.base.ranks == 1) return run.nothing();
  auto& plan = run.made.ranks[run.one_rank()];
  auto& parts = plan.trial.model.parts;
  auto& part = parts[run.draw.below(parts.size())];
  auto& options = plan.setting.options;
  run.name("another declaration on one rank", Ending::errors);
  run.made.causes = {"disagree", "differ"};
  auto const change_any = [&](auto const& change) {
    change_tensor(plan.trial.model, part.prefix, any_tensor(run, part).name, change);
  };
  switch (run.draw.between(1, 15)) {
    case 1:
      if (run.draw.once_in(2)) {
        options.prefetch += 1;
      } else {
        plan.setting.ahead.push_back({false, 0, {}});
      }
      break;
    case 2: options.keep_last = !options.keep_last; break;
    case 3:
      if (run.draw.once_in(2)) {
        options.seed += 1;
      } else {
        options.reduce_dtype = fsdp::DType::bf16;
      }
      break;
    case 4: options.bucket_bytes += 4; break;
    case 5: options.allow_no_sync = !options.allow_no_sync; break;
    case 6: options.keep_root = !options.keep_root; break;
    case 7: change_any([](auto& tensor) { tensor.shape[0] += 1; }); break;
    case 8: change_any([](auto& tensor) { tensor.name += "_renamed"; }); break;
    case 9: change_any([](auto& tensor) { tensor.deviation += 0.125f; }); break;
    case 10: change_any([](auto& tensor) { tensor.decay = !tensor.decay; }); break;
    case 11:
      plan.setting.sharding =
          plan.setting.sharding == trial::Sharding::none ? trial::Sharding::grad_op : trial::Sharding::none;
      options.reshard_ranks = 0, options.allow_no_replica_sync = false;
      break;
    case 12:
      if (plan.setting.hybrid()) {
        plan.setting.sharding = plan.setting.sharding == trial::Sharding::hybrid_full ? trial::Sharding::hybrid_grad_op
                                                                                      : trial::Sharding::hybrid_full;
        options.reshard_ranks = 0;
      } else {
        options.first_bucket_bytes += 4;
      }
      break;
    case 13: {
      auto const place = 1 + run.draw.below(parts.size() - 1);
      if (parts[place - 1].unit == parts[place].unit) return run.nothing();
      std::swap(parts[place - 1], parts[place]);
      break;
    }
    case 14: plan.trial.optimizer.weight_decay += 0.5f; break;
    default:
      plan.trial.optimizer = {.adamw = !plan.trial.optimizer.adamw, .weight_decay = plan.trial.optimizer.weight_decay};
      break;
  }
}

/// A call that the other ranks do not make.
inline void alone(Plans& run) {
  auto& plan = run.made.ranks[run.one_rank()];
  run.name("one rank does what the others do not", run.base.ranks == 1 ? Ending::reference : Ending::either);
  auto const at = run.any(Op::step);
  auto const pass = run.any_pass(Op::backward);
  auto const choice = run.draw.between(1, 6);
  if (choice > 4) run.made.ending = Ending::either;  // gradients that are never reduced cannot be stepped with
  switch (choice) {
    case 1:
      if (run.base.ranks > 1) run.made.ending = Ending::errors;
      run.insert(plan, at, {{{.kind = Op::clip, .value = 1e30f}}});
      break;
    case 2: {
      auto const clips = run.places([&](std::size_t place) { return run.kind(place) == Op::clip; });
      if (clips.empty()) return;
      if (run.base.ranks > 1) run.made.ending = Ending::errors;
      auto const clip = run.draw.of(clips);
      run.erase(plan, clip, clip + 1);
      break;
    }
    case 3: run.insert(plan, at, {{{.kind = Op::evaluate, .data = 501}}}); break;
    case 4: run.insert(plan, at, {{{.kind = Op::gradients}}}); break;
    case 5:
      if (plan.setting.options.allow_no_sync || plan.setting.shards(run.base.ranks) == 1)
        run.insert(plan, pass, {{{.kind = Op::gradient_sync, .value = 0.0f}}});
      break;
    default:
      if (plan.setting.options.allow_no_replica_sync)
        run.insert(plan, pass, {{{.kind = Op::replica_sync, .value = 0.0f}}});
      if (plan.setting.keeps) run.insert(plan, pass, {{{.kind = Op::reshard, .value = 0.0f}}});
      break;
  }
}

inline void once_more(Plans& run) {
  if (run.base.ranks == 1) return run.nothing();
  auto& plan = run.made.ranks[run.one_rank()];
  auto const at = run.any(Op::step);
  auto const step = run.copied(run.step_of(at), at + 1);
  run.insert(plan, at + 1, step);
  run.name("one rank makes a step more", Ending::errors);
}

inline void returns_early(Plans& run) {
  auto const at = run.any_place();
  auto const ranks = run.some_ranks();
  bool const before = run.draw.once_in(8);
  for (auto const rank : ranks) {
    if (before) run.made.ranks[rank].before = Trick::returns;
    run.made.ranks[rank].calls[at].trick = Trick::returns;
    run.made.causes.push_back(fmt::format("rank {} has left", rank));
    run.made.causes.push_back(fmt::format("rank {} has ended", rank));
  }
  run.name("ranks return early", Ending::errors);
}

}  // namespace fuzz
