// SPDX-License-Identifier: Apache-2.0
// Uses of each unit in backward passes, by path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "fsdp/step/program.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::step {

/// Number of terms that a backward pass adds to the gradients of a unit. It depends on the pass's path.
class BackwardUses {
 public:
  [[gnu::cold]] explicit BackwardUses(Program const& program) : units_(program.units.size()) {
    for (std::size_t path = 0; path < program.paths(); ++path) {
      places_.resize(places_.size() + units_);
      for (auto const& turn : program.turns(Phase::backward, path)) {
        if (turn.recomputes()) continue;
        of(path, turn.unit).insert(turn.place);
        for (auto const& operation : turn.beside) of(path, operation.unit).insert(turn.place);
      }
    }
  }
  /// Records the path of a micro-step.
  void begin(std::uint32_t micro_step, std::uint32_t path) { paths_[micro_step] = path; }
  /// Number of uses of the unit in the backward pass of a micro-step that has begun.
  std::size_t count(std::uint32_t micro_step, std::uint32_t unit) const {
    auto const path = paths_.find(micro_step);
    return path == paths_.end() ? 0 : places_[path->second * units_ + unit].size();
  }

 private:
  std::set<std::uint32_t>& of(std::size_t path, std::uint32_t unit) { return places_[path * units_ + unit]; }

  std::size_t units_;
  std::vector<std::set<std::uint32_t>> places_;   ///< by path and unit: places of its uses
  std::map<std::uint32_t, std::uint32_t> paths_;  ///< path of each micro-step
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::step
