// SPDX-License-Identifier: Apache-2.0
// Matrix products on CUDA: cuBLASLt, with a plan kept for every shape and one workspace; cuBLAS for what it declines.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "fsdp/cuda.hpp"
#include "fsdp/error.hpp"
#include "fsdp/kernels.hpp"
#include "fsdp/tensor.hpp"
#include "transformer/math/cublas.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

namespace detail {
/// The first `columns` elements of every row of out, whose rows are `leading` elements apart, = row.
struct RepeatRow {
  template <class Block, class T>
  FSDP_HD void operator()(Block const& block, std::int64_t index, T const* row, std::int64_t columns, T* out,
                          std::int64_t leading) const {
    block.each(
        columns, out + index * leading, [](fsdp::Compute<T> value) { return value; }, row);
  }
};
}  // namespace detail

/// Matrix products of float, double, bf16 and fp16. fp32 is computed in fp32 (no TF32); bf16 and fp16 are summed in
/// fp32.
///
/// [Note: Plans of matrix products] The first product of a shape asks cuBLASLt's heuristic for algorithms and keeps the
/// first that fits the workspace, with the descriptors that it was found for. Later ones look that plan up: they
/// allocate nothing, and the host waits for nothing. A plan holds for types, extents, leading dimensions, strides and
/// the alignment of the operands, but not for beta: the same algorithm adds to a gradient and begins one.
///
/// [Note: Products that repeat bit by bit] A sum over k that is cut into parts is put together from fp32 parts in the
/// workspace, in a step of its own: schemes that add in the result's type, or in place, are taken only where there is
/// no algorithm without them; they repeat too, but round the parts. A workspace that two streams share would be a data
/// race, so the first call binds this object to its stream.
///
/// [Note: Products that cuBLASLt declines] Its heuristic may know no algorithm for a problem, whatever the scheme. Then
/// cuBLAS computes it, in the same workspace. It adds no bias: the bias is written to all rows of the result, which the
/// product is added to, so that the result is rounded once as well.
template <>
class Gemm<fsdp::cuda::Device> {
 public:
  using Stream = fsdp::cuda::Device::Stream;

  static constexpr bool adds_bias = true;
  template <class T, class Out>
  static constexpr bool can_add_bias = std::is_same_v<T, Out> && !std::is_same_v<T, double>;
  /// NVIDIA's recommendation for Hopper; enough for older GPUs.
  static constexpr std::size_t default_workspace_bytes = std::size_t{32} << 20;

  explicit Gemm(fsdp::cuda::Device const& device, std::size_t workspace_bytes = default_workspace_bytes)
      : device_(device),
        workspace_bytes_(workspace_bytes),
        workspace_(device.allocate(workspace_bytes), Free{device, workspace_bytes}) {
    device_.make_current();
    cublasLtHandle_t handle = nullptr;
    TRANSFORMER_CUBLAS_CHECK(cublasLtCreate(&handle));
    handle_ = UniqueCublasLt(handle);
  }

  template <class T, class Out>
  void run(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
           T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta, Out* c, std::int64_t ldc) {
    multiply<T, Out>(stream, {m, n, k, lda, ldb, ldc, is(op_a), is(op_b)}, alpha, a, b, beta, c, nullptr);
  }

  /// run with beta = 0, plus bias (n) on every row of the result, added before the result is rounded.
  ///
  /// cuBLASLt could apply GELU here too, but only by the tanh formula, which models trained here from scratch do not
  /// have. Its gradient of a bias is stored, not added, so it does not serve gradients that accumulate.
  template <class T, class Out>
  void run_with_bias(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
                     GemmScalar<Out> alpha, T const* a, std::int64_t lda, T const* b, std::int64_t ldb, Out const* bias,
                     Out* c, std::int64_t ldc) {
    static_assert(can_add_bias<T, Out>, "biases are added to float, bf16 and fp16 results of operands of that type");
    multiply<T, Out>(stream, {m, n, k, lda, ldb, ldc, is(op_a), is(op_b)}, alpha, a, b, 0, c, bias);
  }

  template <class T, class Out>
  void batched(Stream& stream, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k, GemmScalar<Out> alpha,
               T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb, std::int64_t stride_b,
               GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c, std::int64_t batch,
               Lower = Lower::none) {
    if (batch == 0) return;
    multiply<T, Out>(stream, {m, n, k, lda, ldb, ldc, is(op_a), is(op_b), batch, stride_a, stride_b, stride_c}, alpha,
                     a, b, beta, c, nullptr);
  }

  /// Shapes met so far.
  std::size_t plans() const { return plans_.size(); }

 private:
  struct Free {
    fsdp::cuda::Device device;
    std::size_t bytes;
    void operator()(void* memory) const noexcept { device.deallocate(memory, bytes); }
  };

