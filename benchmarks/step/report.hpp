// SPDX-License-Identifier: Apache-2.0
// Figures of the step benchmark, and their tables. Its translation unit is never nvcc's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "classes.hpp"
#include "needs.hpp"
#include "profiled_device.hpp"
#include "roof.hpp"
#include "settings.hpp"

namespace bench {

/// A step, timed and profiled. Times are of one optimizer step.
struct StepFigures {
  std::string device;
  std::int64_t parameters = 0;
  double seconds = 0;         ///< mean over the timed steps, between two moments at which the device was idle
  double median_seconds = 0;  ///< median of single steps, between marks on the compute stream
  double flop = 0;            ///< model FLOP: 6 N + 12 L H Q T a token
  double loss = 0;            ///< of the last step
  std::int64_t account_bytes = 0;
  std::int64_t peak_bytes = 0;      ///< CUDA: of the device, in use by all; host: largest resident set of the process
  double profiled_seconds = 0;      ///< of a profiled step; 0: none was
  std::int64_t lost = 0;            ///< launches that the profile had no room for
  std::vector<KernelTime> kernels;  ///< sums over the profiled steps
  std::array<Need, class_count> needs{};
};

/// A kernel alone.
struct KernelFigures {
  std::string kernel;
  double seconds = 0;
  double bytes = 0;  ///< that it must move at least
  double flop = 0;
};

/// Prints the step's figures, and writes them to --json.
/// @throws fsdp::ResourceError if the file cannot be written
void report_step(StepSettings const& settings, Roof const& roof, StepFigures const& figures);
void report_kernels(StepSettings const& settings, Roof const& roof, std::string const& device,
                    std::vector<KernelFigures> const& kernels);

}  // namespace bench
