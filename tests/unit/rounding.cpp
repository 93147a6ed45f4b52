// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding: neighbours, exact means, bits that depend on seed, tensor, step and element alone.
// skip-sanitizers
// optimised
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "fsdp/detail/kernels/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"

using namespace kernel_test;
using fsdp::bf16;
using fsdp::fp16;
namespace rounding = fsdp::rounding;

namespace {

template <class T>
T from_bits(std::uint32_t bits) {
  T value;
  value.bits = static_cast<std::uint16_t>(bits);
  return value;
}

/// The mean of a float over all 65,536 draws, exactly: values are multiples of one power of two, sums fit a double.
template <class T>
double mean_over_draws(float value) {
  double sum = 0.0;
  for (std::uint32_t draw = 0; draw < 65536; ++draw) sum += static_cast<double>(rounding::stochastic<T>(value, draw));
  return sum / 65536.0;
}

}  // namespace

TEMPLATE_TEST_CASE("a value of the narrow type stays itself, whatever is drawn", "[rounding]", bf16, fp16) {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    float const value = fsdp::widen(from_bits<TestType>(bits));
    for (std::uint32_t const draw : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      float const rounded = rounding::stochastic<TestType>(value, draw);
      bool const same = fsdp::detail::bit_cast<std::uint32_t>(rounded) == fsdp::detail::bit_cast<std::uint32_t>(value);
      wrong += std::isnan(value) ? !std::isnan(rounded) : !same;
    }
  }
  CHECK(wrong == 0);
  // A NaN whose payload the narrow type cannot hold.
  float const nan = fsdp::detail::bit_cast<float>(0x7f800001u);
  CHECK(std::isnan(fsdp::widen(fsdp::narrow<TestType>(rounding::stochastic<TestType>(nan, 0)))));
  CHECK(std::isnan(fsdp::widen(fsdp::narrow<TestType>(rounding::stochastic<TestType>(nan, 0xffff)))));
}

TEMPLATE_TEST_CASE("the result is a neighbour, and the mean over all draws is the value", "[rounding]", bf16, fp16) {
  bool const half = std::is_same_v<TestType, fp16>;
  std::mt19937 engine(7);
  for (int round = 0; round < 60; ++round) {
    int const exponent = half ? static_cast<int>(engine() % 40) - 25 : static_cast<int>(engine() % 250) - 125;
    float const magnitude = std::ldexp(1.0f + static_cast<float>(engine() % 65536) / 65536.0f, exponent);
    if (half && magnitude >= 65504.0f) continue;
    float const value = round % 2 == 0 ? magnitude : -magnitude;
    // Spacing of the narrow type here; fp16's subnormals have one spacing, and draw on 2^-40.
    double const spacing = half ? std::ldexp(1.0, std::max(exponent, -14) - 10) : std::ldexp(1.0, exponent - 7);
    double const below = std::floor(static_cast<double>(value) / spacing) * spacing;
    std::set<float> seen;
    for (std::uint32_t draw = 0; draw < 65536; draw += 13) seen.insert(rounding::stochastic<TestType>(value, draw));
    for (float const rounded : seen) {
      CHECK((static_cast<double>(rounded) == below || static_cast<double>(rounded) == below + spacing));
      CHECK(fsdp::widen(fsdp::narrow<TestType>(rounded)) == rounded);
    }
    INFO(value);
    CHECK(std::fabs(mean_over_draws<TestType>(value) - static_cast<double>(value)) <=
          (half ? 0x1p-40 + spacing * 0x1p-13 : 0.0));
  }
  CHECK(std::isinf(rounding::stochastic<TestType>(std::numeric_limits<float>::infinity(), 0xffff)));
  CHECK(rounding::stochastic<TestType>(0.0f, 0xffff) == 0.0f);
}

