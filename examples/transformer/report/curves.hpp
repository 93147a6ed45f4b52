// SPDX-License-Identifier: Apache-2.0
// Selects the curves of runs to draw, and computes a run's figures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transformer/report/chart.hpp"
#include "transformer/report/log_reader.hpp"

namespace transformer::report {

/// The classes of a run's colour: six colours, then the same ones dashed.
std::string colour_of(std::size_t run);

/// One run: training losses, their mean, and validation losses, each with its name. Several: a colour for each run.
Chart loss_chart(std::vector<Run const*> const& runs);
/// The gradients' norm before clipping.
Chart norm_chart(std::vector<Run const*> const& runs);
Chart learning_rate_chart(std::vector<Run const*> const& runs);
Chart speed_chart(std::vector<Run const*> const& runs);

/// A run in numbers; NaN where there is nothing to say.
struct Figures {
  double best_val = unknown;
  std::int64_t best_at = 0;
  double last_train = unknown;
  std::int64_t last_train_at = 0;                                             ///< the iteration that it is of
  std::int64_t last = 0;                                                      ///< the last iteration
  double tokens_per_second = unknown, milliseconds = unknown, mfu = unknown;  ///< medians
  std::int64_t memory = 0;  ///< largest of the ranks in all starts, bytes; 0: not told
};
Figures figures_of(Run const& run);

}  // namespace transformer::report
