// SPDX-License-Identifier: Apache-2.0
// bench_step and bench_step_cuda: training steps of a GPT by kernel class, and kernels alone.
#include <cstdio>
#include <exception>

#include "run.hpp"
#include "settings.hpp"

int main(int argc, char** argv) {
  bench::StepSettings settings;
  if (int const code = bench::parse(argc, argv, BENCH_CUDA != 0, settings); code >= 0) return code;
  try {
#if BENCH_CUDA
    bench::run_cuda(settings);
#else
    bench::run_host(settings);
#endif
  } catch (std::exception const& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 1;
  }
  return 0;
}
