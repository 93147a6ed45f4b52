// SPDX-License-Identifier: Apache-2.0
// Functions of cuBLAS that are used where cuBLASLt has no algorithm: handles, and products of any types.
#include <algorithm>
#include <limits>

#include "handles.hpp"
#include "tests/standin/runtime/runtime.hpp"

/// The object of a cublasHandle_t.
struct cublasContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  void* workspace = nullptr;  ///< the caller's; null: the library's own
  std::size_t workspace_bytes = 0;
  bool lost_workspace = false;  ///< there was one of the caller's, which cublasSetStream took away
};

using namespace standin::cublas;

namespace {

struct Product {
  cublasOperation_t transpose_a, transpose_b;
  std::int64_t m, n, k, batch;
  Layout a, b, c;
  void const *alpha, *data_a, *data_b, *beta;
  void* data_c;
  cublasComputeType_t compute;
  cublasGemmAlgo_t algorithm;
};

Layout layout(cudaDataType type, bool turned, std::int64_t rows, std::int64_t columns, std::int64_t leading,
              long long stride, std::int64_t batch) {
  Layout matrix;
  matrix.type = type;
  matrix.rows = static_cast<std::uint64_t>(turned ? columns : rows);
  matrix.columns = static_cast<std::uint64_t>(turned ? rows : columns);
  matrix.leading = leading;
  matrix.stride = batch == 1 ? 0 : stride;
  matrix.batch = static_cast<std::int32_t>(batch);
  return matrix;
}

cublasStatus_t multiply(char const* call, cublasHandle_t handle, Product const& product) {
  if (auto const status = expect_usable(call, handle); status != CUBLAS_STATUS_SUCCESS) return status;
  if (!settings().gemm_ex) return CUBLAS_STATUS_NOT_SUPPORTED;
  auto const invalid = [&](standin::Rule const& rule, std::string_view what) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule, fsdp::formatted("{}: {}", call, what));
  };
  if (product.m < 0 || product.n < 0 || product.k < 0) return invalid(rule::shape, "a negative extent");
  if (product.batch > std::numeric_limits<std::int32_t>::max()) return invalid(rule::batch, "too many products");
  if (product.algorithm != CUBLAS_GEMM_DEFAULT) return invalid(rule::algorithm, "one that is not the default");
  if (product.alpha == nullptr || product.beta == nullptr) return invalid(rule::scalars, "alpha or beta is null");
  if (handle->lost_workspace)
    return invalid(rule::lost_workspace, "the handle's workspace went when its stream was set after it");
  Problem problem;
  problem.call = call;
  bool const wide = product.compute == CUBLAS_COMPUTE_64F;
  problem.operation.compute = product.compute;
  problem.operation.scale = wide ? CUDA_R_64F : CUDA_R_32F;
  problem.operation.transpose_a = product.transpose_a;
  problem.operation.transpose_b = product.transpose_b;
  problem.a = product.a;
  problem.b = product.b;
  problem.c = problem.d = product.c;
  auto const scalar = [&](void const* value) {
    return wide ? *static_cast<double const*>(value) : static_cast<double>(*static_cast<float const*>(value));
  };
  problem.alpha = scalar(product.alpha);
  problem.beta = scalar(product.beta);
  problem.data_a = product.data_a;
  problem.data_b = product.data_b;
  problem.data_c = problem.data_d = product.data_c;
  if (auto const status = check_problem(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm;
  algorithm.workspace_bytes = std::min<std::size_t>(handle->workspace_bytes, 4096);  // it uses what it has
  auto const status =
      enqueue_product(problem, algorithm, handle->device, handle->workspace, handle->workspace_bytes, handle->stream);
  if (status == CUBLAS_STATUS_SUCCESS) count(&Calls::gemm_ex);
  return status;
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) { return create("cublasCreate", handle); }
/// Waits for the handle's device, as the release of resources does there.
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  if (auto const status = expect_alive("cublasDestroy", handle); status != CUBLAS_STATUS_SUCCESS) return status;
  int const current = current_device();
  bool const done = cudaSetDevice(handle->device) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
  bool const back = current < 0 || cudaSetDevice(current) == cudaSuccess;
  auto const status = destroy("cublasDestroy", handle);
  return done && back ? status : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t streamId) {
  if (auto const status = expect_alive("cublasSetStream", handle); status != CUBLAS_STATUS_SUCCESS) return status;
  handle->stream = streamId;
  handle->lost_workspace = handle->lost_workspace || handle->workspace != nullptr;
  handle->workspace = nullptr;
  handle->workspace_bytes = 0;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, size_t workspaceSizeInBytes) {
  if (auto const status = expect_alive("cublasSetWorkspace", handle); status != CUBLAS_STATUS_SUCCESS) return status;
  if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0 || (workspace == nullptr) != (workspaceSizeInBytes == 0))
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::workspace,
                  fsdp::formatted("cublasSetWorkspace: {} bytes, {} behind a multiple of 256", workspaceSizeInBytes,
                                  reinterpret_cast<std::uintptr_t>(workspace) % 256));
  handle->workspace = workspace;
  handle->workspace_bytes = workspaceSizeInBytes;
  handle->lost_workspace = false;
  return CUBLAS_STATUS_SUCCESS;
}
/// Only what keeps products of fp32 in fp32, and sums in the compute type.
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  if (auto const status = expect_alive("cublasSetMathMode", handle); status != CUBLAS_STATUS_SUCCESS) return status;
  auto const base =
      static_cast<unsigned>(mode) & ~static_cast<unsigned>(CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
  if (base == CUBLAS_DEFAULT_MATH || base == CUBLAS_PEDANTIC_MATH) return CUBLAS_STATUS_SUCCESS;
  return refuse(CUBLAS_STATUS_NOT_SUPPORTED, rule::types,
                fsdp::formatted("cublasSetMathMode: mode {} is not computed here", static_cast<int>(mode)));
}

cublasStatus_t cublasGemmStridedBatchedEx_64(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                             int64_t m, int64_t n, int64_t k, void const* alpha, void const* A,
                                             cudaDataType Atype, int64_t lda, long long int strideA, void const* B,
                                             cudaDataType Btype, int64_t ldb, long long int strideB, void const* beta,
                                             void* C, cudaDataType Ctype, int64_t ldc, long long int strideC,
                                             int64_t batchCount, cublasComputeType_t computeType,
                                             cublasGemmAlgo_t algo) {
  return multiply(
      "cublasGemmStridedBatchedEx_64", handle,
      {transa, transb, m, n, k, batchCount, layout(Atype, transa != CUBLAS_OP_N, m, k, lda, strideA, batchCount),
       layout(Btype, transb != CUBLAS_OP_N, k, n, ldb, strideB, batchCount),
       layout(Ctype, false, m, n, ldc, strideC, batchCount), alpha, A, B, beta, C, computeType, algo});
}

char const* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
  }
  return "unknown";
}
char const* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success, says the stand-in";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "not supported, says the stand-in";
    case CUBLAS_STATUS_INVALID_VALUE: return "an invalid value, says the stand-in";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "not initialised, says the stand-in";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "execution failed, says the stand-in";
    default: return "a failure, says the stand-in";
  }
}

}  // extern "C"