  /// The key of a plan. All members have one type, because it is hashed byte by byte.
  struct Problem {
    std::int64_t m, n, k, lda, ldb, ldc, transposed_a, transposed_b;
    std::int64_t batch = 1, stride_a = 0, stride_b = 0, stride_c = 0;
    std::int64_t type = 0, out = 0;                                      // cudaDataType
    std::int64_t align_a = 0, align_b = 0, align_c = 0, align_bias = 0;  // bytes; 0: no bias
    bool operator==(Problem const&) const = default;
  };
  static_assert(std::has_unique_object_representations_v<Problem>);
  struct Hash {
    std::size_t operator()(Problem const& problem) const {
      return std::hash<std::string_view>{}({reinterpret_cast<char const*>(&problem), sizeof problem});
    }
  };
  struct Plan {
    cublasLtMatmulDescOpaque_t product{};
    cublasLtMatrixLayoutOpaque_t first{}, second{}, result{};
    cublasLtMatmulAlgo_t algorithm{};
    bool by_cublas = false;  ///< there is no algorithm
  };

  static std::int64_t is(Op op) { return op == Op::transpose ? 1 : 0; }
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
  /// The largest power of two that divides an address, at most what cuBLASLt takes for granted otherwise.
  static std::int64_t alignment(void const* pointer) {
    auto const address = reinterpret_cast<std::uintptr_t>(pointer);
    return static_cast<std::int64_t>(std::min<std::uintptr_t>(address & (~address + 1), 256));
  }

