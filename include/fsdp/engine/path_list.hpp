// SPDX-License-Identifier: Apache-2.0
// Interface of an engine's paths. Engines without paths compile no more than this.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/fixed_array.hpp"
#include "fsdp/step/step_input.hpp"
#include "fsdp/step/use_order.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Orders of uses besides the declared one. They count from 1: path 0 is the declared order.
class PathList {
 public:
  virtual ~PathList() = default;
  /// Number of paths, the declared order among them.
  virtual std::size_t size() const = 0;
  /// @throws UsageError if a path has a part of some segment of `declared`
  virtual void expect_segments(UseOrder const& declared) const = 0;
  /// Describes each path in a line: equal on all ranks.
  virtual std::string text(UseOrder const& declared) const = 0;
  /// Paths for the compiler. They gather ahead by depth.
  virtual FixedArray<StepPath> plan(UseOrder const& declared, int forward, int backward,
                                    FixedArray<bool> const& empty) const = 0;
  /// Gives paths the declared order's prefetch lists, as far as a path has these uses: at each use of `at`, the next
  /// use of each of `ahead`.
  virtual void set_prefetch(FixedArray<StepPath>& paths, bool in_forward, std::size_t at,
                            std::vector<std::size_t> const& ahead) const = 0;
  /// Records that the engine is sealed: paths keep their places.
  virtual void seal() = 0;
  /// The path's name in histories. @pre sealed
  virtual std::string_view label(std::size_t path) const = 0;
};

/// Adds a path to a declaration.
template <class Declaration>
struct PathAdder;  // fsdp/paths.hpp

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
