// SPDX-License-Identifier: Apache-2.0
// Predicts the time of a step on described hardware, by simulation. Only the costs of collectives depend on the number
// of ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/plan/hardware.hpp"
#include "fsdp/plan/work.hpp"
#include "fsdp/step/compile_program.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/run.hpp"
#include "fsdp/step/simulate.hpp"
#include "fsdp/stream_kind.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

/// Work of a step.
struct Workload {
  std::vector<Work> uses;  ///< work of each use, in the declared order
  int micro_steps = 1;     ///< of a step, on each rank
  bool no_sync = false;    ///< only the last micro-step reduces
  bool clips = true;       ///< the gradient norm is measured before the update
};

/// Predicted seconds of a step that follows others. `step` may exceed `compute + exposed`, because streams may wait for
/// other work.
struct Forecast {
  double step = 0;
  double compute = 0;        ///< kernels of the compute stream run: those of modules, norm and update
  double communication = 0;  ///< at least one collective runs
  double exposed = 0;        ///< seconds of communication while no such kernel runs
};

/// Costs of a step's operations. Local operations move bytes at the bandwidth of memory: those that they read and
/// write, AdamW's update 28 bytes an element and the norm 4.
[[gnu::cold]] inline Costs costs_on(Hardware const& hardware, Program const& program, StepInput const& input,
                                    Workload const& load) {
  using step::Group;
  using step::Primitive;
  Costs costs;
  auto const seconds = [&](Load const& of) {
    return of.flop / (hardware.flops * hardware.efficiency) + of.bytes / hardware.memory_bandwidth;
  };
  for (auto const& use : load.uses) {
    costs[Phase::forward].push_back(seconds(use.forward));
    costs[Phase::backward].push_back(seconds(use.backward));
  }
  ElementTypes types;
  auto gathered = types.master;
  for (auto const& unit : program.units)
    if (unit.trains()) types = unit.types, gathered = unit.gathered_type();
  auto const size = [](DType type) { return static_cast<double>(size_of(type)); };
  auto const moves = [&](Primitive primitive, double bytes) {
    costs[primitive].per_element = bytes / hardware.memory_bandwidth;
  };
  auto const gradient = size(types.gradient);
  moves(Primitive::cast, size(gathered) + size(types.parameter));
  moves(Primitive::copy, 2 * size(types.parameter));
  moves(Primitive::zero, gradient);
  moves(Primitive::accumulate, gradient + 2 * sizeof(float));
  moves(Primitive::add, 2 * gradient + sizeof(float));
  moves(Primitive::round, gradient + (program.wire ? size(*program.wire) : gradient));
  moves(Primitive::norm, sizeof(float));
  moves(Primitive::update, 7 * sizeof(float));
  auto const world = input.shards * input.replicas;
  add_collective(costs, hardware, Primitive::all_gather, Group::gather, {input.shards});
  add_collective(costs, hardware, Primitive::all_gather, Group::kept, {input.reshard_ranks});
  add_collective(costs, hardware, Primitive::reduce_scatter, Group::reduce, {input.shards});
  add_collective(costs, hardware, Primitive::all_reduce, Group::replicas, {input.replicas, input.shards});
  add_collective(costs, hardware, Primitive::all_reduce, Group::all_replicas, {world});
  if (hardware.shared_link) costs.link.fill(0);
  costs.link[static_cast<std::size_t>(Group::none)] = Costs::no_link;
  return costs;
}

