// SPDX-License-Identifier: Apache-2.0
// The owners of cuBLASLt's and cuBLAS's handles, and the checker of their calls.
#pragma once

#include <cublasLt.h>
#include <cublas_v2.h>

#include "fsdp/cuda.hpp"
#include "fsdp/error.hpp"

namespace transformer {

namespace detail {
[[noreturn]] inline void throw_cublas_error(cublasStatus_t status, char const* call, char const* file, int line) {
  static_cast<void>(cudaGetLastError());
  fsdp::fail<fsdp::VendorError>("{} failed: {} ({}) [{}:{}]", call, cublasGetStatusString(status),
                                cublasGetStatusName(status), file, line);
}
}  // namespace detail

/// @tparam Handle, Destroy  a kind of handle, and what destroys it
template <class Handle, cublasStatus_t (*Destroy)(Handle)>
struct CublasTraits {
  using value_type = Handle;
  static void destroy(value_type handle) noexcept {
    auto const status = Destroy(handle);
    if (status != CUBLAS_STATUS_SUCCESS)
      fsdp::cuda::detail::log_failure("cublasDestroy", cublasGetStatusString(status));
  }
};

using UniqueCublasLt = fsdp::cuda::UniqueHandle<CublasTraits<cublasLtHandle_t, cublasLtDestroy>>;
using UniqueCublas = fsdp::cuda::UniqueHandle<CublasTraits<cublasHandle_t, cublasDestroy>>;

}  // namespace transformer

/// Throws fsdp::VendorError with the call's text and cuBLAS's words unless `call` returns CUBLAS_STATUS_SUCCESS.
#define TRANSFORMER_CUBLAS_CHECK(call)                                                                 \
  do {                                                                                                 \
    ::cublasStatus_t const transformer_cublas_status = (call);                                         \
    if (transformer_cublas_status != ::CUBLAS_STATUS_SUCCESS)                                          \
      ::transformer::detail::throw_cublas_error(transformer_cublas_status, #call, __FILE__, __LINE__); \
  } while (false)
