// SPDX-License-Identifier: Apache-2.0
// Ranks as processes with a GPU each, started with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
#include "fsdp/nccl.hpp"

#include <utility>

#include "run.hpp"
#include "run_rank.hpp"

namespace bench {

int run_nccl(Settings const& settings) {
  auto comm = fsdp::nccl::Communicator::from_environment();
  auto const device = comm.device().description();
  return run_rank<NoVendor>(std::move(comm), settings, device);
}

}  // namespace bench
