// SPDX-License-Identifier: Apache-2.0
// Describes the units of a step, and where a backward pass of each path comes to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/step/path_plan.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/use_order.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Knows units and uses, path by path.
class UnitPlanner {
 public:
  [[gnu::cold, gnu::noinline]] explicit UnitPlanner(StepInput const& input)
      : input_(input), paths_(1 + input.paths.size()), path_(&paths_[0]) {
    auto& declared = paths_[0].order;
    for (std::size_t unit = 0; input.uses.empty() && unit < input.units.size(); ++unit)
      if (input.units[unit].beside == StepUnit::none) declared.declare(unit, "");
    for (auto const unit : input.uses) declared.declare(unit, "");
    for (std::size_t use = 0; use < input.segments.size(); ++use) declared.set_segment(use, input.segments[use]);
    for (std::size_t path = 0; path < input.paths.size(); ++path)
      paths_[path + 1].order = UseOrder(declared, input.paths[path].name, input.paths[path].uses);
  }
  UnitPlanner(UnitPlanner const&) = delete;

 protected:
  /// Call it first.
  [[gnu::cold]] void describe() {
    frozen_ = FixedArray<bool>(paths_[0].order.size());
    for (auto const use : input_.frozen_uses) frozen_[use] = true;
    describe_units();
    for_each_path([this] { find_backward_end(); });
    give_scratch();
  }

  /// Consecutive units of a list.
  struct Together {
    std::uint32_t const *first, *last;
    std::uint32_t const* begin() const { return first; }
    std::uint32_t const* end() const { return last; }
  };
  /// Calls `act()` for each path, which path_ is then; after that it is the declared order.
  template <class Act>
  void for_each_path(Act const& act) {
    for (auto& path : paths_) {
      path_ = &path;
      act();
    }
    path_ = &paths_[0];
  }
  // Answers about units and uses, in the path of path_.
  UseOrder const& order() const { return path_->order; }
  bool in_backward(std::size_t unit) const { return path_->in_backward[unit]; }
  bool gathers(std::size_t unit) const { return !program_.units[unit].reads_masters; }
  /// The unit whose uses are the unit's.
  std::size_t first_unit(std::size_t unit) const {
    auto const beside = input_.units[unit].beside;
    return beside == StepUnit::none ? unit : beside;
  }
  /// The units of a use: the first, then those beside it.
  Together units_of(std::size_t use) const { return beside(order().unit(use)); }
  /// A unit that has uses of its own, then those beside it.
  Together beside(std::size_t first) const {
    return {together_.begin() + begins_[first], together_.begin() + begins_[first + 1]};
  }
  /// Whether gradients of some units wait is no property of a micro-step, but of each unit: see step::Given.
  bool waits_by_unit() const { return paths_.size() > 1; }
  bool writes_fp32(std::size_t unit) const { return program_.units[unit].types.gradient == DType::f32; }

  StepInput const& input_;
  FixedArray<PathPlan> paths_;  ///< the declared order comes first
  PathPlan* path_;              ///< that is planned or compiled
  Program program_;
  FixedArray<std::uint32_t> together_;  ///< units that have uses of their own, each before those beside it
  FixedArray<std::size_t> begins_;      ///< by unit: where it is there; one more for the end

