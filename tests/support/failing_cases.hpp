// SPDX-License-Identifier: Apache-2.0
// The cases of failing_step.hpp as a table: over threads and processes the same ones.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "tests/support/all_pairs.hpp"
#include "tests/support/failing_step.hpp"

namespace failing {

struct Place {
  std::string_view phase, stream;
};
inline constexpr std::array places{Place{"forward", "compute"},   Place{"forward", "gather"},
                                   Place{"backward", "compute"},  Place{"backward", "gather"},
                                   Place{"backward", "reduce"},   Place{"backward", "replicate"},
                                   Place{"optimizer", "compute"}, Place{"norm", "compute"}};

/// Strategies, places, places among the tasks, steps, endings, and whether gradients are clipped.
inline fsdp::testing::Axes axes() { return {5, places.size(), 3, 4, 4, 2}; }

/// @param ranks  of the run. Groups of hybrid sharding have two ranks, or all of an odd number
inline Case case_of(fsdp::testing::TableRow const& row, int ranks) {
  Case planned;
  int const group = ranks % 2 == 0 ? 2 : ranks;
  switch (row[0]) {
    case 0: planned.strategy = fsdp::FullShard{}; break;
    case 1: planned.strategy = fsdp::ShardGradOp{}; break;
    case 2: planned.strategy = fsdp::HybridShard<>{.group = group}; break;
    case 3: planned.strategy = fsdp::HybridShard<fsdp::ShardGradOp>{.group = group}; break;
    default: planned.strategy = fsdp::NoShard{}; break;
  }
  planned.phase = places[row[1]].phase;
  planned.stream = places[row[1]].stream;
  planned.place = static_cast<int>(row[2]);
  planned.step = Case::steps - 4 + static_cast<int>(row[3]);
  planned.ending = static_cast<Ending>(row[4]);
  planned.clips = row[5] == 1 || planned.phase == "norm";
  planned.rank = static_cast<int>(row[2] + row[3]) % ranks;
  return planned;
}

inline std::string text_of(Case const& planned) {
  return fsdp::formatted("{}, {} on {}, place {}, step {}, ending {}, clips {}", planned.strategy.name, planned.phase,
                         planned.stream, planned.place, planned.step, static_cast<int>(planned.ending), planned.clips);
}

}  // namespace failing
