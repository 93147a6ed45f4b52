// SPDX-License-Identifier: Apache-2.0
// The work of a module, for plans.
#pragma once

#include <concepts>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

/// Work of a module's kernels in one pass of a micro-step.
struct Load {
  double flop = 0;   ///< of matrix products and attention
  double bytes = 0;  ///< moved from and to memory by its other kernels
};
/// Work of one use.
struct Work {
  Load forward;
  Load backward;  ///< with its own recomputation, outside of segments
};

/// A module that reports its work: `Work work() const`.
template <class M>
concept SaysWork = requires(M const& user_module) {
  { user_module.work() } -> std::convertible_to<Work>;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
