// SPDX-License-Identifier: Apache-2.0
// Owners of cuBLAS and cuBLASLt handles, and the checker of their calls.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include "fsdp/cuda/handles.hpp"

namespace fsdp::cuda {

namespace detail {
[[noreturn]] inline void throw_cublas_error(cublasStatus_t status, char const* call, char const* file, int line) {
  static_cast<void>(cudaGetLastError());
  fail<VendorError>("{} failed: {} ({}) [{}:{}]", call, cublasGetStatusString(status), cublasGetStatusName(status),
                    file, line);
}
}  // namespace detail

struct CublasTraits {
  using value_type = cublasHandle_t;
  static void destroy(value_type handle) noexcept {
    auto const status = cublasDestroy(handle);
    if (status != CUBLAS_STATUS_SUCCESS) detail::log_failure("cublasDestroy", cublasGetStatusString(status));
  }
};

struct CublasLtTraits {
  using value_type = cublasLtHandle_t;
  static void destroy(value_type handle) noexcept {
    auto const status = cublasLtDestroy(handle);
    if (status != CUBLAS_STATUS_SUCCESS) detail::log_failure("cublasLtDestroy", cublasGetStatusString(status));
  }
};

using UniqueCublas = UniqueHandle<CublasTraits>;
using UniqueCublasLt = UniqueHandle<CublasLtTraits>;

}  // namespace fsdp::cuda

/// Throws fsdp::VendorError with the call's text and cuBLAS's words unless `call` returns CUBLAS_STATUS_SUCCESS.
#define FSDP_CUBLAS_CHECK(call)                                                                \
  do {                                                                                         \
    ::cublasStatus_t const fsdp_cublas_status = (call);                                        \
    if (fsdp_cublas_status != ::CUBLAS_STATUS_SUCCESS)                                         \
      ::fsdp::cuda::detail::throw_cublas_error(fsdp_cublas_status, #call, __FILE__, __LINE__); \
  } while (false)
