// SPDX-License-Identifier: Apache-2.0
// The type that ranks are the fastest in, by rates that other work on the machine does not change, and that are kept.
// skip-tsan
// links: transformer_data
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/window_order.hpp"
#include "transformer/math/product_rates.hpp"

namespace {

using namespace transformer;
using fsdp::testing::has;

}  // namespace

TEST_CASE("the fastest type is bf16 where its products are 1.25 times as fast, and there are units for it") {
  CHECK(fastest_type({100e9, 200e9, ""}) == "bfloat16");
  CHECK(fastest_type({100e9, 125.1e9, ""}) == "bfloat16");
  CHECK(fastest_type({100e9, 124.9e9, ""}) == "float32");
  CHECK(fastest_type({155e9, 88e9, ""}) == "float32");
  CHECK(fastest_type({100e9, 200e9, "no units"}) == "float32");
  CHECK(fastest_type({0, 0, "no units"}) == "float32");
  CHECK(fastest_type({0, 0, ""}) == "float32");
  CHECK(fastest_type({100e9, 300e9, "", false}) == "float32");  // rates that other work has disturbed
}

TEST_CASE("ranks choose by the slowest of them, and what one cannot none does") {
  auto const chosen = [](std::vector<ProductRates> const& ranks) {
    std::vector<std::string> texts;
    for (auto const& rates : ranks) texts.push_back(pack(rates));
    return describe(slowest_of(texts));
  };
  ProductRates const fast{100e9, 300e9, ""}, slow{80e9, 90e9, ""}, without{90e9, 0, "it has no units"};
  CHECK(chosen({fast}) ==
        "this run computes in bfloat16: matrix products in bfloat16 are 3.00 times as fast as in float32 here (300 "
        "against 100 GFLOP/s per rank), "
        "measured now");
  CHECK(chosen({fast, slow}) ==
        "this run computes in float32: matrix products in bfloat16 are 1.12 times as fast as in float32 here (90 "
        "against 80 GFLOP/s per rank), "
        "measured now");
  CHECK(chosen({slow, fast}) == chosen({fast, slow}));
  CHECK(chosen({without}) == "this run computes in float32: it has no units");
  CHECK(chosen({without, fast}) == "this run computes in float32: it has no units");
  CHECK(chosen({fast, fast, without, without}) == "this run computes in float32: rank 2: it has no units");
  auto disturbed = fast;
  disturbed.settled = false;
  CHECK(has(chosen({fast, disturbed}),
            "this run computes in float32: other work on the machine disturbed the measurement"));
  auto known = fast;
  known.remembered = true;
  CHECK(has(chosen({known, known}), "(300 against 100 GFLOP/s per rank), as stored in '"));
  CHECK(has(chosen({known, fast}), ", measured now"));
}

// Other work, as it was seen on a machine of two cores and eight programs: most rounds lose some part of their rate.
TEST_CASE("rates are those of undisturbed rounds, whichever type the disturbance has met") {
  struct Machine {
    double fp32, bf16;
    double most_lost;  ///< of a rate, by other work
    int every;         ///< so many rounds meet it
  };
  auto const compared = [](Machine const& machine, std::uint64_t seed, int& rounds) {
    auto const round = [&](double rate) {
      auto const drawn = mix(seed * 1000 + static_cast<std::uint64_t>(rounds++));
      double const lost = drawn % static_cast<std::uint64_t>(machine.every) == 0
                              ? 0
                              : machine.most_lost * static_cast<double>(drawn >> 32) / 4294967296.0;
      return rate * (1 - lost);
    };
    return compare_rates([&] { return round(machine.fp32); }, [&] { return round(machine.bf16); });
  };
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    int rounds = 0;
    CHECK(fastest_type(compared({100, 200, 0.9, 4}, seed, rounds)) == "bfloat16");
    CHECK(fastest_type(compared({100, 110, 0.9, 4}, seed, rounds = 0)) == "float32");
    CHECK(fastest_type(compared({100, 60, 0.9, 4}, seed, rounds = 0)) == "float32");
    auto const quiet = compared({100, 200, 0, 1}, seed, rounds = 0);
    CHECK(rounds == 24);
    CHECK((quiet.settled && quiet.fp32 == 100 && quiet.bf16 == 200));
  }
  // fp32 never gets the machine: its rounds do not agree, and a rate that is too low speaks for nothing.
  double slower = 100;
  int wide = 0;
  auto const never = compare_rates([&] { return ++wide, slower *= 0.9; }, [] { return 60.0; });
  CHECK_FALSE(never.settled);
  CHECK(wide == 60);
  CHECK(fastest_type(never) == "float32");
}

TEST_CASE("rates are remembered by machine, and what cannot be read or written is measured again") {
  fsdp::testing::TemporaryFolder const folder;
  ::setenv("XDG_CACHE_HOME", (folder.path / "cache").c_str(), 1);
  ProductRates const rates{100e9, 218e9};
  CHECK_FALSE(remembered_rates("this machine, 2 threads"));
  remember_rates("this machine, 2 threads", rates);
  auto const known = remembered_rates("this machine, 2 threads");
  REQUIRE(known);
  CHECK((known->fp32 == rates.fp32 && known->bf16 == rates.bf16 && known->settled && known->remembered));
  CHECK(slowest_of({pack(*known)}).remembered);
  CHECK_FALSE(remembered_rates("this machine, 1 thread"));
  remember_rates("this machine, 1 thread", {50e9, 60e9});
  CHECK(remembered_rates("this machine, 2 threads"));
  remember_rates("another", {50e9, 60e9, {}, false});
  CHECK_FALSE(remembered_rates("another"));  // not settled
  for (std::string const damaged : {"", "[]", "{\"m\": 1}", "{\"m\": {\"fp32\": \"x\", \"bf16\": 2}}",
                                    "{\"m\": {\"fp32\": 0, \"bf16\": 2}}", "{\"m\": {\"fp32\": 1}}"}) {
    std::ofstream(*rates_file()) << damaged;
    CHECK_FALSE(remembered_rates("m"));
  }
  remember_rates("m", rates);
  CHECK(remembered_rates("m"));
  std::filesystem::remove_all(folder.path / "cache");
  folder.file("cache", "no folder");
  remember_rates("m", rates);
  CHECK_FALSE(remembered_rates("m"));
  ::unsetenv("XDG_CACHE_HOME");
}
