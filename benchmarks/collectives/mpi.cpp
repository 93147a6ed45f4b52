// SPDX-License-Identifier: Apache-2.0
// Ranks as processes, on the host.
#include "fsdp/mpi.hpp"

#include "run.hpp"
#include "run_rank.hpp"
#include "vendor_mpi.hpp"

namespace bench {

int run_mpi(int argc, char** argv, Settings const& settings) {
  return fsdp::mpi::run(argc, argv, [&](fsdp::mpi::Environment const& environment) {
    return run_rank<MpiVendor>(fsdp::mpi::Communicator(environment), settings, "host");
  });
}

}  // namespace bench
