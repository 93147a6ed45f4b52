// SPDX-License-Identifier: Apache-2.0
// The Block's operations and the core's elementwise kernels against plain loops in double.
// skip-tsan
// optimised
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fsdp/detail/kernels/elementwise.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"

using namespace kernel_test;
using fsdp::bf16;
using fsdp::fp16;
namespace kernels = fsdp::kernels;

TEST_CASE("a host block sums within the error of its 64 lanes", "[kernels][block]") {
  fsdp::HostBlock const block;
  for (auto const n : sizes) {
    auto const x = random_values(n, 1);
    auto const y = random_values<bf16>(n, 2);
    // Each lane adds n / 64 terms, six levels join the lanes; a product adds one rounding.
    double const bound = (static_cast<double>(n) / 64.0 + 8.0) * float_unit;
    auto const [sum, size] = exact_sum(n, [&](std::size_t i) { return as_double(x[i]) * as_double(y[i]); });
    float const got = block.sum(
        n, [](float a, float b) { return a * b; }, x.data(), y.data());
    CHECK(std::fabs(static_cast<double>(got) - sum) <= bound * size);

    double const wide = block.sum(
        n, [](float a) { return static_cast<double>(a); }, x.data());
    auto const [plain, plain_size] = exact_sum(n, [&](std::size_t i) { return as_double(x[i]); });
    CHECK(std::fabs(wide - plain) <= bound * 0x1p-29 * plain_size);

    auto const pair = block.sum_pair(
        n,
        [](float a, float b) {
          return fsdp::Pair<float>{a * b, a};
        },
        x.data(), y.data());
    CHECK(std::fabs(static_cast<double>(pair.first) - sum) <= bound * size);
    CHECK(std::fabs(static_cast<double>(pair.second) - plain) <= bound * plain_size);

    std::vector<float> out(x.size());
    float const each = block.each_sum(
        n, out.data(), [](float a, float b) { return a * b; }, x.data(), y.data());
    CHECK(std::fabs(static_cast<double>(each) - sum) <= bound * size);
    for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(out[i] == x[i] * fsdp::widen(y[i]));

    float const largest = block.max(
        n, [](float a) { return a; }, x.data());
    CHECK(largest == (n == 0 ? -std::numeric_limits<float>::infinity() : *std::max_element(x.begin(), x.end())));
  }
}

TEST_CASE("a block's views may be written in place, indexed and of different types", "[kernels][block]") {
  fsdp::HostBlock const block;
  for (auto const n : sizes) {
    auto x = random_values(n, 3);
    auto const before = x;
    auto const h = random_values<fp16>(n, 4);
    std::vector<bf16> rounded(x.size());
    std::vector<double> wide(x.size(), 1.0);
    block.each(
        n, x.data(), [](float a, std::int64_t i) { return a + static_cast<float>(i % 7); },
        static_cast<float const*>(x.data()), fsdp::Indices{5});
    block.update(
        n,
        [](float a, float half, float& b, double& d) {
          b = a;
          d += static_cast<double>(half);
        },
        static_cast<float const*>(x.data()), h.data(), rounded.data(), wide.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      REQUIRE(x[i] == before[i] + static_cast<float>((i + 5) % 7));
      REQUIRE(rounded[i].bits == bf16(x[i]).bits);
      REQUIRE(wide[i] == 1.0 + as_double(h[i]));
    }
  }
}

TEST_CASE("max starts below every value of its type", "[kernels][block]") {
  fsdp::HostBlock const block;
  std::vector<float> const x(100, -3.0f);
  CHECK(block.max(
            100, [](float a) { return static_cast<std::int32_t>(a); }, x.data()) == -3);
  CHECK(block.max(
            100, [](float a) { return static_cast<double>(a); }, x.data()) == -3.0);
  CHECK(block.max(
            0, [](float a) { return static_cast<std::int32_t>(a); }, x.data()) ==
        std::numeric_limits<std::int32_t>::min());
}

TEMPLATE_TEST_CASE("cast rounds like the element type, and back", "[kernels][elementwise]", float, bf16, fp16, double) {
  LoopDevice const device;
  LoopDevice::Stream stream;
  for (auto const n : sizes) {
    auto const x = random_values(n, 5, 100.0);
    std::vector<TestType> y(x.size());
    std::vector<float> back(x.size());
    kernels::cast(device, stream, x.data(), y.data(), n);
    kernels::cast(device, stream, y.data(), back.data(), n);
    for (std::size_t i = 0; i < x.size(); ++i) {
      REQUIRE(as_double(y[i]) == as_double(static_cast<TestType>(x[i])));
      REQUIRE(back[i] == static_cast<float>(y[i]));
    }
  }
}

TEMPLATE_TEST_CASE("accumulate overwrites or adds, scaled once", "[kernels][elementwise]", float, bf16) {
  LoopDevice const device{.reversed = true};
  LoopDevice::Stream stream;
  for (auto const n : sizes) {
    auto const x = random_values<TestType>(n, 6);
    auto out = random_values(n, 7);
    auto const before = out;
    kernels::accumulate(device, stream, x.data(), out.data(), n, 0.3f, false);
    for (std::size_t i = 0; i < x.size(); ++i) {
      double const exact = static_cast<double>(before[i]) + static_cast<double>(0.3f) * as_double(x[i]);
      double const size = std::fabs(static_cast<double>(before[i])) + std::fabs(as_double(x[i]));
      REQUIRE(std::fabs(static_cast<double>(out[i]) - exact) <= 2.0 * float_unit * size);
    }
    kernels::accumulate(device, stream, x.data(), out.data(), n, 0.25f, true);
    for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(out[i] == 0.25f * static_cast<float>(x[i]));
    kernels::scale(device, stream, out.data(), n, -4.0f);
    for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(out[i] == -static_cast<float>(x[i]));
  }
}
