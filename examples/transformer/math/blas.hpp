// SPDX-License-Identifier: Apache-2.0
// OpenBLAS: its kernels, and the rate of its products.
#pragma once

#include <chrono>
#include <string>

namespace transformer {

/// The BLAS that host runs use.
struct BlasInfo {
  std::string core;           ///< kernel set, such as "SkylakeX"
  bool wider_idle = false;    ///< the processor has AVX-512, the kernel set does not use it
  bool own_products = false;  ///< most products of fp32 are not OpenBLAS's: multiply_fp32 makes them
};
BlasInfo blas_info();

/// How long a rate is measured, where nothing else is said.
inline constexpr std::chrono::milliseconds usual_span{50};

/// Highest rate of fp32 matrix products on `threads` threads, each with products of its own; FLOP per second, measured
/// for about as long as `span` says.
double measure_sgemm_peak(int threads, std::chrono::milliseconds span = usual_span);

}  // namespace transformer
