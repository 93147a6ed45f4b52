// SPDX-License-Identifier: Apache-2.0
// Input of compile_program(), and the options that a backward pass lacks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// State that is kept in host memory: see [Note: Offloading].
struct Offloaded {
  bool moments = false, masters = false, gradients = false;
  bool any() const { return moments || masters || gradients; }
};

using StepUnit [[deprecated("write step::Unit")]] = step::Unit;

/// An order of uses besides the declared one: see [Note: Paths].
struct StepPath {
  std::string name;
  std::vector<std::size_t> uses;  ///< indices of uses in the declared order
  PrefetchLists prefetch{};       ///< by index in the path; empty: prefetch_by_depth of 1 and 1
};

/// Declarations and sizes from which a step is compiled. Equal on all ranks.
struct StepInput {
  std::vector<step::Unit> units;
  /// The unit of each use, in forward order; empty: one use for each unit with uses of its own, in order.
  std::vector<std::size_t> uses;
  std::vector<std::string> modules;  ///< name of each use, for texts; empty: numbers
  /// Uses of modules whose tensors are all frozen, whatever else their units have.
  std::vector<std::size_t> frozen_uses;
  /// For each use, the first use of its segment; UseOrder::none: it is in no segment; empty: no use is recomputed. See
  /// [Note: Segments].
  std::vector<std::size_t> segments{};
  int shards = 1;                        ///< ranks per shard group of units that shard
  int replicas = 1;                      ///< shard groups
  bool keep_last = true;                 ///< the last unit that would be dropped, because backward begins with it
  bool keep_root = true;                 ///< units that are used again after others, from the first forward use on
  PrefetchLists prefetch;                ///< of each use; empty: prefetch_by_depth of 1 and 1
  std::int64_t max_ahead_bytes = 0;      ///< cap on bytes gathered ahead; 0: none
  int reshard_ranks = 0;                 ///< ranks over which a unit stays sharded after forward; 0: `shards`
  bool allow_keep_unsharded = false;     ///< every unit keeps a gather buffer of its own
  bool allow_no_sync = false;            ///< micro-steps need not reduce
  bool allow_no_replica_sync = false;    ///< micro-steps need not all-reduce over replicas of shards
  bool allow_frozen_parameters = false;  ///< backward passes may write no gradients
  /// size of an all-reduce, where backward writes gradient shards; 0: one for each unit
  std::int64_t bucket_bytes = 0;
  std::int64_t first_bucket_bytes = 0;  ///< size of the first all-reduce
  Offloaded offload{};
  std::optional<DType> wire{};  ///< type that fp32 gradients are rounded to for the sum over ranks; not set: none
  detail::FixedArray<StepPath> paths{};
  /// Gives a unit that no backward pass of a step comes to a gradient of zeroes; false: it gets none.
  bool zeros_for_absent = false;
};

/// For each unit, whether neither it nor a unit beside it has parameters.
inline detail::FixedArray<bool> empty_units(StepInput const& input) {
  detail::FixedArray<bool> empty(input.units.size());
  for (auto& unit : empty) unit = true;
  for (std::size_t unit = 0; unit < empty.size(); ++unit) {
    if (input.units[unit].elements == 0) continue;
    empty[unit] = false;
    if (input.units[unit].first != step::Unit::none) empty[input.units[unit].first] = false;
  }
  return empty;
}

/// The option that a backward pass with these flags lacks: a member of EngineOptions, and the first unit that needs it.
/// Both are empty if none is missing.
struct MissingOption {
  std::string_view option{}, unit{};
};
inline MissingOption missing_option(Program const& program, StepInput const& input, BackwardFlags flags) {
  for (std::size_t u = 0; u < program.units.size(); ++u) {
    auto const& unit = program.units[u];
    if (!flags.gradient_sync && !unit.writes_shards && !input.allow_no_sync) return {"allow_no_sync", unit.name};
    if (!flags.replica_sync && !unit.writes_shards && unit.replicas > 1) {
      if (unit.sharded && !input.allow_no_replica_sync) return {"allow_no_replica_sync", unit.name};
      if (!unit.sharded && !input.allow_no_sync) return {"allow_no_sync", unit.name};
    }
    if (!flags.reshard && !unit.reads_masters && unit.in_backward && unit.reshards_after_forward &&
        !input.allow_keep_unsharded)
      return {"allow_keep_unsharded", unit.name};
  }
  return {};
}

/// Flags of all kinds of backward passes for which no option is missing.
class AllowedFlags {
 public:
  [[gnu::cold]] AllowedFlags(Program const& program, StepInput const& input) {
    for (auto const flags : every_backward_flags)
      if (missing_option(program, input, flags).option.empty()) list_[size_++] = flags;
  }
  BackwardFlags const* begin() const { return list_.data(); }
  BackwardFlags const* end() const { return list_.data() + size_; }

 private:
  std::array<BackwardFlags, every_backward_flags.size()> list_{};
  std::size_t size_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
