// SPDX-License-Identifier: Apache-2.0
// The owner of a cuBLASLt handle, and the checker of its calls.
#pragma once

#include <cublasLt.h>

#include "fsdp/cuda/handles.hpp"
#include "fsdp/error.hpp"

namespace nanogpt {

namespace detail {
[[noreturn]] inline void throw_cublas_error(cublasStatus_t status, char const* call, char const* file, int line) {
  static_cast<void>(cudaGetLastError());
  fsdp::fail<fsdp::VendorError>("{} failed: {} ({}) [{}:{}]", call, cublasGetStatusString(status),
                                cublasGetStatusName(status), file, line);
}
}  // namespace detail

struct CublasLtTraits {
  using value_type = cublasLtHandle_t;
  static void destroy(value_type handle) noexcept {
    auto const status = cublasLtDestroy(handle);
    if (status != CUBLAS_STATUS_SUCCESS) fsdp::cuda::detail::log_failure("cublasLtDestroy", cublasGetStatusString(status));
  }
};

using UniqueCublasLt = fsdp::cuda::UniqueHandle<CublasLtTraits>;

}  // namespace nanogpt

/// Throws fsdp::VendorError with the call's text and cuBLAS's words unless `call` returns CUBLAS_STATUS_SUCCESS.
#define NANOGPT_CUBLAS_CHECK(call)                                                                \
  do {                                                                                         \
    ::cublasStatus_t const nanogpt_cublas_status = (call);                                        \
    if (nanogpt_cublas_status != ::CUBLAS_STATUS_SUCCESS)                                         \
      ::nanogpt::detail::throw_cublas_error(nanogpt_cublas_status, #call, __FILE__, __LINE__); \
  } while (false)