 private:
  [[gnu::cold]] void describe_units() {
    auto& p = program_;
    for (std::size_t use = 0; use < order().size(); ++use)
      p.modules.push_back(input_.modules.empty() ? std::to_string(use) : input_.modules[use]);
    p.units = FixedArray<Program::Unit>(input_.units.size());
    begins_ = FixedArray<std::size_t>(p.units.size() + 1);
    for (std::uint32_t u = 0; u < p.units.size(); ++u) ++begins_[first_unit(u) + 1];
    for (std::uint32_t u = 0; u < p.units.size(); ++u) begins_[u + 1] += begins_[u];
    together_ = FixedArray<std::uint32_t>(p.units.size());
    auto next = begins_;
    for (bool const beside : {false, true})
      for (std::uint32_t u = 0; u < p.units.size(); ++u)
        if (beside == (first_unit(u) != u)) together_[next[first_unit(u)]++] = u;
    for (std::size_t u = 0; u < p.units.size(); ++u) {
      auto const& declared = input_.units[u];
      auto& unit = p.units[u];
      unit.types = declared.types;
      unit.name = declared.name.empty() ? std::to_string(u) : declared.name;
      unit.elements = declared.elements;
      unit.sets_gradients = declared.sets_gradients;
      unit.hooked = declared.hooked;
      unit.frozen = declared.frozen;
      unit.shards = declared.shards ? input_.shards : 1;
      unit.replicas = input_.shards * input_.replicas / unit.shards;
      unit.reads_masters = unit.empty() || (unit.shards == 1 && unit.types.parameter == unit.types.master);
      unit.writes_shards = !unit.trains() || (unit.shards == 1 && writes_fp32(u) && !input_.offload.gradients);
      unit.waits_for_replicas =
          declared.shards && unit.replicas > 1 && !unit.writes_shards && input_.allow_no_replica_sync;
      unit.accumulates = input_.allow_no_sync && !writes_fp32(u) && !unit.writes_shards;
      if (unit.accumulates) p.accumulator_elements += unit.elements;
    }
  }

  /// The lowest use of a module that trains; 0 if nothing below it is frozen. If none trains, backward has no use.
  [[gnu::cold]] void find_backward_end() {
    auto& p = program_;
    auto& path = *path_;
    bool some_frozen = false;
    std::size_t end = 0;
    for (; end < order().size(); ++end) {
      bool trains = false;
      for (auto const u : units_of(end)) {
        trains = trains || p.units[u].trains();
        some_frozen = some_frozen || p.units[u].frozen;
      }
      some_frozen = some_frozen || is_frozen(end);
      if (trains && !is_frozen(end)) break;
    }
    if (!some_frozen) end = 0;
    path.order.set_backward_end(end);
    path.in_backward = path.writes = path.keeps_slice = path.sets_gradients = FixedArray<bool>(p.units.size());
    for (auto use = end; use < order().size(); ++use)
      for (auto const u : units_of(use)) {
        path.in_backward[u] = true;
        path.writes[u] = path.writes[u] || (p.units[u].trains() && !is_frozen(use));
      }
    auto const lacks = lacking_units(end);
    for (std::size_t u = 0; u < p.units.size(); ++u)
      path.sets_gradients[u] = p.units[u].sets_gradients && !lacks[first_unit(u)];
    if (end < order().size() && order().segment(end) != UseOrder::none)
      for (auto use = order().segment(end); use < end; ++use)
        for (auto const u : units_of(use)) path.in_backward[u] = true;
  }
  /// The use of the path is one of a module whose tensors are all frozen.
  bool is_frozen(std::size_t use) const { return frozen_[order().declared(use)]; }
  /// @param end  the use that ends a backward pass of the path
  /// @return by unit: whether such a pass leaves out a use whose module has tensors that train
  [[gnu::cold]] FixedArray<bool> lacking_units(std::size_t end) const {
    FixedArray<bool> lacks(program_.units.size());
    if (path_ == &paths_[0]) return lacks;
    auto const& declared = paths_[0].order;
    auto done = frozen_;
    for (auto at = end; at < order().size(); ++at) done[order().declared(at)] = true;
    for (std::size_t use = 0; use < declared.size(); ++use)
      if (!done[use]) lacks[declared.unit(use)] = true;
    return lacks;
  }
  /// For gradients that modules write although they are not wanted, in uses in backward passes.
  [[gnu::cold]] void give_scratch() {
    auto& p = program_;
    for (std::size_t u = 0; u < p.units.size(); ++u) {
      bool in_backward = false, used_in_backward = false;
      for (auto const& path : paths_) {
        in_backward = in_backward || path.in_backward[u];
        auto const last = path.order.last_use(first_unit(u));
        used_in_backward = used_in_backward || (last != UseOrder::none && last >= path.order.backward_end());
      }
      p.units[u].in_backward = in_backward;
      if (!input_.units[u].skips_gradients &&
          ((p.units[u].frozen && used_in_backward) || input_.allow_frozen_parameters))
        p.scratch_bytes = std::max(p.scratch_bytes, align_up(p.units[u].gradient_bytes(p.units[u].elements), 256));
    }
  }

  FixedArray<bool> frozen_;  ///< by declared use: all tensors of its module are frozen
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
