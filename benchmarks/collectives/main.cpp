// SPDX-License-Identifier: Apache-2.0
// bench_collectives and bench_collectives_cuda: all-gather, reduce-scatter and all-reduce over every communicator.
#include <cstdio>
#include <exception>

#include "run.hpp"
#include "settings.hpp"

int main(int argc, char** argv) {
  bench::Build build;
  build.comms = {"local"};
  if (BENCH_MPI != 0) build.comms.emplace_back("mpi");
  if (BENCH_NCCL != 0) build.comms.emplace_back("nccl");
  bench::Settings settings;
  if (int const code = bench::parse(argc, argv, build, settings); code >= 0) return code;
#if BENCH_MPI  // outside of try: see fsdp::mpi::run
  if (settings.comm == "mpi") return bench::run_mpi(argc, argv, settings);
#endif
  try {
#if BENCH_NCCL
    if (settings.comm == "nccl") return bench::run_nccl(settings);
#endif
#if BENCH_CUDA
    return bench::run_local_cuda(settings);
#else
    return bench::run_local(settings);
#endif
  } catch (std::exception const& error) {
    std::fprintf(stderr, "collectives: %s\n", error.what());
    return 1;
  }
}
