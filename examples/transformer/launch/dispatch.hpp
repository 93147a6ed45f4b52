// SPDX-License-Identifier: Apache-2.0
// Runs a job with the element type that it names, and starts ranks as threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "transformer/launch/job.hpp"

namespace transformer {

/// Whether this program has ranks in bf16 on a device: on the host where it is built with oneDNN.
template <class Device>
inline constexpr bool computes_in_bf16 = true;
#if !TRANSFORMER_HAVE_ONEDNN
template <>
inline constexpr bool computes_in_bf16<fsdp::host::Device> = false;
#endif

/// Runs this rank in the type that the job names. @return as run_rank
/// @note Collective: yes.
template <class Device>
int dispatch(fsdp::AnyCommunicator<Device> world, Job const& job) {
  if constexpr (computes_in_bf16<Device>) {
    if (job.dtype == "bfloat16") return run_rank<fsdp::Bf16>(std::move(world), job);
  }
  return run_rank<fsdp::Fp32>(std::move(world), job);
}

/// Runs the job's ranks as threads of this process, all on `device`. @return the highest exit code
template <class Device>
int run_threads(Job const& job, Device const& device) {
  std::vector<int> codes(static_cast<std::size_t>(job.settings.ranks), EXIT_FAILURE);
  fsdp::local::run(static_cast<int>(job.settings.ranks), device, [&](fsdp::local::Communicator<Device> ranks) {
    auto& code = codes[static_cast<std::size_t>(ranks.rank())];
    code = dispatch(fsdp::AnyCommunicator<Device>(std::move(ranks)), job);
  });
  return *std::max_element(codes.begin(), codes.end());
}

}  // namespace transformer
