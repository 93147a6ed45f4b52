// SPDX-License-Identifier: Apache-2.0
// Rates of a rank's matrix products on the host in fp32 and bf16.
#include "transformer/math/product_rates.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "transformer/launch/cache_folder.hpp"

namespace transformer {

std::string pack(ProductRates const& rates) {
  return fmt::format("{:.17g} {:.17g} {:d} {:d} {}", rates.fp32, rates.bf16, rates.settled, rates.remembered,
                     rates.why_no_bf16);
}

ProductRates slowest_of(std::vector<std::string> const& texts) {
  ProductRates all;
  all.remembered = true;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    ProductRates one;
    std::istringstream stream(texts[rank]);
    stream >> one.fp32 >> one.bf16 >> one.settled >> one.remembered;
    stream.get();
    std::getline(stream, one.why_no_bf16);
    all.fp32 = rank == 0 ? one.fp32 : std::min(all.fp32, one.fp32);
    all.bf16 = rank == 0 ? one.bf16 : std::min(all.bf16, one.bf16);
    all.settled = all.settled && one.settled;
    all.remembered = all.remembered && one.remembered;
    if (all.why_no_bf16.empty() && !one.why_no_bf16.empty())
      all.why_no_bf16 = rank == 0 ? one.why_no_bf16 : fmt::format("rank {}: {}", rank, one.why_no_bf16);
  }
  return all;
}

std::string describe(ProductRates const& rates) {
  auto const type = fastest_type(rates);
  if (!rates.why_no_bf16.empty()) return fmt::format("this run computes in {}: {}", type, rates.why_no_bf16);
  if (!rates.settled)
    return fmt::format(
        "this run computes in {}: other work on the machine disturbed the measurement, and bfloat16 is chosen only "
        "where it is clearly faster; name a type (--dtype=bfloat16), or start again when the machine is idle",
        type);
  auto const file = rates_file();
  return fmt::format(
      "this run computes in {}: matrix products in bfloat16 are {:.2f} times as fast as in float32 here ({:.0f} "
      "against {:.0f} GFLOP/s per rank), {}",
      type, rates.bf16 / rates.fp32, rates.bf16 / 1e9, rates.fp32 / 1e9,
      rates.remembered ? fmt::format("as stored in '{}' (--measure_dtype=true measures again)",
                                     file ? file->string() : std::string())
                       : std::string("measured now"));
}

std::optional<std::filesystem::path> rates_file() {
  auto const folder = cache_folder();
  if (!folder) return std::nullopt;
  return *folder / "product_rates.json";
}

std::optional<ProductRates> remembered_rates(std::string const& machine) {
  auto const file = rates_file();
  if (!file) return std::nullopt;
  auto const answers = read_answers(*file);
  auto const found = answers.find(machine);
  if (found == answers.end() || !found->is_object()) return std::nullopt;
  auto const rate = [&](char const* name) {
    auto const value = found->find(name);
    return value != found->end() && value->is_number() ? value->get<double>() : 0;
  };
  ProductRates rates{rate("fp32"), rate("bf16"), {}, true, true};
  if (!(rates.fp32 > 0) || !(rates.bf16 > 0)) return std::nullopt;
  return rates;
}

void remember_rates(std::string const& machine, ProductRates const& rates) {
  auto const file = rates_file();
  if (!file || !rates.settled || rates.remembered || !rates.why_no_bf16.empty()) return;
  auto answers = read_answers(*file);
  answers[machine] = {{"fp32", rates.fp32}, {"bf16", rates.bf16}};
  write_answers(*file, answers);
}

}  // namespace transformer