  template <class T, class Out>
  void multiply(Stream& stream, Problem problem, GemmScalar<Out> alpha, T const* a, T const* b, GemmScalar<Out> beta,
                Out* c, Out const* bias) {
    static_assert(std::is_same_v<Out, T> || (std::is_same_v<Out, float> && sizeof(T) == 2),
                  "results have the operands' type; those of bf16 and fp16 operands may be float");
    if (problem.m == 0 || problem.n == 0) return;
    problem.type = type_of<T>();
    problem.out = type_of<Out>();
    problem.align_a = alignment(a);
    problem.align_b = alignment(b);
    problem.align_c = alignment(c);
    problem.align_bias = bias == nullptr ? 0 : alignment(bias);
    device_.make_current();
    auto const handle = stream.get();
    if (!bound_) bound_ = handle;
    FSDP_EXPECTS(*bound_ == handle, "a Gemm serves one stream: make another for the second");
    Plan& plan = plan_for(problem, bias);
    if (plan.by_cublas) return multiply_by_cublas<T, Out>(stream, problem, alpha, a, b, beta, c, bias);
    if (bias != nullptr) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void const*>(bias));
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatmul(handle_.get(), &plan.product, &alpha, b, &plan.first, a, &plan.second,
                                            &beta, c, &plan.result, c, &plan.result, &plan.algorithm, workspace_.get(),
                                            workspace_bytes_, handle));
  }

  /// See [Note: Products that cuBLASLt declines].
  template <class T, class Out>
  void multiply_by_cublas(Stream& stream, Problem const& p, GemmScalar<Out> alpha, T const* a, T const* b,
                          GemmScalar<Out> beta, Out* c, Out const* bias) {
    if (!blas_) open_cublas(stream.get());
    if (bias != nullptr) {
      device_.launch(stream, p.m, detail::RepeatRow{}, bias, p.n, c, p.ldc);
      beta = 1;
    }
    bool const wide = p.type == CUDA_R_64F;
    auto const status = cublasGemmStridedBatchedEx_64(
        blas_.get(), operation(p.transposed_b), operation(p.transposed_a), p.n, p.m, p.k, &alpha, b, type_of<T>(),
        p.ldb, p.stride_b, a, type_of<T>(), p.lda, p.stride_a, &beta, c, type_of<Out>(), p.ldc, p.stride_c, p.batch,
        wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS)
      fail_product("cuBLASLt has no algorithm for a matrix product, and cuBLAS fails", status, p);
  }

  [[noreturn]] void fail_product(std::string_view what, cublasStatus_t status, Problem const& p) const {
    static_cast<void>(cudaGetLastError());
    fsdp::fail<fsdp::VendorError>(
        "{} ({}): batch {}, m {}, n {}, k {}, leading dimensions {}, {} and {}, transposed {} and {}, cudaDataType {} "
        "to {}, pointers aligned to {}, {} and {} bytes, bias aligned to {} bytes (0: no bias), workspace of {} bytes",
        what, cublasGetStatusString(status), p.batch, p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.transposed_a != 0,
        p.transposed_b != 0, p.type, p.out, p.align_a, p.align_b, p.align_c, p.align_bias, workspace_bytes_);
  }

  void open_cublas(cudaStream_t stream) {
    cublasHandle_t handle = nullptr;
    TRANSFORMER_CUBLAS_CHECK(cublasCreate(&handle));
    UniqueCublas blas(handle);
    TRANSFORMER_CUBLAS_CHECK(cublasSetStream(handle, stream));  // before the workspace, which it takes away
    if (workspace_bytes_ > 0) TRANSFORMER_CUBLAS_CHECK(cublasSetWorkspace(handle, workspace_.get(), workspace_bytes_));
    TRANSFORMER_CUBLAS_CHECK(cublasSetMathMode(
        handle, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    blas_ = std::move(blas);
  }

  static cublasOperation_t operation(std::int64_t transposed) { return transposed != 0 ? CUBLAS_OP_T : CUBLAS_OP_N; }

  Plan& plan_for(Problem const& problem, void const* bias) {
    auto const [at, fresh] = plans_.try_emplace(problem);
    if (!fresh) return at->second;
    try {
      prepare(at->second, problem, bias);
    } catch (...) {
      plans_.erase(at);
      throw;
    }
    return at->second;
  }

  void prepare(Plan& plan, Problem const& p, void const* bias) const {
    // Row-major C is column-major C^T = op_b(B)^T op_a(A)^T, and a row-major operand read by columns is its transpose:
    // swapping the operands is all there is to do.
    bool const wide = p.type == CUDA_R_64F;
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatmulDescInit(&plan.product, wide ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                                    wide ? CUDA_R_64F : CUDA_R_32F));
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, std::int32_t{operation(p.transposed_b)});
    set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, std::int32_t{operation(p.transposed_a)});
    if (bias != nullptr) {  // the heuristic looks at the pointer's alignment
      set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, std::uint32_t{CUBLASLT_EPILOGUE_BIAS});
      set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
      set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(p.out));
    }
    bool const ta = p.transposed_a != 0, tb = p.transposed_b != 0;
    lay_out(plan.first, p.type, tb ? p.k : p.n, tb ? p.n : p.k, p.ldb, p.batch, p.stride_b);
    lay_out(plan.second, p.type, ta ? p.m : p.k, ta ? p.k : p.m, p.lda, p.batch, p.stride_a);
    lay_out(plan.result, p.out, p.n, p.m, p.ldc, p.batch, p.stride_c);

    plan.by_cublas = !find_algorithm(plan, p, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) &&
                     !find_algorithm(plan, p, CUBLASLT_REDUCTION_SCHEME_MASK);
  }

  /// Whether there is an algorithm among those that put parts of sums together by one of `schemes`.
  bool find_algorithm(Plan& plan, Problem const& p, std::uint32_t schemes) const {
    cublasLtMatmulPreferenceOpaque_t wish{};
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&wish));
    set(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(workspace_bytes_));
    set(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(p.align_b));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(p.align_a));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(p.align_c));
    set(wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(p.align_c));
    std::array<cublasLtMatmulHeuristicResult_t, 8> found{};
    int count = 0;
    auto const status =
        cublasLtMatmulAlgoGetHeuristic(handle_.get(), &plan.product, &plan.first, &plan.second, &plan.result,
                                       &plan.result, &wish, static_cast<int>(found.size()), found.data(), &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
    if (status != CUBLAS_STATUS_SUCCESS)
      fail_product("cuBLASLt cannot choose an algorithm for a matrix product", status, p);
    for (int i = 0; i < count; ++i) {
      auto const& candidate = found[static_cast<std::size_t>(i)];
      if (candidate.state != CUBLAS_STATUS_SUCCESS || candidate.workspaceSize > workspace_bytes_) continue;
      plan.algorithm = candidate.algo;
      return true;
    }
    return false;
  }

  static void lay_out(cublasLtMatrixLayoutOpaque_t& layout, std::int64_t type, std::int64_t rows, std::int64_t columns,
                      std::int64_t leading, std::int64_t batch, std::int64_t stride) {
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&layout, static_cast<cudaDataType>(type),
                                                      static_cast<std::uint64_t>(rows),
                                                      static_cast<std::uint64_t>(columns), leading));
    if (batch == 1) return;
    set(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<std::int32_t>(batch));
    set(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }

  template <class Value>
  static void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t attribute, Value const& value) {
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
  }
  template <class Value>
  static void set(cublasLtMatrixLayoutOpaque_t& layout, cublasLtMatrixLayoutAttribute_t attribute, Value const& value) {
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(&layout, attribute, &value, sizeof value));
  }
  template <class Value>
  static void set(cublasLtMatmulPreferenceOpaque_t& wish, cublasLtMatmulPreferenceAttributes_t attribute,
                  Value const& value) {
    TRANSFORMER_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&wish, attribute, &value, sizeof value));
  }

  fsdp::cuda::Device device_;
  std::size_t workspace_bytes_;
  std::unique_ptr<void, Free> workspace_;
  UniqueCublasLt handle_;
  UniqueCublas blas_;  // opened when it is needed
  std::unordered_map<Problem, Plan, Hash> plans_;
  std::optional<cudaStream_t> bound_;
};

}  // namespace transformer
