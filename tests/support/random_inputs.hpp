// SPDX-License-Identifier: Apache-2.0
// Declarations of steps at random, equal on all platforms: no two numbers are drawn in one expression whose order a
// compiler may choose.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/input.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "tests/support/step_inputs.hpp"

namespace fsdp::testing {

/// Segments whose units have no use outside them.
inline void segments_at_random(StepInput& input, std::mt19937& random) {
  auto const& uses = input.uses;
  std::vector<std::pair<std::size_t, std::size_t>> segments;
  for (std::size_t first = 0; first < uses.size();) {
    auto const last = std::min(first + random() % 4, uses.size() - 1);
    bool whole = random() % 4 > 0;
    for (std::size_t use = 0; use < uses.size(); ++use)
      whole = whole && ((first <= use && use <= last) ||
                        std::find(uses.begin() + static_cast<std::ptrdiff_t>(first),
                                  uses.begin() + static_cast<std::ptrdiff_t>(last) + 1,
                                  uses[use]) == uses.begin() + static_cast<std::ptrdiff_t>(last) + 1);
    if (whole) segments.emplace_back(first, last);
    first = whole ? last + 1 : first + 1;
  }
  input = with_segments(std::move(input), segments);
}

/// As an engine declares what lies in host memory.
inline StepInput offloading(StepInput input, Offloaded const& what) {
  input.offload = what;
  for (auto& unit : input.units) {
    unit.offloads_masters = what.masters && !unit.frozen && unit.types.parameter != unit.types.master;
  }
  return input;
}

/// A declaration of at most `most_units` units, without paths.
inline StepInput input_at_random(std::mt19937& random, unsigned most_units = 6) {
  auto const below = [&](unsigned n) { return static_cast<int>(random() % n); };
  int const units = 1 + below(most_units), shards = 1 << below(3), replicas = 1 << below(2);
  auto input = equal_units(units, shards, replicas);
  for (auto& unit : input.units) {
    unit.elements = 256 * below(5);
    unit.sharded = below(4) > 0;
    unit.reshards_after_forward = unit.sharded && below(4) > 0;
    unit.hooked = below(3) == 0;
  }
  input.units.front().elements = 512;
  auto const firsts = [&] {
    return input.uses[static_cast<std::size_t>(below(static_cast<unsigned>(input.uses.size())))];
  };
  if (below(2) == 0) {  // modules of several units, and frozen units
    for (std::size_t u = 1; u < input.units.size(); ++u) {
      auto& unit = input.units[u];
      unit.frozen = below(3) == 0, unit.skips_gradients = below(2) == 0;
      if (below(3) == 0) continue;
      std::erase(input.uses, u);
      do {
        unit.first = static_cast<std::uint32_t>(firsts());
      } while (unit.first > u);
    }
  }
  for (int more = below(3); more > 0; --more) {
    auto const at = below(static_cast<unsigned>(input.uses.size()));
    auto const unit = firsts();
    input.uses.insert(input.uses.begin() + at, unit);
  }
  if (below(3) == 0)  // modules that train nothing, in units that others train
    for (std::size_t use = 0; use < input.uses.size(); ++use) {
      auto const later = input.uses.begin() + static_cast<std::ptrdiff_t>(use) + 1;
      bool const again = std::find(later, input.uses.end(), input.uses[use]) != input.uses.end();
      if (again && below(2) == 0) input.frozen_uses.push_back(use);
    }
  if (below(2) == 0) segments_at_random(input, random);
  input.keep_last = below(3) > 0;
  input.keep_root = below(3) > 0;
  int const forward = below(4), backward = below(4);
  input = with_prefetch(std::move(input), forward, backward);
  if (below(3) == 0) input.max_ahead_bytes = 1024 * (1 + below(12));
  input.allow_keep_unsharded = below(4) == 0;
  if (input.shards == 4 && !input.allow_keep_unsharded && below(2) == 0) input.reshard_ranks = 2;
  input.allow_no_sync = below(2) == 0;
  input.allow_no_replica_sync = below(2) == 0;
  input.bucket_bytes = 1024 * below(4);
  input.first_bucket_bytes = 512;
  ElementTypes types;
  if (below(2) == 1) types.parameter = DType::bf16;
  if (below(2) == 1) types.gradient = DType::bf16;
  set_types(input, types);
  if (below(3) == 0)  // some are fp32
    for (auto& unit : input.units)
      if (below(2) == 0) unit.types = {};
  if (types.gradient == DType::f32 && below(2) == 0) input.wire = DType::bf16;
  if (below(2) == 0) return input;
  return offloading(std::move(input), {below(2) == 0, below(2) == 0, below(2) == 0});
}

/// Lists of uses that are gathered ahead, in any order: a later one may come before an earlier one.
inline void lists_at_random(PrefetchLists& lists, std::mt19937& random) {
  for (std::size_t use = 0; use < lists.forward.size(); ++use) {
    auto const later = lists.forward.size() - use - 1;
    lists.forward[use].clear(), lists.backward[use].clear();
    for (auto more = later > 0 ? random() % 3 : 0; more > 0; --more)
      lists.forward[use].push_back(use + 1 + random() % later);
    for (auto more = use > 0 ? random() % 3 : 0; more > 0; --more) lists.backward[use].push_back(random() % use);
  }
}

/// The same with names of modules, with up to two further paths, with lists of uses that are gathered ahead, and with
/// the options that concern gradients which are not wanted.
inline StepInput input_with_paths_at_random(std::mt19937& random, unsigned most_units) {
  auto input = input_at_random(random, most_units);
  input.allow_frozen_parameters = random() % 4 == 0;
  input.zeros_for_absent = random() % 2 == 0;
  for (auto& unit : input.units) unit.sets_gradients = random() % 2 == 0, unit.padded = random() % 2 == 0;
  for (std::size_t use = 0; use < input.uses.size(); ++use) input.modules.push_back("m" + std::to_string(use));
  if (random() % 4 == 0) lists_at_random(input.prefetch, random);
  UseOrder declared;
  for (auto const unit : input.uses) declared.declare(unit, "");
  for (std::size_t use = 0; use < input.segments.size(); ++use) declared.set_segment(use, input.segments[use]);
  input.paths = detail::FixedArray<StepPath>(random() % 3);
  for (auto& path : input.paths) {
    path.name = "path";
    for (auto more = 1 + random() % (2 * input.uses.size()); more > 0; --more) {
      auto const use = random() % input.uses.size();
      auto const segment = input.segments.empty() ? UseOrder::none : input.segments[use];
      if (segment == UseOrder::none) path.uses.push_back(use);
      for (auto at = segment; at < input.segments.size() && input.segments[at] == segment; ++at)  // all of it
        path.uses.push_back(at);
    }
    if (random() % 2 == 0) continue;
    auto const forward = static_cast<int>(random() % 4), backward = static_cast<int>(random() % 4);
    path.prefetch = prefetch_by_depth(UseOrder(declared, path.name, path.uses), forward, backward);
    if (random() % 2 == 0) lists_at_random(path.prefetch, random);
  }
  return input;
}

}  // namespace fsdp::testing
