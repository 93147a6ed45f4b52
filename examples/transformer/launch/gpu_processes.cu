// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes with a GPU each, over NCCL.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "fsdp/cuda.hpp"
#include "fsdp/nccl.hpp"
#include "transformer/launch/dispatch.hpp"
#include "transformer/launch/environment.hpp"
#include "transformer/launch/exit.hpp"
#include "transformer/launch/gpu_ranks.hpp"
#include "transformer/launch/process.hpp"
#include "transformer/launch/refusals.hpp"

namespace transformer {
namespace {

/// A name that no other GPU has. Machines that NCCL is to take a process for (NCCL_HOSTID) have each of them once.
std::string name_of_gpu(fsdp::cuda::Device const& device) {
  cudaDeviceProp properties{};
  FSDP_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.ordinal()));
  std::string name = "GPU-";
  for (char const byte : properties.uuid.bytes) name += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  if (char const* const host = std::getenv("NCCL_HOSTID"); host != nullptr) name += fmt::format(" of {}", host);
  return name;
}

/// @tparam Control  anything with rank(), size() and exchange(text, what)
/// @param nodes  for each rank, something that ranks of one machine have in common
/// @param here   this rank's place on its machine
template <class Control>
int run_process(Control& control, WorldKind kind, std::vector<int> const& nodes, LocalPlace here, Job job) {
  auto const share = job.settings.share_gpu;
  std::optional<fsdp::cuda::Device> device;
  std::vector<std::string> gpus;
  try {
    ChosenGpu mine{"", here.rank, cuda_device_count()};
    agree(control, [&] {
      device.emplace(choose_gpu({control.rank(), control.size()}, here, mine.seen, share));
      mine.name = name_of_gpu(*device);
    });
    std::vector<ChosenGpu> chosen;
    for (auto const& text : control.exchange(pack(mine), "GPUs")) {
      chosen.push_back(unpack_gpu(text));
      gpus.push_back(chosen.back().name);
    }
    auto const different = std::set<std::string>(gpus.begin(), gpus.end()).size();
    job.shares_gpus = different != gpus.size();
    job.world_kind = describe(kind, control.size(), job.shares_gpus ? different : 0);
    agree(control, [&] {
      if (!share) expect_own_gpus(chosen, nodes);
      choose_shard_group(job, nodes);
    });
  } catch (AgreedError const& error) {
    return refuse(control.rank(), job, error.what());
  }
  // Before NCCL looks at it, as it does when it connects the first ranks.
  if (auto const host = nccl_host(gpus, control.rank()); !host.empty()) ::setenv("NCCL_HOSTID", host.c_str(), 1);
  fsdp::nccl::Options options;
  options.timeout = collective_timeout(job.settings);
  return dispatch(fsdp::AnyCommunicator<fsdp::cuda::Device>(fsdp::nccl::Communicator::from(control, *device, options)),
                  job);
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  static_cast<void>(ncclGetVersion(&version));  // 10000 * major + 100 * minor + patch, since 2.9
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

int run_gpu_process(fsdp::AnyCommunicator<fsdp::host::Device>& control, std::vector<int> const& nodes, Job job) {
  return run_process(control, WorldKind::nccl_by_mpi, nodes, local_place(nodes, control.rank()), std::move(job));
}

int run_gpu_process_by_variables(Job job) {
  std::optional<fsdp::bootstrap::TcpGroup> control;
  std::vector<int> nodes;
  LocalPlace here;
  int const refused = guarded([&] {
    auto const place = fsdp::bootstrap::Environment::read();
    control.emplace(place, collective_timeout(job.settings));
    nodes = nodes_of(control->exchange(machine_name(), "machines"));
    here = local_place(nodes, place.rank);
    if (place.local_rank >= 0) here.rank = place.local_rank;
    return EXIT_SUCCESS;
  });
  if (refused != EXIT_SUCCESS) return refused;
  job.says_refusals = nodes[static_cast<std::size_t>(control->rank())] == control->rank();
  return run_process(*control, WorldKind::nccl_by_variables, nodes, here, std::move(job));
}

}  // namespace transformer
