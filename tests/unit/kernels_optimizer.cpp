// SPDX-License-Identifier: Apache-2.0
// Kernels of norms, clipping, the loss scale and optimizers against plain loops in double.
// skip-tsan
// optimised
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"

using namespace kernel_test;
using fsdp::bf16;
using fsdp::fp16;
using fsdp::NormKind;
namespace kernels = fsdp::kernels;

TEST_CASE("norm shares are exact to double rounding and lose no NaN", "[kernels][norm]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  for (auto const n : sizes) {
    auto x = random_values(n, 8);
    auto const shares = kernels::norm_partial_count(n);
    CHECK(shares == (n + 16383) / 16384);
    std::vector<double> partials(static_cast<std::size_t>(shares));
    auto const norm = [&](std::vector<float> const& of, NormKind kind) {
      double total = -1;
      kernels::norm_partials(device, stream, of.data(), n, kind, partials.data());
      kernels::norm_combine(device, stream, partials.data(), shares, kind, &total);
      return total;
    };
    double const l1 = norm(x, NormKind::l1), l2 = norm(x, NormKind::l2), inf = norm(x, NormKind::inf);
    auto const absolute = exact_sum(n, [&](std::size_t i) { return std::fabs(as_double(x[i])); });
    auto const square = exact_sum(n, [&](std::size_t i) { return as_double(x[i]) * as_double(x[i]); });
    double const bound = (static_cast<double>(n) / 64.0 + 8.0) * 0x1p-53;
    CHECK(std::fabs(l1 - absolute.first) <= bound * absolute.second);
    CHECK(std::fabs(l2 - square.first) <= bound * square.second);
    double largest = 0;
    for (auto const v : x) largest = std::fmax(largest, std::fabs(as_double(v)));
    CHECK(inf == largest);

    if (n == 0) continue;
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      x[static_cast<std::size_t>(n - 1) / 2] = bad;
      for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) CHECK_FALSE(std::isfinite(norm(x, kind)));
    }
  }
}

