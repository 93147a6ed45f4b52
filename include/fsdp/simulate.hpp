// SPDX-License-Identifier: Apache-2.0
// Simulates a run: computes begin and end of each operation from the costs of primitives.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Time of one operation, in any unit.
struct Cost {
  double fixed = 0,  ///< time that every operation takes
      per_byte = 0;  ///< more time for each of Operation::bytes
  /// cost for each of Operation::elements, for primitives whose moved bytes are not the written ones
  double per_element = 0;

  /// Time of the operation.
  double of(step::Operation const& operation) const {
    return fixed + per_byte * static_cast<double>(operation.bytes) +
           per_element * static_cast<double>(operation.elements);
  }
};
/// Time of a collective of a group, by one algorithm.
struct CollectiveCost {
  step::Primitive primitive{};  ///< all_gather, reduce_scatter or all_reduce
  step::Group group{};          ///< ranks that take part
  Cost cost;                    ///< time, without Costs::factor
};
/// Cost of each primitive. Collectives of a group take `factor` times as long, because groups within a node are faster
/// than others.
struct Costs {
  static constexpr std::size_t no_link = step::groups;  ///< value in `link`: nothing else uses the group's link
  /// An array of so many equal values.
  template <std::size_t N, class T>
  static constexpr std::array<T, N> filled(T value) {
    std::array<T, N> all{};
    all.fill(value);
    return all;
  }

  std::array<Cost, step::primitives> primitive{};  ///< cost of each, by step::Primitive
  /// Costs of collectives by several algorithms: the fastest entry replaces the primitive's cost.
  std::vector<CollectiveCost> collectives{};
  /// By group: index of the link that its collectives use, below step::groups; no_link: nothing else uses it. See
  /// [Note: Shared links].
  std::array<std::size_t, step::groups> link = filled<step::groups>(no_link);
  std::array<double, step::groups> factor = filled<step::groups>(1.0);  ///< by group: multiplies times of collectives
  /// Times of modules' kernels by pass and use, in the order of declaration: a trace contains them. One for each use,
  /// or none: the primitive's cost. A use that is recomputed takes its time of a forward pass.
  std::array<std::vector<double>, pass_kinds.size()> modules{};

  Cost& operator[](step::Primitive which) { return primitive[static_cast<std::size_t>(which)]; }  ///< cost of `which`
  double& operator[](step::Group which) { return factor[static_cast<std::size_t>(which)]; }       ///< factor of a group
  /// Times of modules' kernels in passes of a kind, by use; empty: the primitive's cost.
  std::vector<double>& operator[](PassKind kind) { return modules[static_cast<std::size_t>(kind)]; }
  /// Time of an operation at a place of the run. @throws UsageError if `modules` has too few times for the use
  double of(step::Operation const& operation, step::RunPosition const& at) const {
    if (operation.beside) return 0;  // its module's first operation has the cost
    bool const again = operation.primitive == step::Primitive::recompute;
    auto const& module = modules[static_cast<std::size_t>(again ? PassKind::forward : at.kind)];
    if (computes(operation.primitive) && !module.empty()) {
      FSDP_EXPECTS(
          at.use < module.size(),
          "simulate: got times of {} modules for {}, but the program has use {}; give one for each use, or none",
          module.size(), name(at.kind), at.use);
      return module[at.use];
    }
    return fastest(operation).of(operation) * factor[static_cast<std::size_t>(operation.group)];
  }
  /// The part of the cost in which a collective occupies its link: all but the fixed part.
  double on_link(step::Operation const& operation) const {
    if (link[static_cast<std::size_t>(operation.group)] == no_link) return 0;
    auto cost = fastest(operation);
    cost.fixed = 0;
    return cost.of(operation) * factor[static_cast<std::size_t>(operation.group)];
  }

 private:
  Cost const& fastest(step::Operation const& operation) const {
    auto const* best = &primitive[static_cast<std::size_t>(operation.primitive)];
    bool found = false;
    for (auto const& entry : collectives) {
      if (entry.primitive != operation.primitive || entry.group != operation.group) continue;
      if (!found || entry.cost.of(operation) < best->of(operation)) best = &entry.cost;
      found = true;
    }
    return *best;
  }
};

