// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes with a GPU each, over NCCL.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "agreement.hpp"
#include "commands.hpp"
#include "dispatch.hpp"
#include "fsdp/comm/common/bootstrap.hpp"
#include "fsdp/comm/nccl.hpp"
#include "fsdp/cuda/device.hpp"
#include "gpu_ranks.hpp"
#include "launcher.hpp"

namespace nanogpt {
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
template <class Control>
int run_process(Control& control, LocalPlace here, Job const& job) {
  std::optional<fsdp::cuda::Device> device;
  try {
    std::string name;
    agree(control, [&] {
      device.emplace(choose_gpu({control.rank(), control.size()}, here, cuda_device_count()));
      name = name_of_gpu(*device);
    });
    auto const gpus = control.exchange(name, "GPUs");
    agree(control, [&] { expect_own_gpus(gpus); });
  } catch (AgreedError const& error) {
    if (control.rank() == 0) report_error(error.what());
    return usage_error;
  }
  fsdp::nccl::Options options;
  options.timeout = collective_timeout(job.settings);
  return dispatch(World<fsdp::cuda::Device>::of(fsdp::nccl::Communicator::from(control, *device, options)), job);
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  static_cast<void>(ncclGetVersion(&version));  // 10000 * major + 100 * minor + patch, since 2.9
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

int run_gpu_process(World<fsdp::host::Device>& control, LocalPlace here, Job const& job) {
  return run_process(control, here, job);
}

int run_gpu_process_by_variables(Job const& job) {
  auto const place = fsdp::bootstrap::Environment::read();
  fsdp::bootstrap::TcpGroup control(place, collective_timeout(job.settings));
  return run_process(control, {place.local_rank, 0}, job);
}

}  // namespace nanogpt
