// SPDX-License-Identifier: Apache-2.0
// Matrix products on CUDA: plain cuBLAS, one handle and one workspace per stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>

#include "fsdp/cuda/cublas.hpp"
#include "fsdp/cuda/device.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"
#include "gemm.hpp"

namespace nanogpt {

/// Matrix products of float, double, bf16 and fp16. fp32 is computed in fp32 (no TF32); bf16 and fp16 are summed in
/// fp32, reductions across thread blocks included.
///
/// [Note: One workspace per stream] cuBLAS repeats its results bit by bit only while one stream uses a handle, and a
/// workspace that two streams share is a data race. The first call binds this object to its stream.
template <>
class Gemm<fsdp::cuda::Device> {
 public:
  using Stream = fsdp::cuda::Device::Stream;

  /// What cuBLAS takes by default on Hopper; enough for every algorithm before it.
  static constexpr std::size_t default_workspace_bytes = std::size_t{32} << 20;

  explicit Gemm(fsdp::cuda::Device const& device, std::size_t workspace_bytes = default_workspace_bytes)
      : device_(device),
        workspace_bytes_(workspace_bytes),
        workspace_(device.allocate(workspace_bytes), Free{device, workspace_bytes}) {
    device_.make_current();
    cublasHandle_t handle = nullptr;
    FSDP_CUBLAS_CHECK(cublasCreate(&handle));
    handle_ = fsdp::cuda::UniqueCublas(handle);
    FSDP_CUBLAS_CHECK(cublasSetPointerMode(handle, CUBLAS_POINTER_MODE_HOST));
    FSDP_CUBLAS_CHECK(cublasSetMathMode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  }

  template <class T, class Out>
  void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
           T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c, std::int64_t ldc) {
    if (m == 0 || n == 0) return;
    device_.make_current();
    bind(stream);
    // Row-major C is column-major C^T = op_b(B)^T op_a(A)^T, and a row-major operand read by columns is its transpose:
    // swapping the operands is all there is to do.
    FSDP_CUBLAS_CHECK(cublasGemmEx_64(handle_.get(), blas(op_b), blas(op_a), n, m, k, &alpha, b, type_of<T>(), ldb, a,
                                      type_of<T>(), lda, &beta, c, type_of<Out>(), ldc, compute_of<T, Out>(),
                                      CUBLAS_GEMM_DEFAULT));
  }

  template <class T, class Out>
  void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
               T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb, std::int64_t stride_b,
               GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch) {
    if (m == 0 || n == 0 || batch == 0) return;
    device_.make_current();
    bind(stream);
    FSDP_CUBLAS_CHECK(cublasGemmStridedBatchedEx_64(
        handle_.get(), blas(op_b), blas(op_a), n, m, k, &alpha, b, type_of<T>(), ldb, stride_b, a, type_of<T>(), lda,
        stride_a, &beta, c, type_of<Out>(), ldc, stride_c, batch, compute_of<T, Out>(), CUBLAS_GEMM_DEFAULT));
  }

 private:
  struct Free {
    fsdp::cuda::Device device;
    std::size_t bytes;
    void operator()(void* memory) const noexcept { device.deallocate(memory, bytes); }
  };

  static cublasOperation_t blas(Op op) { return op == Op::none ? CUBLAS_OP_N : CUBLAS_OP_T; }

  template <class T>
  static constexpr cudaDataType type_of() {
    switch (fsdp::dtype_of<T>) {
      case fsdp::DType::f32: return CUDA_R_32F;
      case fsdp::DType::bf16: return CUDA_R_16BF;
      case fsdp::DType::f16: return CUDA_R_16F;
      case fsdp::DType::f64: return CUDA_R_64F;
      case fsdp::DType::i64: break;
    }
    static_assert(!std::is_same_v<T, std::int64_t>, "no matrix products of integers");
    return CUDA_R_32F;
  }
  template <class T, class Out>
  static constexpr cublasComputeType_t compute_of() {
    static_assert(std::is_same_v<Out, T> || (std::is_same_v<Out, float> && sizeof(T) == 2),
                  "results have the operands' type; those of bf16 and fp16 operands may be float");
    return std::is_same_v<T, double> ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;
  }

  void bind(Stream& stream) {
    auto const handle = stream.get();
    if (!bound_) {
      FSDP_CUBLAS_CHECK(cublasSetStream(handle_.get(), handle));
      FSDP_CUBLAS_CHECK(
          cublasSetWorkspace(handle_.get(), workspace_.get(), workspace_bytes_));  // after the stream, which resets it
      bound_ = handle;
    }
    FSDP_EXPECTS(*bound_ == handle, "a Gemm serves one stream: make another for the second");
  }

  fsdp::cuda::Device device_;
  std::size_t workspace_bytes_;
  std::unique_ptr<void, Free> workspace_;  // outlives the handle
  fsdp::cuda::UniqueCublas handle_;
  std::optional<cudaStream_t> bound_;
};

}  // namespace nanogpt
