// SPDX-License-Identifier: Apache-2.0
// The arguments of a call: the contents of cuBLASLt's opaque structures, and the operands.
#pragma once

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "rules.hpp"

namespace standin::cublas {

/// First word of a structure that was initialised.
enum class Tag : std::uint32_t {
  layout = 0x4c61796fu,
  operation = 0x4f706572u,
  preference = 0x50726566u,
  algorithm = 0x416c676fu
};

struct Layout {
  static constexpr Tag own_tag = Tag::layout;
  Tag tag = own_tag;
  std::int32_t type = CUDA_R_32F, order = CUBLASLT_ORDER_COL, batch = 1;
  std::uint64_t rows = 0, columns = 0;
  std::int64_t leading = 0, stride = 0;  // elements
  bool operator==(Layout const&) const = default;

  std::int64_t element_bytes() const { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
  /// From the first element to behind the last of all matrices. @pre the layout is right
  std::int64_t bytes() const {
    auto const last = (batch - 1) * stride + (static_cast<std::int64_t>(columns) - 1) * leading;
    return (last + static_cast<std::int64_t>(rows)) * element_bytes();
  }
};

struct Operation {
  static constexpr Tag own_tag = Tag::operation;
  Tag tag = own_tag;
  std::int32_t compute = CUBLAS_COMPUTE_32F, scale = CUDA_R_32F, pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  std::int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N, transpose_c = CUBLAS_OP_N;
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  void const* bias = nullptr;
  std::int64_t bias_stride = 0;
  std::int32_t bias_type = -1;  // -1: D's

  bool adds_bias() const { return epilogue == CUBLASLT_EPILOGUE_BIAS; }
};

struct Preference {
  static constexpr Tag own_tag = Tag::preference;
  Tag tag = own_tag;
  std::uint32_t search_mode = CUBLASLT_SEARCH_BEST_FIT;
  std::uint64_t workspace_bytes = 0;
  std::uint32_t reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
};

/// How a product is computed. All members are written by the heuristic, none by programs.
struct Algorithm {
  static constexpr Tag own_tag = Tag::algorithm;
  Tag tag = own_tag;
  std::int32_t splits = 1;                                   ///< parts that the sum over k is cut into
  std::uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE;  ///< how they are put together
  std::uint16_t align_a = 1, align_b = 1, align_c = 1, align_d = 1, align_bias = 1;  ///< bytes, promised
  std::uint64_t workspace_bytes = 0;
  std::uint64_t problem = 0;  ///< fingerprint of what it was found for
};

/// Contents of an opaque structure, and back. They are copied: the structures are arrays of numbers.
template <class Contents, class Opaque>
Contents contents_of(Opaque const* opaque) {
  static_assert(sizeof(Contents) <= sizeof(Opaque) && std::is_trivially_copyable_v<Contents>);
  Contents contents;
  std::memcpy(static_cast<void*>(&contents), opaque, sizeof contents);
  return contents;
}
template <class Contents, class Opaque>
void write_contents(Opaque* opaque, Contents const& contents) {
  static_assert(sizeof(Contents) <= sizeof(Opaque) && std::is_trivially_copyable_v<Contents>);
  std::memcpy(opaque, &contents, sizeof contents);
}

/// D = alpha op(A) op(B) + beta C, with addresses where they are known. "D = A B" in reports.
struct Problem {
  std::string_view call;  ///< the function's name, for reports
  Operation operation;
  Layout a, b, c, d;
  void const *data_a = nullptr, *data_b = nullptr, *data_c = nullptr;
  void* data_d = nullptr;
  double alpha = 1, beta = 0;

  std::int64_t m() const { return static_cast<std::int64_t>(d.rows); }
  std::int64_t n() const { return static_cast<std::int64_t>(d.columns); }
  std::int64_t k() const {
    return static_cast<std::int64_t>(operation.transpose_a == CUBLAS_OP_N ? a.columns : a.rows);
  }
  std::string text() const;
  /// A key of everything that an algorithm depends on, except the addresses.
  std::uint64_t fingerprint() const;
};

/// Reports a broken rule. @return `status`, for the case that the report comes back
cublasStatus_t refuse(cublasStatus_t status, Rule const& rule, std::string const& text);

/// The rules that hold without addresses. @return success, or what the call returns, reported
cublasStatus_t check_problem(Problem const& problem);
/// The rules of addresses, on `device`. @pre check_problem was content
cublasStatus_t check_operands(Problem const& problem, Algorithm const& algorithm, int device);

/// Computes, on whatever thread runs the stream. @pre both checks were content, and `workspace` has the algorithm's
/// bytes
void compute(Problem const& problem, Algorithm const& algorithm, void* workspace);

/// Checks the handle's device and the stream's; checks, then enqueues the problem.
cublasStatus_t enqueue_product(Problem const& problem, Algorithm const& algorithm, int device, void* workspace,
                               std::size_t workspace_bytes, cudaStream_t stream);

}  // namespace standin::cublas
