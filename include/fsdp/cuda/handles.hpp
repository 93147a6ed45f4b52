// SPDX-License-Identifier: Apache-2.0
// Owners of CUDA streams and events, and a macro that checks CUDA calls.
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
