// SPDX-License-Identifier: Apache-2.0
// Elementary functions of kernels, and both of the trainer's GELUs, against the C library in double, over all of fp32.
// skip-tsan
// optimised
#include <cmath>
#include <cstdint>
#include <limits>

#include "fsdp/detail/kernels/math.hpp"
#include "tests/catch.hpp"
#include "transformer/kernels/gelu.hpp"

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// Distance of two neighbouring floats at the magnitude of x.
double unit_in_last_place(double x) {
  double const size = std::fmax(std::fabs(x), 0x1p-126);
  return std::ldexp(1.0, std::ilogb(size) - 23);
}

/// Largest error of f against `reference` over every `stride`-th float, finite and not, in the unit that `unit` gives
/// for an argument and its exact result. Infinity where one result is NaN and the other is not.
template <class F, class Reference, class Unit>
double worst(F f, Reference reference, Unit unit, std::uint32_t stride = 1511) {
  double largest = 0.0;
  for (std::uint64_t word = 0; word <= 0xffffffffull; word += stride) {
    float const x = fsdp::detail::bit_cast<float>(static_cast<std::uint32_t>(word));
    double const exact = reference(static_cast<double>(x));
    double const got = static_cast<double>(f(x));
    if (std::isnan(exact) || std::isnan(got)) {
      if (std::isnan(exact) != std::isnan(got)) return HUGE_VAL;
      continue;
    }
    if (got == exact || static_cast<double>(static_cast<float>(exact)) == got) continue;
    if (std::isinf(got)) return HUGE_VAL;
    largest = std::fmax(largest, std::fabs(got - exact) / unit(x, exact));
  }
  return largest;
}

double ulp(float, double exact) { return unit_in_last_place(exact); }

}  // namespace

TEST_CASE("exp, log and tanh keep their documented error over all of fp32", "[kernels][math]") {
  namespace m = fsdp::math;
  CHECK(worst([](float x) { return m::exp(x); }, [](double x) { return std::exp(x); }, ulp) <= 1.5);
  CHECK(worst([](float x) { return m::exp_to_zero(x > 88.0f ? 0.0f : x); },
              [](double x) { return x > 88.0 ? 1.0 : (x < static_cast<double>(-87.3f) ? 0.0 : std::exp(x)); },
              ulp) <= 1.5);
  CHECK(worst([](float x) { return m::log(x); }, [](double x) { return std::log(x); }, ulp) <= 1.5);
  CHECK(worst([](float x) { return m::tanh(x); }, [](double x) { return std::tanh(x); }, ulp) <= 3.0);
}

TEST_CASE("sine and cosine of turns keep their documented error", "[kernels][math]") {
  double largest = 0.0;
  double const turn = 6.283185307179586;
  for (int i = -4'000'000; i <= 4'000'000; i += 7) {
    float const u = static_cast<float>(i) * 0x1p-21f;
    auto const got = fsdp::math::sin_cos_turns(u);
    largest = std::fmax(largest, std::fabs(static_cast<double>(got.sin) - std::sin(turn * static_cast<double>(u))));
    largest = std::fmax(largest, std::fabs(static_cast<double>(got.cos) - std::cos(turn * static_cast<double>(u))));
  }
  CHECK(largest <= 2.0 * 0x1p-23);
  CHECK(fsdp::math::sin_cos_turns(0.25f).sin == 1.0f);
  CHECK(fsdp::math::sin_cos_turns(0.25f).cos == 0.0f);
  CHECK(fsdp::math::sin_cos_turns(-0.5f).cos == -1.0f);
  CHECK(fsdp::math::sin_cos_turns(1048576.0f).cos == 1.0f);
}

TEST_CASE("gelu and its derivative keep their documented error", "[kernels][math]") {
  auto const scale = [](float x, double) { return std::fmax(1.0, std::fabs(static_cast<double>(x))); };
  auto const finite = [](double x) { return std::fmin(std::fmax(x, -1e30), 1e30); };
  double const root = std::sqrt(0.5);
  CHECK(worst([](float x) { return transformer::gelu(x); },
              [&](double x) { return x == -HUGE_VAL ? 0.0 : x * 0.5 * std::erfc(-root * x); }, scale) <= 1.6e-7);
  CHECK(worst([](float x) { return transformer::gelu(std::fabs(x)); },
              [&](double x) { return std::fabs(x) * 0.5 * std::erfc(-root * std::fabs(x)); }, ulp) <= 3.0);
  CHECK(worst([](float x) { return transformer::gelu_with_derivative(x).derivative; },
              [&](double x) {
                if (std::isnan(x)) return x;
                double const y = finite(x);
                return 0.5 * std::erfc(-root * y) + y * std::exp(-0.5 * y * y) / std::sqrt(8.0 * std::atan(1.0));
              },
              scale) <= 2e-7);
}

