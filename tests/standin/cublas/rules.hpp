// SPDX-License-Identifier: Apache-2.0
// The rules of cuBLASLt, and of the part of cuBLAS that nanogpt uses, that the stand-in holds programs to.
#pragma once

#include <array>

#include "tests/standin/runtime/rules.hpp"

/// Sources: "cuBLAS" is NVIDIA's cuBLAS documentation (13.0), by section; "cublasLt.h" the comments of that header
/// (13.0). "strict" means that cuBLAS allows it, or leaves it undefined, and the stand-in does not.
namespace standin::cublas::rule {

inline constexpr Rule handle{"cublas_handle", "a handle is used between its creation and its destruction",
                             "cuBLAS, cuBLAS Context; cublasLtCreate(), cublasLtDestroy()"};
inline constexpr Rule device{
    "cublas_device",
    "the device that was current when a handle was created is current at its calls, and the stream is of it",
    "cuBLAS, cuBLAS Context"};
inline constexpr Rule descriptor{
    "cublas_descriptor", "descriptors are initialised before they are used, in memory of their size",
    "cuBLAS, cublasLtMatmulDescInit(), cublasLtMatrixLayoutInit(), cublasLtMatmulPreferenceInit()"};
inline constexpr Rule attribute{"cublas_attribute",
                                "an attribute is given with the size of its type, and has a value of it; strict for "
                                "attributes that the stand-in does not know",
                                "cuBLAS, cublasLtMatmulDescSetAttribute() and its sisters; cublasLt.h, each attribute"};
inline constexpr Rule types{
    "cublas_types",
    "compute type, scale type and the matrices types are a row of the table of regular matrices; strict for integers, "
    "fp8, complex numbers, TF32 and sums in fp16, which the stand-in does not compute",
    "cuBLAS, cublasLtMatmul(), cublasGemmStridedBatchedEx(), cublasSetMathMode()"};
inline constexpr Rule epilogue{
    "cublas_epilogue",
    "a bias has the type of D and is given with the epilogue that adds it; strict for other epilogues and for fp64",
    "cuBLAS, cublasLtEpilogue_t; cublasLtMatmul(), column of bias types"};
inline constexpr Rule order{"cublas_order", "matrices are stored by columns", "strict; cuBLAS, cublasLtOrder_t"};
inline constexpr Rule shape{
    "cublas_shape", "extents are positive, fit in 32 bits and fit each other; a leading dimension is at least the rows",
    "cublasLt.h, CUBLASLT_MATRIX_LAYOUT_ROWS, _COLS and _LD; cuBLAS, cublasGemmEx(); strict for extents of 0"};
inline constexpr Rule batch{
    "cublas_batch", "all matrices have one batch count, and no two matrices of D share an element",
    "cublasLt.h, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT and _STRIDED_BATCH_OFFSET; cuBLAS, cublasGemmStridedBatchedEx()"};
inline constexpr Rule overlap{
    "cublas_overlap", "D is C in the same layout, or shares no element with it, and none with A, B and the bias",
    "cuBLAS, cublasLtMatmul(), on operations in place"};
inline constexpr Rule alignment{
    "cublas_alignment", "addresses have the alignment of their elements, and the one that the heuristic was promised",
    "cublasLt.h, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_*_BYTES, CUBLASLT_MATMUL_DESC_BIAS_POINTER"};
inline constexpr Rule workspace{"cublas_workspace",
                                "a workspace has the bytes that the algorithm asks for and begins at a multiple of 256",
                                "cuBLAS, cublasLtMatmul(), cublasSetWorkspace()"};
inline constexpr Rule lost_workspace{"cublas_lost_workspace",
                                     "the workspace of a handle is set after its stream, which takes it away",
                                     "cuBLAS, cublasSetStream(); strict: the library goes on with its own"};
inline constexpr Rule algorithm{
    "cublas_algorithm",
    "an algorithm comes from a result of the heuristic whose state is success, and serves the problem that it was "
    "found for",
    "cuBLAS, cublasLtMatmulAlgoGetHeuristic(); strict for problems that cublasLtMatmulAlgoCheck() would accept it for"};
inline constexpr Rule scalars{"cublas_scalars", "alpha and beta are there, on the host",
                              "cuBLAS, cublasLtMatmul(); strict for pointers to device memory"};

/// All of them.
inline constexpr std::array all{handle, device,  descriptor, attribute, types,          epilogue,  order,  shape,
                                batch,  overlap, alignment,  workspace, lost_workspace, algorithm, scalars};

}  // namespace standin::cublas::rule
