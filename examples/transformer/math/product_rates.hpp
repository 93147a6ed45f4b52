// SPDX-License-Identifier: Apache-2.0
// Rates of a rank's matrix products on the host in fp32 and bf16, and the type to prefer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace transformer {

/// Rates of a rank's products on the host, FLOP per second.
struct ProductRates {
  double fp32 = 0;
  double bf16 = 0;
  std::string why_no_bf16{};  ///< empty: it has units for bf16
  bool settled = true;        ///< several measurements of each type agree
  bool remembered = false;    ///< measured by an earlier run
};

/// Products of bf16 must be this many times as fast as those of fp32. A step is more than products, and the rest takes
/// longer in bf16 on a host, which rounds every result: a run in bf16 gains less than its products do.
inline constexpr double least_gain_of_bf16 = 1.25;

/// The element type in which ranks with these rates train fastest: float32 unless bfloat16 is clearly faster.
inline std::string_view fastest_type(ProductRates const& rates) {
  bool const known = rates.why_no_bf16.empty() && rates.settled && rates.bf16 > 0;
  return known && rates.bf16 >= least_gain_of_bf16 * rates.fp32 ? "bfloat16" : "float32";
}

/// [Note: Rates that are compared are measured in turns]
/// Other work on the machine comes and goes within tenths of a second, and takes any part of a rate. Measured one after
/// the other, one type has met it and the other has not. So both types take turns, in short rounds, and the best round
/// of each counts. It counts only once four rounds of the type are within 3 % of it: other work lowers rates by
/// different amounts, so rounds that agree were not disturbed. On a machine that never lets four agree, the rates are
/// not settled.
/// @param fp32,bf16  a round: its highest rate
template <class Fp32, class Bf16>
ProductRates compare_rates(Fp32&& fp32, Bf16&& bf16) {
  constexpr std::size_t least = 12, most = 60, alike = 4;
  std::vector<double> wide, narrow;
  auto const best = [](std::vector<double> const& rates) { return *std::max_element(rates.begin(), rates.end()); };
  auto const agree = [&](std::vector<double> const& rates) {
    double const bound = 0.97 * best(rates);
    return std::count_if(rates.begin(), rates.end(), [&](double rate) { return rate >= bound; }) >=
           static_cast<std::ptrdiff_t>(alike);
  };
  bool settled = false;
  while (wide.size() < least || (!settled && wide.size() < most)) {
    wide.push_back(fp32());
    narrow.push_back(bf16());
    settled = agree(wide) && agree(narrow);
  }
  return {best(wide), best(narrow), {}, settled, false};
}

/// A rank's rates between ranks, as a text.
std::string pack(ProductRates const& rates);

/// The rates of all ranks together: the lowest ones, as a step takes as long as its slowest rank; no bf16 if one has
/// none.
/// @param texts  every rank's, packed: all ranks get the same from the same texts
ProductRates slowest_of(std::vector<std::string> const& texts);

/// The choice and its reason, for the run's first lines.
std::string describe(ProductRates const& rates);

/// The file of the cache folder that keeps rates; nothing where there is no cache folder.
std::optional<std::filesystem::path> rates_file();

/// The rates that an earlier run measured on such a machine.
/// @param machine  what they depend on: processor, libraries, threads
std::optional<ProductRates> remembered_rates(std::string const& machine);

/// Keeps settled rates for later runs; a folder that cannot be written is no error.
void remember_rates(std::string const& machine, ProductRates const& rates);

}  // namespace transformer
