// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/bench_variants.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "transformer/report/metrics.hpp"
#include "transformer/run/table.hpp"

namespace transformer {
namespace {

auto const recomputation = &Settings::activation_checkpointing;

double gigabytes(std::int64_t bytes) { return static_cast<double>(bytes) / 1e9; }

}  // namespace

void print_variants_head() {
  fmt::print("{:>10}  {:>24}  {:>10}  {:>10}  {:>14}  {:>14}\n", "batch_size", name_of(recomputation), "s a step",
             "tokens/s", "GB by fsdp", "GB by process");
  std::fflush(stdout);
}

void print_too_large(Settings const& settings, std::vector<std::string> const& fits) {
  auto const small = std::find_if(fits.begin(), fits.end(), [](auto const& text) { return !text.empty(); });
  fmt::print("{:>10}  {:>24}  does not fit: rank {} needs {:.3f} GB, and has {:.3f} GB\n", settings.batch_size,
             settings.*recomputation, small - fits.begin(), std::strtod(small->c_str(), nullptr) / 1e9,
             std::strtod(small->c_str() + small->find(' '), nullptr) / 1e9);
  std::fflush(stdout);
}

void print_variant(Settings const& settings, VariantResult const& result, JsonLog& log) {
  auto const [seconds, bytes, largest_pss] = result;
  auto const tokens = static_cast<double>(settings.tokens_per_step());
  fmt::print("{:>10}  {:>24}  {:>10.4f}  {:>10}  {:>14.3f}  {:>14.3f}\n", settings.batch_size, settings.*recomputation,
             seconds, with_commas(std::llround(tokens / seconds)), gigabytes(bytes), gigabytes(largest_pss));
  std::fflush(stdout);
  log.write_or_fail(fmt::format(
      R"({{"batch_size":{},"{}":"{}","ranks":{},"device":"{}","dtype":"{}","time_s":{:.17g},"tokens_per_s":{:.17g},)"
      R"("bytes":{},"pss_bytes_max":{}}})",
      settings.batch_size, name_of(recomputation), settings.*recomputation, settings.ranks, settings.device,
      settings.dtype, seconds, tokens / seconds, bytes, largest_pss));
}

}  // namespace transformer
