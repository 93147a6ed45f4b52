// SPDX-License-Identifier: Apache-2.0
// cuBLASLt's structures for operations, layouts and preferences, in the caller's memory.
#include <type_traits>

#include "fsdp/detail/base/format.hpp"
#include "problem.hpp"
#include "rules.hpp"

using namespace standin::cublas;

namespace {

/// Where an attribute is kept: sizes in cublasLt.h are those of these members.
struct Place {
  void* member;
  std::size_t bytes;
};
template <class T>
Place place(T& member) {
  return {&member, sizeof member};
}

Place place_of(Layout& layout, cublasLtMatrixLayoutAttribute_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return place(layout.type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER: return place(layout.order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return place(layout.rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return place(layout.columns);
    case CUBLASLT_MATRIX_LAYOUT_LD: return place(layout.leading);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return place(layout.batch);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return place(layout.stride);
    default: return {nullptr, 0};
  }
}
Place place_of(Operation& operation, cublasLtMatmulDescAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return place(operation.compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return place(operation.scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE: return place(operation.pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA: return place(operation.transpose_a);
    case CUBLASLT_MATMUL_DESC_TRANSB: return place(operation.transpose_b);
    case CUBLASLT_MATMUL_DESC_TRANSC: return place(operation.transpose_c);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return place(operation.epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return place(operation.bias);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return place(operation.bias_stride);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return place(operation.bias_type);
    default: return {nullptr, 0};
  }
}
Place place_of(Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute) {
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return place(preference.search_mode);
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return place(preference.workspace_bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return place(preference.reduction_mask);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return place(preference.align_a);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return place(preference.align_b);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return place(preference.align_c);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return place(preference.align_d);
    default: return {nullptr, 0};
  }
}

bool has_meaning(Layout const& layout) { return layout.order >= CUBLASLT_ORDER_COL; }
bool has_meaning(Operation const& operation) {
  auto const is_operation = [](std::int32_t value) { return value >= CUBLAS_OP_N && value <= CUBLAS_OP_C; };
  return is_operation(operation.transpose_a) && is_operation(operation.transpose_b) &&
         is_operation(operation.transpose_c);
}
bool has_meaning(Preference const& preference) {
  auto const is_power_of_two = [](std::uint32_t value) { return value != 0 && (value & (value - 1)) == 0; };
  return preference.search_mode == CUBLASLT_SEARCH_BEST_FIT &&
         preference.reduction_mask <= CUBLASLT_REDUCTION_SCHEME_MASK && is_power_of_two(preference.align_a) &&
         is_power_of_two(preference.align_b) && is_power_of_two(preference.align_c) &&
         is_power_of_two(preference.align_d);
}

template <class Contents, class Opaque, class Attribute>
cublasStatus_t set(char const* call, Opaque* opaque, Attribute attribute, void const* value, std::size_t bytes) {
  auto const invalid = [&](standin::Rule const& rule, std::string const& what) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule,
                  fsdp::formatted("{}, attribute {}: {}", call, static_cast<int>(attribute), what));
  };
  if (opaque == nullptr) return invalid(rule::descriptor, "no descriptor");
  auto contents = contents_of<Contents>(opaque);
  if (contents.tag != Contents::own_tag) return invalid(rule::descriptor, "the descriptor was not initialised");
  auto const to = place_of(contents, attribute);
  if (to.member == nullptr) return invalid(rule::attribute, "none that this stand-in knows");
  if (value == nullptr) return invalid(rule::attribute, "no value");
  if (bytes != to.bytes)
    return invalid(rule::attribute, fsdp::formatted("a value of {} bytes where {} are expected", bytes, to.bytes));
  std::memcpy(to.member, value, bytes);
  if (!has_meaning(contents)) return invalid(rule::attribute, "a value without a meaning");
  write_contents(opaque, contents);
  return CUBLAS_STATUS_SUCCESS;
}

template <class Contents, class Opaque>
cublasStatus_t initialise(char const* call, Opaque* opaque, std::size_t bytes, Contents const& contents) {
  if (opaque == nullptr || bytes < sizeof(Opaque))
    return refuse(
        CUBLAS_STATUS_ALLOC_FAILED, rule::descriptor,
        fsdp::formatted("{}: {} bytes where {} are expected", call, opaque == nullptr ? 0 : bytes, sizeof(Opaque)));
  std::memset(opaque, 0, sizeof *opaque);
  write_contents(opaque, contents);
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld) {
  Layout contents;
  contents.type = type;
  contents.rows = rows;
  contents.columns = cols;
  contents.leading = ld;
  return initialise("cublasLtMatrixLayoutInit", layout, size, contents);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attr,
                                                void const* buf, size_t sizeInBytes) {
  return set<Layout>("cublasLtMatrixLayoutSetAttribute", layout, attr, buf, sizeInBytes);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t operation, size_t size,
                                               cublasComputeType_t computeType, cudaDataType_t scaleType) {
  Operation contents;
  contents.compute = computeType;
  contents.scale = scaleType;
  return initialise("cublasLtMatmulDescInit", operation, size, contents);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attr,
                                              void const* buf, size_t sizeInBytes) {
  return set<Operation>("cublasLtMatmulDescSetAttribute", operation, attr, buf, sizeInBytes);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size) {
  return initialise("cublasLtMatmulPreferenceInit", preference, size, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr, void const* buf,
                                                    size_t sizeInBytes) {
  return set<Preference>("cublasLtMatmulPreferenceSetAttribute", preference, attr, buf, sizeInBytes);
}

}  // extern "C"
