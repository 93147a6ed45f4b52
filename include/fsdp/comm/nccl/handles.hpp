// SPDX-License-Identifier: Apache-2.0
// Owners of NCCL communicators, and a macro that checks NCCL calls.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>
#include <thread>

#include "fsdp/cuda/handles.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl {

namespace detail {

/// Waits while a call on a non-blocking communicator is in progress (an adopted one may be), and gives its result.
inline ncclResult_t settle(ncclResult_t status, ncclComm_t comm) {
  while (status == ncclInProgress && comm != nullptr) {
    std::this_thread::yield();
    if (auto const query = ncclCommGetAsyncError(comm, &status); query != ncclSuccess) return query;
  }
  return status;
}

[[noreturn]] inline void throw_nccl_error(ncclResult_t status, ncclComm_t comm, char const* call, char const* file,
                                          int line) {
  static_cast<void>(cudaGetLastError());
  char const* const last = ncclGetLastError(comm);
  auto* const work = cuda::detail::work_of_failed_device.load();
  fail<VendorError>("{} failed: {}; {} [{}:{}]{}", call, ncclGetErrorString(status), last == nullptr ? "" : last, file,
                    line, work == nullptr ? std::string() : work());
}

}  // namespace detail

struct CommTraits {
  using value_type = ncclComm_t;
  static void destroy(value_type comm) noexcept {
    auto const status = detail::settle(ncclCommDestroy(comm), nullptr);
    if (status != ncclSuccess && status != ncclInProgress)
      cuda::detail::log_failure("ncclCommDestroy", ncclGetErrorString(status));
  }
};
using UniqueComm = cuda::UniqueHandle<CommTraits>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl

/// Throws fsdp::VendorError with the call's text and NCCL's words unless `call` succeeds. `comm` may be null.
#define FSDP_NCCL_CHECK(comm, call)                                                                \
  do {                                                                                             \
    ::ncclResult_t const fsdp_nccl_status = ::fsdp::nccl::detail::settle((call), (comm));          \
    if (fsdp_nccl_status != ::ncclSuccess)                                                         \
      ::fsdp::nccl::detail::throw_nccl_error(fsdp_nccl_status, (comm), #call, __FILE__, __LINE__); \
  } while (false)
