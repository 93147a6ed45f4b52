// SPDX-License-Identifier: Apache-2.0
#include "transformer/math/blas.hpp"

#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/host.hpp"
#include "transformer/math/fp32_products.hpp"

namespace transformer {

BlasInfo blas_info() {
  BlasInfo info;
  info.core = openblas_get_corename();
  info.own_products = has_fp32_products();
#if defined(__x86_64__)
  bool const wide = info.core == "SkylakeX" || info.core == "Cooperlake" || info.core == "SapphireRapids";
  info.wider_idle = !wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
#endif
  return info;
}

double measure_sgemm_peak(int threads, std::chrono::milliseconds span) {
  using SteadyClock = std::chrono::steady_clock;
  constexpr int n = 512, size = n * n;
  openblas_set_num_threads(1);
  bool const own = has_fp32_products();
  fsdp::host::Team team("peak", threads);
  std::vector<float> const a(size, 1.0f), b(size, 0.5f);
  std::vector<float> c(static_cast<std::size_t>(threads) * size, 0.0f);
  auto const products = [&] {
    auto const start = SteadyClock::now();
    team.run(threads, [&](std::int64_t part) {
      float* const result = c.data() + part * size;
      if (own) {
        multiply_fp32({Op::none, Op::none, n, n, n, n, n, n, false}, a.data(), b.data(), result);
      } else {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, a.data(), n, b.data(), n, 0.0f, result,
                    n);
      }
    });
    return std::chrono::duration<double>(SteadyClock::now() - start).count();
  };
  double best = products();  // also warms up
  auto const begin = SteadyClock::now();
  while (SteadyClock::now() - begin < span) best = std::min(best, products());
  return 2.0 * n * n * n * threads / best;
}

}  // namespace transformer
