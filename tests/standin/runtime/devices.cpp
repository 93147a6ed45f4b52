// SPDX-License-Identifier: Apache-2.0
// Devices of the stand-in: their number, properties and peers.
#include <cstdio>
#include <cstring>

#include "tests/standin/runtime/state.hpp"

using standin::Call;

namespace {

bool exists(Call const& call, int device) {
  return device >= 0 && device < static_cast<int>(call.runtime.devices.size());
}
standin::DeviceState& state(Call& call, int device) { return call.runtime.devices[static_cast<std::size_t>(device)]; }

constexpr int level_two_cache = 50 * 1024 * 1024, multiprocessors = 132;

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  Call call("cudaGetDeviceCount");
  if (count == nullptr) return call.result(cudaErrorInvalidValue);
  *count = static_cast<int>(call.runtime.devices.size());
  return call.result(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}

cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  Call call("cudaGetDevice");
  if (device == nullptr) return call.result(cudaErrorInvalidValue);
  if (call.runtime.devices.empty()) return call.result(cudaErrorNoDevice);
  *device = standin::current_device();
  return call.result(cudaSuccess);
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  Call call("cudaSetDevice");
  if (!exists(call, device)) return call.result(cudaErrorInvalidDevice);
  standin::set_current_device(device);
  return call.result(cudaSuccess, device);
}

cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  Call call("cudaDriverGetVersion");
  if (version == nullptr) return call.result(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return call.result(cudaSuccess);
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) {
  Call call("cudaRuntimeGetVersion");
  if (version == nullptr) return call.result(cudaErrorInvalidValue);
  *version = CUDART_VERSION;
  return call.result(cudaSuccess);
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  Call call("cudaGetDeviceProperties");
  if (properties == nullptr) return call.result(cudaErrorInvalidValue);
  if (!exists(call, device)) return call.result(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "%s", call.runtime.device_name.c_str());
  std::memcpy(properties->uuid.bytes, "fsdp stand-in ", 14);
  properties->uuid.bytes[14] = static_cast<char>(device / 256);
  properties->uuid.bytes[15] = static_cast<char>(device % 256);
  properties->totalGlobalMem = call.runtime.memory_bytes;
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = multiprocessors;
  properties->l2CacheSize = level_two_cache;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = 227 * 1024;
  properties->unifiedAddressing = 1;
  return call.result(cudaSuccess, device);
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  Call call("cudaDeviceGetAttribute");
  if (value == nullptr) return call.result(cudaErrorInvalidValue);
  if (!exists(call, device)) return call.result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrL2CacheSize: *value = level_two_cache; break;
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
    default: return call.result(cudaErrorNotSupported);
  }
  return call.result(cudaSuccess, device);
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  Call call("cudaDeviceGetStreamPriorityRange");
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return call.result(cudaSuccess, standin::current_device());
}

cudaError_t CUDARTAPI cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  Call call("cudaMemGetInfo");
  if (free == nullptr || total == nullptr) return call.result(cudaErrorInvalidValue);
  if (call.runtime.devices.empty()) return call.result(cudaErrorNoDevice);
  *total = call.runtime.memory_bytes;
  *free = *total - state(call, standin::current_device()).used;
  return call.result(cudaSuccess, standin::current_device());
}

cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  Call call("cudaDeviceCanAccessPeer");
  if (can == nullptr) return call.result(cudaErrorInvalidValue);
  if (!exists(call, device) || !exists(call, peer)) return call.result(cudaErrorInvalidDevice);
  *can = device != peer ? 1 : 0;
  return call.result(cudaSuccess, device);
}
cudaError_t CUDARTAPI cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  Call call("cudaDeviceEnablePeerAccess");
  int const device = standin::current_device();
  if (flags != 0) return call.result(cudaErrorInvalidValue);
  if (!exists(call, peer) || peer == device) return call.result(cudaErrorInvalidDevice);
  bool const added = state(call, device).peers.insert(peer).second;
  return call.result(added ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled, device);
}
cudaError_t CUDARTAPI cudaDeviceDisablePeerAccess(int peer) {
  Call call("cudaDeviceDisablePeerAccess");
  int const device = standin::current_device();
  if (!exists(call, peer)) return call.result(cudaErrorInvalidDevice);
  bool const removed = state(call, device).peers.erase(peer) == 1;
  return call.result(removed ? cudaSuccess : cudaErrorPeerAccessNotEnabled, device);
}

}  // extern "C"
