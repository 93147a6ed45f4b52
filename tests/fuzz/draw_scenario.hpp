// SPDX-License-Identifier: Apache-2.0
// Draws one of all scenarios.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/fuzz/differing.hpp"
#include "tests/fuzz/misusing.hpp"
#include "tests/fuzz/plans.hpp"
#include "tests/fuzz/throwing.hpp"

namespace fuzz {

/// Draws a scenario; equal seeds draw equal ones. @param ranks  0: drawn
inline Scenario draw_scenario(std::uint64_t seed, int ranks = 0) {
  struct Kind {
    int weight;
    void (*make)(Plans&);
  };
  static constexpr Kind kinds[] = {{1, [](Plans& run) { run.nothing(); }},
                                   {3, module_throws},
                                   {2, task_throws},
                                   {2, several},
                                   {1, caller_throws},
                                   {1, reader_throws},
                                   {1, memory_ends},
                                   {2, all_catch},
                                   {1, forward_again},
                                   {1, one_catches},
                                   {1, engine_afresh},
                                   {1, other_order},
                                   {1, wrong_call_caught},
                                   {1, call_in_module},
                                   {1, half_forward},
                                   {1, discard_in_pass},
                                   {1, half_backward},
                                   {1, barred_until_discard},
                                   {1, half_on_one_rank},
                                   {1, old_norm},
                                   {2, refused_calls},
                                   {2, other_declaration},
                                   {2, alone},
                                   {1, once_more},
                                   {1, returns_early}};
  Plans run(seed, ranks);
  int all = 0;
  for (auto const& kind : kinds) all += kind.weight;
  auto left = run.draw.between(1, all);
  for (auto const& kind : kinds) {
    left -= kind.weight;
    if (left > 0) continue;
    kind.make(run);
    break;
  }
  if (run.draw.once_in(4))
    for (auto& plan : run.made.ranks) plan.delay_us = run.draw.of({0, 100, 400});
  return std::move(run.made);
}

}  // namespace fuzz
