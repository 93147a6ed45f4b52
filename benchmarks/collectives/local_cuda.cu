// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, on GPUs.
#include <atomic>
#include <utility>

#include "fsdp/cuda.hpp"
#include "fsdp/local.hpp"
#include "run.hpp"
#include "run_rank.hpp"

namespace bench {

int run_local_cuda(Settings const& settings) {
  fsdp::cuda::require_device();
  int const devices = fsdp::cuda::device_count();
  std::atomic<int> code{0};
  fsdp::local::run(
      settings.ranks, [&](int rank) { return fsdp::cuda::Device(rank % devices); },
      [&](fsdp::local::Communicator<fsdp::cuda::Device> comm) {
        auto const device = comm.device().description();
        if (int const own = run_rank<NoVendor>(std::move(comm), settings, device); own != 0) code = own;
      });
  return code;
}

}  // namespace bench