/// [Note: Shared links] Collectives that overlap may use one link: a gather and a reduction of the same ranks. They
/// share its bandwidth, but not their fixed costs, which are latencies. The link serves them in the order in which they
/// are enqueued: a later one takes the time that earlier ones leave free. So the link is never idle while a collective
/// needs it, and the sum of the times is right whoever is served first.
class SharedLink {
 public:
  /// Takes `seconds` of free time from `begin` on. @return the time at which they end
  double take(double begin, double seconds) {
    if (seconds <= 0) return begin;
    auto first = busy_.size();  // of the spans that end after `begin`
    while (first > 0 && busy_[first - 1].end >= begin) --first;
    auto last = first;
    auto end = begin + seconds;
    if (last < busy_.size() && busy_[last].begin <= begin) end = busy_[last++].end + seconds;
    for (; last < busy_.size() && busy_[last].begin <= end; ++last) end += busy_[last].end - busy_[last].begin;
    auto const from = last > first ? std::min(begin, busy_[first].begin) : begin;
    busy_.erase(busy_.begin() + static_cast<std::ptrdiff_t>(first), busy_.begin() + static_cast<std::ptrdiff_t>(last));
    busy_.insert(busy_.begin() + static_cast<std::ptrdiff_t>(first), {from, end});
    return end;
  }

 private:
  struct Busy {
    double begin, end;
  };
  std::vector<Busy> busy_;  ///< in order; they do not touch
};

/// Begin and end of an operation, in the unit of the costs; the run begins at 0.
struct TimeSpan {
  double begin = 0,  ///< when the operation begins
      end = 0;       ///< when the operation has ended
};

/// Times the operations of several ranks. A stream runs its operations in order. An operation begins after the last
/// write of each cell that it accesses. If it writes, it also begins after all reads since then, including peers'
/// reads. A collective begins when all members can begin it, and ends on each member after that rank's cost. The host
/// takes no time.
class Simulator {
 public:
  /// @param ranks  costs of each rank of the world; one stands for ranks that are equal
  Simulator(Program const& program, std::vector<Costs> const& ranks) {
    for (auto const& costs : ranks) ranks_.push_back({costs, step::PerCell<Ends>(program.buffers), {}, {}, {}});
  }

  /// Adds a unit that the next module's kernels wait for too.
  void await(step::Operation const& beside) {
    for (auto& rank : ranks_) rank.streams[static_cast<std::size_t>(beside.stream)] = begin(rank, beside).begin;
  }
  /// Enqueues an operation on all ranks, behind those so far, and computes its spans.
  void run(step::Executed const& executed) {
    auto const& operation = executed.operation;
    for (auto& rank : ranks_) rank.spans.push_back(begin(rank, operation));
    if (is_collective(operation.primitive)) meet(operation);
    for (auto& rank : ranks_) end(rank, operation, rank.costs.of(operation, executed.at));
    if (!is_collective(operation.primitive)) return;
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      for (auto const& access : operation.accesses())
        if (peers_read(operation.primitive, access))
          for (auto& cell : ranks_[i].cells[access.cells]) cell.read = std::max(cell.read, last_end(operation, i));
  }
  /// Begin and end of each operation so far.
  std::vector<TimeSpan> const& spans(std::size_t rank = 0) const { return ranks_[rank].spans; }
  /// Forgets the spans so far; later operations wait for them as before.
  void forget_spans() {
    for (auto& rank : ranks_) rank.spans.clear();
  }

 private:
  /// End times of the accesses to a cell so far.
  struct Ends {
    double write = 0;
    double read = 0;  ///< by this rank and by peers
  };
  struct Rank {
    Costs costs;
    step::PerCell<Ends> cells;
    std::array<double, stream_kinds> streams;  ///< when the last operation ends
    std::array<SharedLink, step::groups> links;
    std::vector<TimeSpan> spans;
  };

