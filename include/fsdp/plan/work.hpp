// SPDX-License-Identifier: Apache-2.0
// What a module computes, as far as a plan needs it.
#pragma once

#include <concepts>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

/// Work of a module's kernels in one pass of a micro-step.
struct Load {
  double flop = 0;   ///< of matrix products and attention
  double bytes = 0;  ///< that its other kernels move from and to memory
};
/// Work of one use.
struct Work {
  Load forward;
  Load backward;  ///< with what it computes again by itself, outside of segments
};

/// A module may say what it computes: `Work work() const`.
template <class M>
concept SaysWork = requires(M const& user_module) {
  { user_module.work() } -> std::convertible_to<Work>;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
