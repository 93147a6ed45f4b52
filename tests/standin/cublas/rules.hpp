// SPDX-License-Identifier: Apache-2.0
// The rules that a program breaks in a report of this stand-in. "cuBLAS" is NVIDIA's cuBLAS documentation (CUDA 13),
// "header" the comments of cublasLt.h.
#pragma once

#include <string_view>

namespace standin::cublas::rule {

/// A handle was created and is not destroyed yet. cuBLAS, "cuBLAS Context" and cublasLtCreate().
inline constexpr std::string_view handle = "cublas handle";
/// A handle serves the device that was current at its creation, which is current at every call, and whose stream is
/// given. cuBLAS, "cuBLAS Context".
inline constexpr std::string_view device = "cublas device";
/// A descriptor was initialised before it is used. cuBLAS, cublasLtMatmulDescInit(), cublasLtMatrixLayoutInit(),
/// cublasLtMatmulPreferenceInit().
inline constexpr std::string_view descriptor = "cublas descriptor";
/// An attribute is one that exists, is given with the size of its type, and has a value of its type. cuBLAS,
/// cublasLtMatmulDescSetAttribute() and its sisters; header, each attribute.
inline constexpr std::string_view attribute = "cublas attribute";
/// Compute type, scale type and the matrices' types are a row of the table of regular matrices. cuBLAS,
/// cublasLtMatmul(). Rows that this stand-in does not compute (integers, fp8, complex, TF32, sums in fp16) are refused
/// too.
inline constexpr std::string_view types = "cublas types";
/// A bias is given with the epilogue that adds it, in D's type. cuBLAS, cublasLtEpilogue_t, and the bias column of the
/// table in cublasLtMatmul(). Other epilogues are not computed here.
inline constexpr std::string_view epilogue = "cublas epilogue";
/// Matrices are stored by columns. Not a limit of cuBLASLt, but of this stand-in.
inline constexpr std::string_view order = "cublas order";
/// Extents are positive, fit in 32 bits and fit each other; a leading dimension is at least the rows. header,
/// CUBLASLT_MATRIX_LAYOUT_ROWS, _COLS and _LD; cuBLAS, cublasGemmStridedBatchedEx().
inline constexpr std::string_view shape = "cublas shape";
/// All matrices have one batch count; no two matrices of D share an element. header,
/// CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT and _STRIDED_BATCH_OFFSET; cuBLAS, cublasGemmStridedBatchedEx(), on overlaps.
inline constexpr std::string_view batch = "cublas batch";
/// D is C with the same layout, or shares no element with C; it shares none with A, B and the bias, which are read in
/// no known order. cuBLAS, cublasLtMatmul(), on in-place products.
inline constexpr std::string_view overlap = "cublas overlap";
/// Addresses have the alignment of their elements, and the one that the heuristic was promised. header,
/// CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_*_BYTES and CUBLASLT_MATMUL_DESC_BIAS_POINTER.
inline constexpr std::string_view alignment = "cublas alignment";
/// A workspace has the bytes that the algorithm asks for and begins at a multiple of 256. cuBLAS, cublasLtMatmul() and
/// cublasSetWorkspace().
inline constexpr std::string_view workspace = "cublas workspace";
/// cublasSetStream() takes a handle's workspace away, so the stream comes first. cuBLAS, cublasSetStream().
inline constexpr std::string_view lost_workspace = "cublas lost workspace";
/// An algorithm comes from a result of the heuristic whose state is success, and is used for the problem that it was
/// found for. cuBLAS, cublasLtMatmulAlgoGetHeuristic(). cuBLASLt lets it serve others that pass
/// cublasLtMatmulAlgoCheck(), which nothing here calls.
inline constexpr std::string_view algorithm = "cublas algorithm";
/// alpha and beta are there, on the host as the pointer mode says. cuBLAS, cublasLtMatmul().
inline constexpr std::string_view scalars = "cublas scalars";

}  // namespace standin::cublas::rule
