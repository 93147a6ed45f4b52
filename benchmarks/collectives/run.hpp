// SPDX-License-Identifier: Apache-2.0
// Entry points of the benchmark: one for each communicator, in a translation unit of its own.
#pragma once

#include <string>
#include <utility>

#include "report.hpp"
#include "settings.hpp"

namespace bench {

int run_local(Settings const& settings);                       ///< local.cpp
int run_mpi(int argc, char** argv, Settings const& settings);  ///< mpi.cpp
int run_local_cuda(Settings const& settings);                  ///< local_cuda.cu
int run_nccl(Settings const& settings);                        ///< nccl.cu

}  // namespace bench