  static TimeSpan begin(Rank& rank, step::Operation const& operation) {
    auto begin = rank.streams[static_cast<std::size_t>(operation.stream)];
    if (is_ordered(operation.primitive))
      for (auto const& access : operation.accesses())
        for (auto const& cell : rank.cells[access.cells])
          begin = std::max(begin, access.mode == step::Mode::read ? cell.write : std::max(cell.write, cell.read));
    return {begin, begin};
  }
  static void end(Rank& rank, step::Operation const& operation, double cost) {
    auto& span = rank.spans.back();
    span.end = span.begin + cost;
    if (auto const taken = is_collective(operation.primitive) ? rank.costs.on_link(operation) : 0; taken > 0)
      span.end = rank.links[rank.costs.link[static_cast<std::size_t>(operation.group)]].take(span.end - taken, taken);
    if (!is_ordered(operation.primitive)) return;
    rank.streams[static_cast<std::size_t>(operation.stream)] = span.end;
    for (auto const& access : operation.accesses())
      for (auto& cell : rank.cells[access.cells]) {
        auto& last = access.mode == step::Mode::read ? cell.read : cell.write;
        last = std::max(last, span.end);
      }
  }
  /// Begins a collective on its members together.
  void meet(step::Operation const& operation) {
    std::vector<double> begins;
    for (auto const& rank : ranks_) begins.push_back(rank.spans.back().begin);
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      for (std::size_t j = 0; j < ranks_.size(); ++j)
        if (share_group(operation, i, j))
          ranks_[i].spans.back().begin = std::max(ranks_[i].spans.back().begin, begins[j]);
  }
  /// The latest end among the members of a rank's group.
  double last_end(step::Operation const& operation, std::size_t rank) const {
    double end = 0;
    for (std::size_t other = 0; other < ranks_.size(); ++other)
      if (share_group(operation, rank, other)) end = std::max(end, ranks_[other].spans.back().end);
    return end;
  }
  /// Whether two ranks share a group: shard groups are consecutive ranks, replicas have equal places in them (see
  /// Placement).
  bool share_group(step::Operation const& operation, std::size_t rank, std::size_t other) const {
    auto const members = static_cast<std::size_t>(operation.ranks);
    auto const number = std::max<std::size_t>(ranks_.size() / members, 1);
    switch (operation.group) {
      case step::Group::gather:
      case step::Group::kept:
      case step::Group::reduce: return rank / members == other / members;
      case step::Group::replicas: return rank % number == other % number;
      case step::Group::all_replicas:
      case step::Group::none:
      case step::Group::count_: return true;
    }
    return true;
  }

  std::vector<Rank> ranks_;
};

/// A simulated run.
struct Simulation {
  std::vector<step::Executed> operations;    ///< in the order in which they are enqueued; equal on all ranks
  std::vector<std::vector<TimeSpan>> spans;  ///< by rank: span of each operation

  /// The end of the last operation for which `is(Operation const&, RunPosition const&)` is true.
  template <class Is>
  double end_if(Is const& is, std::size_t rank = 0) const {
    double end = 0;
    for (std::size_t i = 0; i < operations.size(); ++i)
      if (is(operations[i].operation, operations[i].at)) end = std::max(end, spans[rank][i].end);
    return end;
  }
  /// The end of the last operation.
  double end(std::size_t rank = 0) const {
    return end_if([](auto const&, auto const&) { return true; }, rank);
  }
  /// The end of the last operation of a primitive in a step.
  double end_of(step::Primitive primitive, std::uint32_t step = 0, std::size_t rank = 0) const {
    return end_if([&](step::Operation const& operation,
                      step::RunPosition const& at) { return operation.primitive == primitive && at.step == step; },
                  rank);
  }
};

/// Simulates operations of a run: see step::record_into.
/// @param ranks  see Simulator
[[gnu::cold]] inline Simulation simulate(Program const& program, std::vector<step::Executed> operations,
                                         std::vector<Costs> const& ranks) {
  Simulator simulator(program, ranks);
  for (std::size_t i = 0; i < operations.size(); ++i) {
    for (auto next = i + 1;
         computes(operations[i].operation.primitive) && next < operations.size() && operations[next].operation.beside;
         ++next)
      simulator.await(operations[next].operation);
    simulator.run(operations[i]);
  }
  Simulation simulation{std::move(operations), {}};
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) simulation.spans.push_back(simulator.spans(rank));
  return simulation;
}
/// Simulates steps of one micro-step each, with updates.
[[gnu::cold]] inline Simulation simulate(Program const& program, Costs const& costs, int steps = 1) {
  std::vector<step::Executed> operations;
  step::Run run(program, step::record_into(operations));
  for (int step = 0; step < steps; ++step) {
    run.micro_step();
    run.update();
  }
  return simulate(program, std::move(operations), std::vector{costs});
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