TEST_CASE("shares of a norm add up exactly, in any order and on any rank", "[kernels][norm]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  std::mt19937_64 random(10);
  for (int count = 0; count <= 70; ++count) {
    // From the square of the smallest fp32 to the largest sum of 16,384 squares.
    std::vector<double> shares(static_cast<std::size_t>(count));
    for (auto& share : shares) {
      auto const exponent =
          count % 2 == 0 ? static_cast<int>(random() % 567) - 298 : static_cast<int>(random() % 40) - 20;
      share = std::ldexp(1.0 + std::ldexp(static_cast<double>(random() >> 12), -52), exponent);
      if (exponent < -246) share = std::ldexp(1.0, exponent);  // a multiple of 2^-298
    }
    if (count > 2) shares[1] = 0.0, shares[2] = std::ldexp(1.0, 270) - std::ldexp(1.0, 217);
    auto const digits_of = [&](std::vector<double> const& some) {
      std::vector<double> digits(kernels::norm_digit_count, -1.0);
      kernels::norm_digits(device, stream, some.data(), static_cast<std::int64_t>(some.size()), digits.data());
      return digits;
    };
    auto const whole = digits_of(shares);
    auto shuffled = shares;
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    auto const cut = shuffled.begin() + static_cast<std::ptrdiff_t>(shuffled.size() / 3);
    auto const one = digits_of({shuffled.begin(), cut}), other = digits_of({cut, shuffled.end()});
    for (std::size_t i = 0; i < whole.size(); ++i) CHECK(one[i] + other[i] == whole[i]);
    if (count == 1) {  // nothing of a share is lost
      fsdp::ClipScalars out{};
      kernels::clip_factor(device, stream, whole.data(), 0, NormKind::l1, 1.0f, nullptr, &out);
      CHECK(out.norm == shares[0]);
    }

    long double sum = 0;
    for (auto const share : shares) sum += static_cast<long double>(share);
    auto const close = [](double value, long double expected) {  // below its two highest digits, nothing rounds visibly
      return std::fabs(static_cast<long double>(value) - expected) <= 0x1p-51L * expected;
    };
    auto const parts = static_cast<int>(whole.size());
    fsdp::ClipScalars out{0.0, 0.0f, 3};
    kernels::clip_factor(device, stream, whole.data(), parts, NormKind::l1, 0.5f, nullptr, &out);
    CHECK(close(out.norm, sum));
    CHECK(out.factor == static_cast<float>(std::fmin(1.0, 0.5 / (out.norm + 1e-6))));
    auto const l1 = out.norm;
    kernels::clip_factor(device, stream, whole.data(), parts, NormKind::l2, 1.0f, nullptr, &out);
    CHECK(out.norm == std::sqrt(l1));
    auto small = random_values<double>(count, 10);
    for (auto& share : small) share = std::fabs(share);
    kernels::clip_factor(device, stream, digits_of(small).data(), parts, NormKind::l2, 1e6f, nullptr, &out);
    CHECK(out.factor == 1.0f);
    float const loss_scale = 1024.0f;  // norm and factor are those of unscaled gradients; a power of two: exact
    kernels::clip_factor(device, stream, whole.data(), parts, NormKind::l1, 0.5f, &loss_scale, &out);
    CHECK(out.norm == l1 / 1024.0);
    CHECK(out.factor == static_cast<float>(std::fmin(1.0, 0.5 / (out.norm + 1e-6)) / 1024.0));
    kernels::clip_factor(device, stream, shares.data(), count, NormKind::inf, 1.0f, nullptr, &out);
    CHECK(out.norm == (count == 0 ? 0.0 : *std::max_element(shares.begin(), shares.end())));
    if (count == 0) continue;
    for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) {
      for (double const bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        auto broken = shares;
        broken[static_cast<std::size_t>(count) / 2] = bad;
        auto const taken = kind == NormKind::inf ? broken : digits_of(broken);
        kernels::clip_factor(device, stream, taken.data(), static_cast<int>(taken.size()), kind, 1.0f, nullptr, &out);
        CHECK(out.factor == -1.0f);
        CHECK(out.skipped == 3);  // the step counts it
      }
    }
  }
}