namespace detail {

/// Joins spans: the result covers the same time without overlap, in order.
inline std::vector<TimeSpan> united(std::vector<TimeSpan> spans) {
  std::sort(spans.begin(), spans.end(), [](auto const& a, auto const& b) { return a.begin < b.begin; });
  std::vector<TimeSpan> all;
  for (auto const& span : spans) {
    if (span.end <= span.begin) continue;
    if (all.empty() || span.begin > all.back().end) {
      all.push_back(span);
    } else {
      all.back().end = std::max(all.back().end, span.end);
    }
  }
  return all;
}
/// Spans of a step between its beginning and its end, in an endless sequence of steps: work that a step begins before
/// the last step ends is begun that early by the next step too.
inline std::vector<TimeSpan> periodic(std::vector<TimeSpan> spans, double begin, double end) {
  auto const period = end - begin;
  for (std::size_t i = 0, size = spans.size(); i < size; ++i) {
    if (spans[i].begin >= begin) continue;
    spans.push_back({spans[i].begin + period, std::min(spans[i].end, begin) + period});
    spans[i].begin = begin;
  }
  return united(std::move(spans));
}
inline double length(std::vector<TimeSpan> const& spans) {
  double sum = 0;
  for (auto const& span : spans) sum += span.end - span.begin;
  return sum;
}

/// Feeds a run's operations to a simulator as they come, and keeps the spans of the last step.
class Timing {
 public:
  Timing(Program const& program, Costs const& costs) : simulator_(program, {costs}) {}

  void operator()(step::Operation const& operation, step::Position const& at, step::Contents const& contents) {
    auto next = step::executed(operation, at, contents);
    if (next.operation.beside && !waiting_.empty()) {
      simulator_.await(next.operation);
    } else {
      flush();
    }
    waiting_.push_back(next);
  }
  /// @return when everything so far has ended
  double flush() {
    for (auto const& next : waiting_) {
      simulator_.run(next);
      auto const span = simulator_.spans().back();
      end_ = std::max(end_, span.end);
      if (step::is_collective(next.operation.primitive)) collectives_.push_back(span);
      if (next.operation.stream == StreamKind::compute && step::moves(next.operation.primitive))
        computes_.push_back(span);
    }
    waiting_.clear();
    return end_;
  }
  /// Begins to measure.
  void restart() {
    flush();
    simulator_.forget_spans();
    collectives_.clear();
    computes_.clear();
  }
  std::vector<TimeSpan> const& collectives() const { return collectives_; }
  std::vector<TimeSpan> const& computes() const { return computes_; }

 private:
  Simulator simulator_;
  std::vector<step::Executed> waiting_;  ///< a computation, and its accesses to further units
  std::vector<TimeSpan> collectives_, computes_;
  double end_ = 0;
};

}  // namespace detail

/// Predicts from known costs, for example measured ones.
/// @param program  compiled from `input`
[[gnu::cold]] inline Forecast forecast(Program const& program, Workload const& load, Costs const& costs) {
  detail::Timing timing(program, costs);
  auto const visit = [&](auto const&... what) { timing(what...); };
  step::Run run(program, visit);
  run.prepare();
  double begin = 0, end = 0;
  for (int step = 0; step < 2; ++step) {
    timing.restart();
    begin = end;
    for (int micro = 0; micro < load.micro_steps; ++micro)
      run.micro_step({.gradient_sync = !load.no_sync || micro + 1 == load.micro_steps});
    if (load.clips) run.norm();
    run.update();
    end = timing.flush();
  }
  auto const computes = detail::periodic(timing.computes(), begin, end);
  auto const collectives = detail::periodic(timing.collectives(), begin, end);
  auto busy = computes;
  busy.insert(busy.end(), collectives.begin(), collectives.end());
  Forecast result;
  result.step = end - begin;
  result.compute = detail::length(computes);
  result.communication = detail::length(collectives);
  result.exposed = detail::length(detail::united(std::move(busy))) - result.compute;
  return result;
}
/// @param program  compiled from `input`
[[gnu::cold]] inline Forecast forecast(Program const& program, StepInput const& input, Workload const& load,
                                       Hardware const& hardware) {
  auto result = forecast(program, load, costs_on(hardware, program, input, load));
  result.step += hardware.step_overhead;
  auto const world = input.shards * input.replicas;
  for (int nodes = hardware.nodes(world); nodes > 1; nodes = (nodes + 1) / 2) result.step += hardware.jitter;
  if (load.clips && world > 1) {  // the norm's digits are summed over all ranks before the update
    auto const by = [&](Algorithm algorithm) {
      return collective_cost(hardware, step::Primitive::all_reduce, {world}, algorithm).fixed;
    };
    auto const sum = std::min(by(Algorithm::ring), by(Algorithm::tree));
    result.step += sum;
    result.communication += sum;
    result.exposed += sum;
  }
  return result;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
