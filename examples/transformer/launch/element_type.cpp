// SPDX-License-Identifier: Apache-2.0
#include "transformer/launch/element_type.hpp"

#include <string_view>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/math/product_rates.hpp"
#if TRANSFORMER_HAVE_ONEDNN
#include <cblas.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "fsdp/host.hpp"
#include "transformer/math/bf16_products.hpp"
#include "transformer/math/fp32_products.hpp"
#include "transformer/report/log_lines.hpp"
#endif

namespace transformer {
namespace {

/// Why this program computes nothing in bf16 on this processor; empty if it does.
std::string why_no_bf16() {
#if TRANSFORMER_HAVE_ONEDNN
  if (!bf16_units().empty()) return {};
  return "this processor has no bf16 instructions (AMX or AVX-512 BF16) that oneDNN can use";
#else
  return "this program was built without oneDNN, which bf16 on cpu needs (on Debian: libdnnl-dev)";
#endif
}

#if TRANSFORMER_HAVE_ONEDNN
constexpr std::int64_t length = 384;  // of a product's matrices: it takes about 1 ms, less than a slice of time

/// Rates of products that each thread makes by itself, without a wait between them: a thread that has lost its core for
/// a while has other products that it did not lose it in.
class Products {
 public:
  explicit Products(int threads) : team_("rates", threads), best_(static_cast<std::size_t>(threads)) {
    openblas_set_num_threads(1);
    for (int i = 0; i < threads; ++i) matrices_.emplace_back();
  }

  double fp32() {
    return round([](Matrices& m) {
      constexpr auto n = length;
      if (has_fp32_products())
        multiply_fp32({Op::none, Op::none, n, n, n, n, n, n, false}, m.a.data(), m.b.data(), m.c.data());
      else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1.0f, m.a.data(), n, m.b.data(), n, 0.0f,
                    m.c.data(), n);
    });
  }
  double bf16() {
    double const rate = round([](Matrices& m) {
      constexpr auto n = length;
      m.multiplied = multiply_bf16({Op::none, Op::none, n, n, n, n, n, n, false, false}, m.narrow_a.data(),
                                   m.narrow_b.data(), m.narrow_c.data());
    });
    bool const multiplied = std::all_of(matrices_.begin(), matrices_.end(), [](auto const& m) { return m.multiplied; });
    return multiplied ? rate : 0;
  }

 private:
  struct Matrices {
    static constexpr std::size_t size = static_cast<std::size_t>(length * length);
    std::vector<float> a = std::vector(size, 1.0f), b = std::vector(size, 0.5f), c = std::vector(size, 0.0f);
    bool multiplied = true;
    std::vector<fsdp::bf16> narrow_a{a.begin(), a.end()}, narrow_b{b.begin(), b.end()}, narrow_c{c.begin(), c.end()};
  };

  /// FLOP per second of all threads, by their shortest product.
  template <class Product>
  double round(Product const& product) {
    using Clock = std::chrono::steady_clock;
    constexpr std::chrono::milliseconds span{6};
    team_.run(team_.threads(), [&](std::int64_t part) {
      auto const i = static_cast<std::size_t>(part);
      auto best = Clock::duration::max();
      auto const begin = Clock::now();
      do {
        auto const start = Clock::now();
        product(matrices_[i]);
        best = std::min(best, Clock::now() - start);
      } while (Clock::now() - begin < span);
      best_[i] = best;
    });
    // Of the thread that nobody disturbed: that all of them had their cores at once is rare beside other work.
    auto const best = std::chrono::duration<double>(*std::min_element(best_.begin(), best_.end())).count();
    return 2.0 * static_cast<double>(length * length * length * team_.threads()) / best;
  }

  fsdp::host::Team team_;
  std::deque<Matrices> matrices_;
  std::vector<std::chrono::steady_clock::duration> best_;
};
#endif

/// This rank's rates: an earlier run's, or measured now and kept.
ProductRates rates_here([[maybe_unused]] Job const& job) {
  ProductRates rates{0, 0, why_no_bf16()};
#if TRANSFORMER_HAVE_ONEDNN
  if (!rates.why_no_bf16.empty()) return rates;
  auto const machine =
      fmt::format("{}, {} by oneDNN {}, {}, {} thread{}", processor_name(), bf16_units(), onednn_version(),
                  has_fp32_products() ? "own fp32" : openblas_get_corename(), job.threads, job.threads == 1 ? "" : "s");
  if (!job.settings.measure_dtype)
    if (auto const known = remembered_rates(machine)) return *known;
  Products products(job.threads);
  rates = compare_rates([&] { return products.fp32(); }, [&] { return products.bf16(); });
  remember_rates(machine, rates);
#endif
  return rates;
}

}  // namespace

void choose_dtype(Job& job, std::string const& saved) {
  bool const host = job.device == "cpu";
  auto const& asked = job.settings.dtype;
  if (asked == "float16")
    fsdp::fail<fsdp::ConfigError>(
        "setting 'dtype': float16 needs loss scaling, which {} does not have yet: expected bfloat16 or float32, "
        "got float16",
        program_name);
  std::string const otherwise = host ? "float32" : "bfloat16";
  bool const free = asked.empty() || asked == "fastest";
  job.dtype = !free            ? asked
              : !saved.empty() ? saved
              : asked.empty()  ? otherwise
                               : std::string(host ? "fastest" : "bfloat16");
  if (free && !saved.empty() && (saved != otherwise || asked == "fastest"))
    job.dtype_note =
        fmt::format("this run computes in {}, as the run in '{}' has done so far", saved, job.settings.out_dir);
  if (host && job.dtype == "bfloat16") {
    if (auto const why = why_no_bf16(); !why.empty()) {
      job.dtype = "float32";
      job.dtype_note = why + "; this run computes in float32";
    }
  }
  if (!saved.empty() && saved != job.dtype)
    job.dtype_note += fmt::format("{}the run in '{}' has computed in {} so far, and continues in {}",
                                  job.dtype_note.empty() ? "" : "; ", job.settings.out_dir, saved, job.dtype);
}

void take_fastest_type(Job& job, ExchangeTexts const& exchange) {
  if (job.dtype != "fastest") return;
  auto const rates = slowest_of(exchange(pack(rates_here(job))));
  job.dtype = fastest_type(rates);
  job.dtype_note = describe(rates);
}

}  // namespace transformer