TEST_CASE("bits are even and unrelated over elements, steps, tensors, seeds and fields", "[rounding]") {
  // Each variant draws 65,536 words; 256 bins of each 16-bit field hold 256 on average. Chi-square with 255 degrees of
  // freedom has mean 255 and deviation 22.6: 400 is more than six deviations away.
  std::vector<std::array<std::uint64_t, 3>> const keys{{0, 1, 1}, {0, 1, 2}, {0, 2, 1},
                                                       {1, 1, 1}, {0, 1, 3}, {7, 99, 1000}};
  std::vector<std::vector<std::uint64_t>> words;
  for (auto const& [seed, tensor, step] : keys) {
    auto const key = rounding::key(seed, tensor, static_cast<std::int64_t>(step));
    std::vector<std::uint64_t> drawn(65536);
    for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i] = rounding::bits(key, static_cast<std::int64_t>(i));
    words.push_back(drawn);
  }
  auto const chi_square = [](auto const& value) {
    std::array<int, 256> bins{};
    for (std::size_t i = 0; i < 65536; ++i) ++bins[value(i)];
    double sum = 0.0;
    for (int const count : bins) sum += (count - 256.0) * (count - 256.0) / 256.0;
    return sum;
  };
  for (std::size_t a = 0; a < words.size(); ++a) {
    for (int field = 0; field < 4; ++field) {
      auto const high = [&](std::vector<std::uint64_t> const& of, std::size_t i) {
        return (of[i] >> (16 * field + 8)) & 0xff;
      };
      CHECK(chi_square([&](std::size_t i) { return high(words[a], i); }) < 400.0);
      // Pairs of neighbours, and pairs of two variants at the same element: four bits of each.
      CHECK(chi_square([&](std::size_t i) {
              return (high(words[a], i) & 0xf0) | high(words[a], (i + 1) % 65536) >> 4;
            }) < 400.0);
      for (std::size_t b = 0; b < a; ++b)
        CHECK(chi_square([&](std::size_t i) { return (high(words[a], i) & 0xf0) | high(words[b], i) >> 4; }) < 400.0);
    }
    CHECK(chi_square([&](std::size_t i) { return (words[a][i] >> 8 & 0xf0) | (words[a][i] >> 28 & 0xf); }) < 400.0);
  }
}

TEST_CASE("updates below half a unit in the last place add up on average, and vanish when rounded to nearest",
          "[rounding]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  std::size_t const n = 4096;
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 4096, 0.0f, 5, 0}};
  std::vector<bf16> nearest(n, bf16(1.0f)), random(n, bf16(1.0f));
  std::vector<float> const g(n, 1.0f);
  int const steps = 1000;
  for (int step = 1; step <= steps; ++step) {
    fsdp::OptimizerStep const now{.taken = step, .factor = 1.0f, .learning_rate = 1e-4f};
    fsdp::kernels::sgd(device, stream, chunks.data(), 1, &now, fsdp::SgdScalars{0.0f}, nearest.data(), g.data(),
                       nullptr);
    fsdp::kernels::sgd<true>(device, stream, chunks.data(), 1, &now, fsdp::SgdScalars{0.0f}, random.data(), g.data(),
                             nullptr, 3);
  }
  double mean = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    REQUIRE(fsdp::widen(nearest[i]) == 1.0f);
    mean += static_cast<double>(fsdp::widen(random[i])) / static_cast<double>(n);
  }
  // The variance of a step is at most spacing * update: 2^-8 * 1e-4 (p is in [1/2, 1)). Six deviations of the mean.
  double const deviation = std::sqrt(0x1p-8 * 1e-4 * steps / static_cast<double>(n));
  CHECK(std::fabs(mean - 0.9) < 6.0 * deviation);
}