TEST_CASE("adamw and sgd follow their formulas chunk by chunk", "[kernels][optim]") {
  LoopDevice const device{.reversed = true};
  LoopDevice::Stream stream;
  std::int64_t const n = 3001;
  // A hole at [1000, 1003) belongs to no chunk and must not change.
  std::vector<fsdp::OptimizerChunk> const chunks{
      {0, 1000, 0.1f, 1, 0}, {1003, 1, 0.0f, 2, 0}, {1004, 1997, 0.0f, 3, 0}};
  auto const in_hole = [](std::size_t i) { return i >= 1000 && i < 1003; };
  auto const g = random_values(n, 11);
  float const factor = 0.7f;

  SECTION("adamw") {
    auto p = random_values(n, 12), m = random_values(n, 13, 0.1), v = random_values(n, 14, 0.1);
    for (auto& value : v) value *= value;
    auto const p0 = p, m0 = m, v0 = v;
    fsdp::AdamWScalars const s{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f};
    fsdp::OptimizerStep const skip{.taken = 3, .factor = -1.0f};
    kernels::adamw(device, stream, chunks.data(), 3, &skip, s, p.data(), g.data(), m.data(), v.data());
    CHECK(p == p0);
    CHECK(m == m0);
    CHECK(v == v0);
    for (float const* const clip : {&factor, static_cast<float const*>(nullptr)}) {
      p = p0, m = m0, v = v0;
      fsdp::OptimizerStep now{.taken = 2};
      fsdp::ClipScalars decided{.factor = clip == nullptr ? 1.0f : *clip};
      kernels::begin_step(device, stream, &now, 1e-3f, s.beta1, s.beta2, clip == nullptr ? nullptr : &decided);
      REQUIRE(now.taken == 3);
      kernels::adamw(device, stream, chunks.data(), 3, &now, s, p.data(), g.data(), m.data(), v.data());
      for (std::size_t i = 0; i < p.size(); ++i) {
        if (in_hole(i)) {
          REQUIRE((p[i] == p0[i] && m[i] == m0[i] && v[i] == v0[i]));
          continue;
        }
        double const slope = static_cast<double>(g[i]) * (clip == nullptr ? 1.0 : static_cast<double>(*clip));
        double const b1 = static_cast<double>(s.beta1), b2 = static_cast<double>(s.beta2);
        double const first = b1 * static_cast<double>(m0[i]) + (1 - b1) * slope;
        double const second = b2 * static_cast<double>(v0[i]) + (1 - b2) * slope * slope;
        double const rate = static_cast<double>(now.learning_rate), decay = i < 1000 ? 0.1 : 0.0;
        double const move = rate * (first / static_cast<double>(now.correction1)) /
                            (std::sqrt(second / static_cast<double>(now.correction2)) + 1e-8);
        double const exact = static_cast<double>(p0[i]) * (1 - rate * decay) - move;
        // Cancelling (m - g) and (v - g^2) cost roundings of their largest term; six more follow.
        double const term = std::fabs(static_cast<double>(m0[i])) + 2 * std::fabs(slope);
        REQUIRE(std::fabs(static_cast<double>(m[i]) - first) <= 4 * float_unit * term);
        REQUIRE(std::fabs(static_cast<double>(v[i]) - second) <=
                4 * float_unit * (static_cast<double>(v0[i]) + 2 * slope * slope));
        double const bound = 2 * float_unit * std::fabs(static_cast<double>(p0[i])) +
                             1e-3 * 64 * float_unit * (1 + term / std::sqrt(second));
        REQUIRE(std::fabs(static_cast<double>(p[i]) - exact) <= bound);
      }
    }
  }

  SECTION("sgd") {
    auto const p0 = random_values(n, 15), u0 = random_values(n, 16);
    for (bool const with_momentum : {false, true}) {
      auto p = p0, u = u0;
      fsdp::OptimizerStep now{.taken = 1, .factor = -1.0f, .learning_rate = 0.01f};
      float* const velocity = with_momentum ? u.data() : nullptr;
      kernels::sgd(device, stream, chunks.data(), 3, &now, fsdp::SgdScalars{0.9f}, p.data(), g.data(), velocity);
      CHECK(p == p0);
      CHECK(u == u0);
      now.factor = factor;
      kernels::sgd(device, stream, chunks.data(), 3, &now, fsdp::SgdScalars{0.9f}, p.data(), g.data(), velocity);
      for (std::size_t i = 0; i < p.size(); ++i) {
        if (in_hole(i)) {
          REQUIRE((p[i] == p0[i] && u[i] == u0[i]));
          continue;
        }
        double const decay = i < 1000 ? static_cast<double>(0.1f) : 0.0;
        double slope = static_cast<double>(g[i]) * static_cast<double>(factor) + decay * static_cast<double>(p0[i]);
        if (with_momentum) slope += static_cast<double>(0.9f) * static_cast<double>(u0[i]);
        double const size = std::fabs(static_cast<double>(g[i])) + std::fabs(static_cast<double>(p0[i])) +
                            std::fabs(static_cast<double>(u0[i]));
        if (with_momentum) REQUIRE(std::fabs(static_cast<double>(u[i]) - slope) <= 4 * float_unit * size);
        double const exact = static_cast<double>(p0[i]) - static_cast<double>(now.learning_rate) * slope;
        REQUIRE(std::fabs(static_cast<double>(p[i]) - exact) <= 2 * float_unit * size);
      }
    }
  }
}

