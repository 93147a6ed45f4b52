// SPDX-License-Identifier: Apache-2.0
// Settings of the step benchmark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bench {

struct StepSettings {
  std::string model = "gpt2";
  std::int64_t n_layer = 0, n_head = 0, n_embd = 0;  ///< 0: the model's
  std::int64_t vocab_size = 50304;
  std::int64_t batch = 0;       ///< sequences of a micro-step; 0: the device's default
  std::int64_t block = 1024;    ///< tokens of a sequence
  std::int64_t accumulate = 1;  ///< micro-steps of an optimizer step
  std::string dtype;            ///< empty: bfloat16 on CUDA, float32 on the host
  std::int64_t burn_in = 10;
  std::int64_t timed = 20;
  std::int64_t profiled = 3;   ///< steps behind the table of kernel classes; 0: no table
  double clip = 1.0;           ///< of the gradient norm; 0: off
  double peak_tflops = 0;      ///< that MFU is relative to; 0: the data sheet's, else the measured rate
  std::int64_t gemm_size = 0;  ///< edge of the matrix product that measures the roof; 0: the device's default
  std::int64_t cache_kib = 0;  ///< last-level cache that working sets are four times as large as; 0: ask the device
  std::int64_t repeats = 20;   ///< of a roof's or a single kernel's measurement; the median counts
  bool kernels = false;        ///< single kernels instead of a step
  std::string json;
  std::string hardware;  ///< file for `nanogpt plan`; empty: none

  bool bf16() const { return dtype == "bfloat16"; }
};

/// Fills `settings`. On a bad command line says so on stderr. @param cuda  which program this is
/// @return the exit code, or -1 to go on
int parse(int argc, char** argv, bool cuda, StepSettings& settings);

}  // namespace bench
