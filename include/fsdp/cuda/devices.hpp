// SPDX-License-Identifier: Apache-2.0
// Finds CUDA devices, selects one for a thread, and enables access to peers' memory.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "fsdp/cuda/handles.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

/// The reason why no CUDA device can be used, in one line that begins with "no CUDA device: "; "" if there is one.
inline std::string unavailable_reason() {
  int count = 0;
  auto const status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return {};
  static_cast<void>(cudaGetLastError());
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) static_cast<void>(cudaGetLastError());
  if (driver == 0) return "no CUDA device: no NVIDIA driver is installed";
  if (status == cudaSuccess || status == cudaErrorNoDevice) return "no CUDA device: the driver sees no GPU";
  return formatted("no CUDA device: {}", cudaGetErrorString(status));
}

/// Number of usable CUDA devices; 0 without a driver.
inline int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

/// @throws ResourceError "no CUDA device: ..." without one; ConfigError if there are devices but not this one
inline void require_device(int ordinal = 0) {
  if (auto const reason = unavailable_reason(); !reason.empty()) fail<ResourceError>("{}", reason);
  auto const count = device_count();
  if (ordinal < 0 || ordinal >= count)
    fail<ConfigError>("CUDA device {} does not exist: there are {} (0 to {})", ordinal, count, count - 1);
}

/// Makes `ordinal` the calling thread's current device. Costs one thread-local read when it is current already, as it
/// is in a thread that drives one device.
///
/// [Note: The current device is not restored] cudaSetDevice creates the device's context where there is none. Going
/// back to device 0, the default of a new thread, would put a context of every rank of a node on its first GPU.
inline void make_current(int ordinal) {
  int current = 0;
  FSDP_CUDA_CHECK(cudaGetDevice(&current));
  if (current != ordinal) FSDP_CUDA_CHECK(cudaSetDevice(ordinal));
}

/// Lets kernels of device `reader` read and write the memory of device `owner`, from now on in the whole process.
/// @throws ConfigError naming both where the machine has no way between them that kernels can take
inline void enable_peer_access(int reader, int owner) {
  if (reader == owner) return;
  int possible = 0;
  FSDP_CUDA_CHECK(cudaDeviceCanAccessPeer(&possible, reader, owner));
  if (possible == 0)
    fail<ConfigError>(
        "cuda:{} cannot read the memory of cuda:{}: ranks that are threads need peer access between their GPUs; let "
        "them share one GPU, or run a process for each GPU over NCCL",
        reader, owner);
  make_current(reader);
  auto const status = cudaDeviceEnablePeerAccess(owner, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
  } else {
    FSDP_CUDA_CHECK(status);
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda
