// SPDX-License-Identifier: Apache-2.0
// The stand-in for cuBLAS and cuBLASLt, as tests see it: what it shall find, and what it was asked for. Programs under
// test call NVIDIA's functions.
#pragma once

#include <cstdint>

namespace standin::cublas {

/// Which algorithms heuristics have.
enum class Algorithms : unsigned char {
  every,                ///< all that this stand-in knows, of those that the preference allows
  none_under_the_mask,  ///< none while a preference excludes a scheme of reduction
  none                  ///< never any: cuBLASLt serves no product
};

struct Settings {
  Algorithms algorithms = Algorithms::every;
  bool gemm_ex = true;  ///< false: cublasGemmStridedBatchedEx_64 answers CUBLAS_STATUS_NOT_SUPPORTED
};
/// Holds from now on, for every thread.
void configure(Settings const& settings);

/// Calls that succeeded, since the program began.
struct Calls {
  std::int64_t heuristics = 0;  ///< that found something
  std::int64_t products = 0;    ///< of cublasLtMatmul
  std::int64_t gemm_ex = 0;     ///< of cublasGemmStridedBatchedEx_64
};
Calls calls();

/// Handles of both kinds that were created and not destroyed.
std::int64_t live_handles();

}  // namespace standin::cublas
