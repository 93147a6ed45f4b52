// SPDX-License-Identifier: Apache-2.0
// Owners of CUDA streams and events, a macro that checks CUDA calls, and the devices of a machine.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <string>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda {

/// Owns one vendor handle. `Traits` names `value_type` (a pointer type) and `destroy(value_type) noexcept`.
///
/// Moves by swap. Cannot be made from an integer or nullptr: an empty owner is default-constructed.
template <class Traits>
class UniqueHandle {
 public:
  using value_type = typename Traits::value_type;

  UniqueHandle() = default;
  /// Takes ownership of `handle`.
  explicit UniqueHandle(value_type handle) noexcept : handle_(handle) {}
  UniqueHandle(int) = delete;
  UniqueHandle(std::nullptr_t) = delete;
  UniqueHandle(UniqueHandle&& other) noexcept { swap(other); }
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    UniqueHandle(std::move(other)).swap(*this);
    return *this;
  }
  ~UniqueHandle() {
    if (handle_ != value_type{}) Traits::destroy(handle_);
  }

  value_type get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != value_type{}; }
  /// Gives ownership to the caller; this owner is empty afterwards.
  [[nodiscard]] value_type release() noexcept { return std::exchange(handle_, value_type{}); }
  void swap(UniqueHandle& other) noexcept { std::swap(handle_, other.handle_); }

 private:
  value_type handle_{};
};

namespace detail {

/// Writes one line to stderr. For destructors and other places that may not throw.
inline void log_failure(char const* call, char const* reason) noexcept {
  std::fprintf(stderr, "fsdp: %s failed: %s\n", call, reason);
}

/// A function that names the operation in progress when the device failed, for messages: "; rank 2 of 4 (cuda:2):
/// all_gather 31 ..."; "" if it has not. Communicators set it.
inline std::atomic<std::string (*)()> work_of_failed_device{nullptr};

/// Throws VendorError, which names the current device where CUDA still tells: an error may be of any work before it.
/// Clears CUDA's record of the last error first, so that a later check does not report it again.
[[noreturn]] inline void throw_cuda_error(cudaError_t status, char const* call, char const* file, int line) {
  static_cast<void>(cudaGetLastError());
  int device = 0;
  auto const where = cudaGetDevice(&device) == cudaSuccess ? formatted(" on cuda:{}", device) : std::string();
  auto* const work = work_of_failed_device.load();
  fail<VendorError>("{} failed{}: {} ({}) [{}:{}]{}", call, where, cudaGetErrorString(status), cudaGetErrorName(status),
                    file, line, work == nullptr ? std::string() : work());
}

/// Logs a failed call. Silent while the process shuts CUDA down, when the driver has already freed everything.
inline void log_cuda_error(cudaError_t status, char const* call) noexcept {
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  static_cast<void>(cudaGetLastError());
  log_failure(call, cudaGetErrorString(status));
}

}  // namespace detail

struct StreamTraits {
  using value_type = cudaStream_t;
  static void destroy(value_type stream) noexcept {
    detail::log_cuda_error(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
};

struct EventTraits {
  using value_type = cudaEvent_t;
  static void destroy(value_type event) noexcept {
    detail::log_cuda_error(cudaEventDestroy(event), "cudaEventDestroy");
  }
};

/// Destroying a stream or event does not wait: CUDA frees it when the work that uses it is done.
using UniqueStream = UniqueHandle<StreamTraits>;
using UniqueEvent = UniqueHandle<EventTraits>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda

/// Throws fsdp::VendorError with the call's text and CUDA's words unless `call` returns cudaSuccess.
#define FSDP_CUDA_CHECK(call)                                                              \
  do {                                                                                     \
    ::cudaError_t const fsdp_cuda_status = (call);                                         \
    if (fsdp_cuda_status != ::cudaSuccess)                                                 \
      ::fsdp::cuda::detail::throw_cuda_error(fsdp_cuda_status, #call, __FILE__, __LINE__); \
  } while (false)

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