TEST_CASE("adamw with bf16 moments follows fp32's on average when it rounds at random", "[rounding]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  std::size_t const n = 4096;
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 4096, 0.0f, 6, 0}};
  std::vector<float> exact(n, 0.0f), m(n, 0.0f), v(n, 0.0f), p(n, 0.0f), q(n, 0.0f);
  std::vector<bf16> m_random(n), v_random(n), m_nearest(n), v_nearest(n);
  fsdp::AdamWScalars const s{};
  fsdp::OptimizerStep now{};
  for (int step = 1; step <= 1500; ++step) {
    // Large gradients, then small ones: the second moment must decay, by 1e-3 of itself a step.
    std::vector<float> const g(n, step <= 20 ? 1.0f : 0.02f);
    fsdp::kernels::begin_step(device, stream, &now, 1e-3f, s.beta1, s.beta2, nullptr);
    auto const run = [&](auto stochastic, std::vector<float>& parameter, auto& first, auto& second) {
      fsdp::kernels::adamw<decltype(stochastic)::value>(device, stream, chunks.data(), 1, &now, s, parameter.data(),
                                                        g.data(), first.data(), second.data(), 11);
    };
    run(std::false_type{}, exact, m, v);
    run(std::true_type{}, p, m_random, v_random);
    run(std::false_type{}, q, m_nearest, v_nearest);
  }
  double second = 0.0, moved = 0.0;
  for (std::size_t i = 0; i < n; ++i) {
    second += static_cast<double>(fsdp::widen(v_random[i])) / static_cast<double>(n);
    moved += static_cast<double>(p[i]) / static_cast<double>(n);
  }
  // An update of 1e-3 v adds at most spacing * update = 2^-7 * 1e-3 of relative variance, and 500 such updates are in
  // memory (1 / (1 - beta2^2)): 6 % of deviation, 0.1 % in the mean of 4,096; six of them.
  auto const reached = static_cast<double>(v[0]);
  CHECK(std::fabs(second - reached) < 0.006 * reached);
  CHECK(std::fabs(moved - static_cast<double>(exact[0])) < 0.01 * std::fabs(static_cast<double>(exact[0])));
  CHECK(static_cast<double>(fsdp::widen(v_nearest[0])) > 1.5 * reached);  // stuck: an update is less than half a unit
}

TEST_CASE("adamw rounds a parameter and its two moments with independent random numbers", "[rounding]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  constexpr std::size_t n = 16384;
  std::vector<fsdp::OptimizerChunk> const chunks{{0, n, 0.0f, 6, 0}};
  std::vector<bf16> p(n, bf16(1.0f)), m(n), v(n);
  std::vector<float> const g(n, 0.7f);
  fsdp::AdamWScalars const s{};
  fsdp::OptimizerStep now{};
  fsdp::kernels::begin_step(device, stream, &now, 1e-3f, s.beta1, s.beta2, nullptr);
  fsdp::kernels::adamw<true>(device, stream, chunks.data(), 1, &now, s, p.data(), g.data(), m.data(), v.data(), 11);
  auto const rounded_up = [](std::vector<bf16> const& values) {
    float largest = -1.0f;
    for (auto const value : values) largest = std::max(largest, fsdp::widen(value));
    std::vector<double> up;
    for (auto const value : values) up.push_back(fsdp::widen(value) == largest ? 1.0 : 0.0);
    return up;
  };
  auto const mean = [](std::vector<double> const& values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(n);
  };
  std::array const up{rounded_up(p), rounded_up(m), rounded_up(v)};
  for (std::size_t a = 0; a < up.size(); ++a) {
    double const share = mean(up[a]);
    CHECK(share * (1.0 - share) > 0.05);  // in both directions
    for (std::size_t b = 0; b < a; ++b) {
      std::vector<double> both;
      for (std::size_t i = 0; i < n; ++i) both.push_back(up[a][i] * up[b][i]);
      // The deviation of a covariance of independent draws is at most 1 / (4 sqrt(n)); six of them.
      CHECK(std::fabs(mean(both) - share * mean(up[b])) < 6.0 / (4.0 * std::sqrt(static_cast<double>(n))));
    }
  }
}