TEST_CASE("a step's scalars: corrections of steps taken, skipped ones counted apart", "[kernels][optim]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  fsdp::OptimizerStep now{};
  fsdp::ClipScalars clip{};
  std::int64_t taken = 0;
  for (int step = 1; step <= 3000; ++step) {
    bool const skips = step % 7 == 0;
    clip.factor = skips ? -1.0f : 0.5f;
    auto const before = now;
    kernels::count_skipped(device, stream, &clip);
    kernels::begin_step(device, stream, &now, 0.25f, 0.9f, 0.999f, step % 5 == 0 && !skips ? nullptr : &clip);
    taken += skips ? 0 : 1;
    REQUIRE(now.taken == taken);
    REQUIRE(clip.skipped == step / 7);
    REQUIRE(now.factor == (skips ? -1.0f : (step % 5 == 0 ? 1.0f : 0.5f)));
    if (skips) {
      REQUIRE((now.correction1 == before.correction1 && now.correction2 == before.correction2));
      continue;
    }
    auto const t = static_cast<double>(taken);
    REQUIRE(std::fabs(now.correction1 - (1.0 - std::pow(static_cast<double>(0.9f), t))) <= float_unit);
    REQUIRE(std::fabs(now.correction2 - (1.0 - std::pow(static_cast<double>(0.999f), t))) <= float_unit);
  }
  CHECK(now.learning_rate == 0.25f);
}

TEMPLATE_TEST_CASE("adamw stores narrow parameters and moments rounded to nearest", "[kernels][optim]", bf16, fp16) {
  LoopDevice const device;
  LoopDevice::Stream stream;
  std::int64_t const n = 1500;
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 1500, 0.1f, 1, 0}};
  auto const p0 = random_values<TestType>(n, 21);
  auto const m0 = random_values<bf16>(n, 22, 0.1), g = random_values<bf16>(n, 23);
  std::vector<float> gradient(g.size()), wide_p(p0.size()), wide_m(m0.size()), wide_v(m0.size());
  std::vector<bf16> v0(m0.size());
  for (std::size_t i = 0; i < g.size(); ++i) {
    v0[i] = bf16(fsdp::widen(m0[i]) * fsdp::widen(m0[i]));
    gradient[i] = fsdp::widen(g[i]), wide_p[i] = fsdp::widen(p0[i]);
    wide_m[i] = fsdp::widen(m0[i]), wide_v[i] = fsdp::widen(v0[i]);
  }
  auto p = p0;
  auto m = m0, v = v0;
  fsdp::OptimizerStep const now{
      .taken = 2, .factor = 1.0f, .learning_rate = 0.01f, .correction1 = 0.19f, .correction2 = 0.0975f};
  fsdp::AdamWScalars const s{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f};
  kernels::adamw(device, stream, chunks.data(), 1, &now, s, p.data(), gradient.data(), m.data(), v.data());
  kernels::adamw(device, stream, chunks.data(), 1, &now, s, wide_p.data(), gradient.data(), wide_m.data(),
                 wide_v.data());
  for (std::size_t i = 0; i < p.size(); ++i) {
    REQUIRE(p[i].bits == TestType(wide_p[i]).bits);
    REQUIRE(m[i].bits == bf16(wide_m[i]).bits);
    REQUIRE(v[i].bits == bf16(wide_v[i]).bits);
  }
}

TEST_CASE("the loss scale follows the rules of torch.amp.GradScaler", "[kernels][scaler]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  fsdp::LossScale state{.scale = 0x1p125f, .good_steps = 0};
  float expected = 0x1p125f;
  int tracker = 0;
  for (int step = 0; step < 400; ++step) {
    bool const found_inf = (step > 30 && step % 11 == 3) || (step > 200 && step < 240);
    fsdp::ClipScalars const clip{.factor = found_inf ? -1.0f : 1.0f};
    kernels::update_scale(device, stream, &clip, 2.0f, 0.5f, 3, &state);
    if (found_inf) {
      expected *= 0.5f, tracker = 0;
    } else if (++tracker == 3) {
      tracker = 0;
      if (std::isfinite(expected * 2.0f)) expected *= 2.0f;
    }
    REQUIRE(state.scale == expected);
    REQUIRE(state.good_steps == tracker);
    if (step == 29) REQUIRE(expected == 0x1p127f);  // the largest power of two: no growth to infinity
  }
}
