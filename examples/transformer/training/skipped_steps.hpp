// SPDX-License-Identifier: Apache-2.0
// Optimizer steps that changed nothing, because the gradients' norm was not finite.
#pragma once

#include <cmath>
#include <cstdint>

namespace transformer {

/// Counts skipped steps that follow each other. Not every step's norm is read where the device runs ahead of the host:
/// steps between two readings count if the optimizer has skipped all of them.
class SkippedSteps {
 public:
  /// Enters a reading.
  /// @param norm     of the last step
  /// @param steps    since the reading before, the last one too
  /// @param skipped  steps skipped since the process began; used if the norm is not finite
  void add(double norm, std::int64_t steps, std::int64_t skipped) {
    if (std::isfinite(norm)) {
      in_a_row_ = 0;
      skipped_ = unknown;
      return;
    }
    bool const all = skipped_ != unknown && skipped - skipped_ == steps;
    in_a_row_ = all ? in_a_row_ + steps : 1;
    skipped_ = skipped;
  }
  /// The last steps that were skipped, one after the other; 0: the last step was taken.
  std::int64_t in_a_row() const { return in_a_row_; }

 private:
  static constexpr std::int64_t unknown = -1;
  std::int64_t skipped_ = 0;  ///< at the last reading
  std::int64_t in_a_row_ = 0;
};

}  // namespace transformer