TEST_CASE("gelu_new and its derivative keep their documented error", "[kernels][math]") {
  auto const scale = [](float x, double) { return std::fmax(1.0, std::fabs(static_cast<double>(x))); };
  double const root = std::sqrt(0.5 / std::atan(1.0));  // of 2 / pi
  auto const inner = [&](double x) { return root * (x + 0.044715 * x * x * x); };
  auto const exact = [&](double x) { return x == -HUGE_VAL ? 0.0 : 0.5 * x * (1.0 + std::tanh(inner(x))); };
  auto const of_size = [&](double x) { return exact(std::fabs(x)); };
  auto const slope = [&](double x) {
    if (std::fabs(x) > 50.0) return x > 0.0 ? 1.0 : 0.0;
    double const tangent = std::tanh(inner(x)), secant = 1.0 / std::cosh(inner(x));
    return 0.5 * (1.0 + tangent) + 0.5 * x * secant * secant * root * (1.0 + 3.0 * 0.044715 * x * x);
  };
  CHECK(worst([](float x) { return transformer::gelu_new(x); }, exact, scale) <= 1.6e-7);
  CHECK(worst([](float x) { return transformer::gelu_new(std::fabs(x)); }, of_size, ulp) <= 3.0);
  CHECK(worst([](float x) { return transformer::gelu_new_with_derivative(x).derivative; }, slope, scale) <= 2.5e-7);
  for (double x = -8.0; x <= 8.0; x += 0.01) {
    CHECK(std::fabs(transformer::gelu_new(x) - exact(x)) <= 1e-14);
    CHECK(std::fabs(transformer::gelu_new_with_derivative(x).derivative - slope(x)) <= 1e-14);
  }
}

TEST_CASE("what backward takes for gelu is gelu, to the bit", "[kernels][math]") {
  auto const bits = [](float x) { return std::isnan(x) ? 0x7fc00000u : fsdp::detail::bit_cast<std::uint32_t>(x); };
  auto const check = [&](auto formula) {
    std::int64_t different = 0;
    for (std::uint64_t word = 0; word <= 0xffffffffull; word += 1511) {
      float const x = fsdp::detail::bit_cast<float>(static_cast<std::uint32_t>(word));
      if (bits(formula.with_derivative(x).value) != bits(formula.value(x))) ++different;
    }
    CHECK(different == 0);
    for (float const x : {infinity, -infinity, not_a_number, -not_a_number, 0.0f, -0.0f})
      CHECK(bits(formula.with_derivative(x).value) == bits(formula.value(x)));
  };
  check(transformer::ExactGelu{});
  check(transformer::TanhGelu{});
}

TEST_CASE("the double forms agree with central differences", "[kernels][math]") {
  auto const check = [](auto formula) {
    double const h = 1e-5;
    for (double x = -6.0; x <= 6.0; x += 0.01) {
      auto const [value, derivative] = formula.with_derivative(x);
      CHECK(std::fabs(derivative - (formula.value(x + h) - formula.value(x - h)) / (2.0 * h)) <= 1e-9);
      CHECK(value == formula.value(x));
    }
  };
  check(transformer::ExactGelu{});
  check(transformer::TanhGelu{});
}

TEST_CASE("special values", "[kernels][math]") {
  namespace m = fsdp::math;
  CHECK(m::exp(-infinity) == 0.0f);
  CHECK(m::exp(infinity) == infinity);
  CHECK(m::exp(0.0f) == 1.0f);
  CHECK(m::exp(88.72f) < infinity);
  CHECK(m::exp(88.73f) == infinity);
  CHECK(m::exp(-103.0f) > 0.0f);
  CHECK(m::log(0.0f) == -infinity);
  CHECK(m::log(-0.0f) == -infinity);
  CHECK(m::log(infinity) == infinity);
  CHECK(m::log(1.0f) == 0.0f);
  CHECK(std::isnan(m::log(-1.0f)));
  CHECK(std::isnan(m::log(-infinity)));
  CHECK(m::tanh(infinity) == 1.0f);
  CHECK(m::tanh(-infinity) == -1.0f);
  CHECK(transformer::gelu(infinity) == infinity);
  CHECK(transformer::gelu(-infinity) == 0.0f);
  CHECK(transformer::gelu_with_derivative(infinity).derivative == 1.0f);
  CHECK(std::fabs(transformer::gelu_with_derivative(-infinity).derivative) < 1e-29f);
  CHECK(transformer::gelu_new(infinity) == infinity);
  CHECK(std::fabs(transformer::gelu_new(-infinity)) < 1e-27f);
  CHECK(transformer::gelu_new_with_derivative(infinity).derivative == 1.0f);
  CHECK(std::fabs(transformer::gelu_new_with_derivative(-infinity).derivative) < 1e-26f);
  for (float const value : {not_a_number, -not_a_number}) {
    CHECK(std::isnan(transformer::gelu_new(value)));
    CHECK(std::isnan(transformer::gelu_new_with_derivative(value).derivative));
    CHECK(std::isnan(transformer::gelu_with_derivative(value).derivative));
  }
  CHECK(std::isnan(m::exp(not_a_number)));
  CHECK(m::exp_to_zero(-infinity) == 0.0f);
  CHECK(std::isnan(m::exp_to_zero(not_a_number)));
  CHECK(std::isnan(m::exp_to_zero(-not_a_number)));
  CHECK(std::isnan(m::exp(-not_a_number)));
  CHECK(std::isnan(transformer::gelu(-not_a_number)));
  CHECK(std::isnan(m::log(not_a_number)));
  CHECK(std::isnan(m::tanh(not_a_number)));
  CHECK(std::isnan(transformer::gelu(not_a_number)));
  CHECK_FALSE(m::is_finite(not_a_number));
  CHECK_FALSE(m::is_finite(-infinity));
  CHECK(m::is_finite(std::numeric_limits<float>::max()));
}
