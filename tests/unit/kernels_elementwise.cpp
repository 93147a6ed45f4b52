// SPDX-License-Identifier: Apache-2.0
// The Block's operations and the core's elementwise kernels against plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fsdp/elementwise.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"

using namespace kernel_test;
using fsdp::bf16;
using fsdp::fp16;
using fsdp::NormKind;
namespace kernels = fsdp::kernels;

namespace {

constexpr double float_unit = 0x1p-24;

/// Sum and sum of magnitudes of f(i), in long double.
template <class F>
std::pair<double, double> exact_sum(std::int64_t n, F f) {
  long double sum = 0, size = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    auto const term = static_cast<long double>(f(static_cast<std::size_t>(i)));
    sum += term;
    size += std::fabs(term);
  }
  return {static_cast<double>(sum), static_cast<double>(size)};
}

}  // namespace

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

TEST_CASE("norm shares are exact to double rounding and lose no NaN", "[kernels][norm]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  for (auto const n : sizes) {
    auto x = random_values(n, 8);
    double l1 = -1, l2 = -1, inf = -1;
    kernels::norm_partial(device, stream, x.data(), n, NormKind::l1, &l1, false);
    kernels::norm_partial(device, stream, x.data(), n, NormKind::l2, &l2, false);
    kernels::norm_partial(device, stream, x.data(), n, NormKind::inf, &inf, false);
    auto const absolute = exact_sum(n, [&](std::size_t i) { return std::fabs(as_double(x[i])); });
    auto const square = exact_sum(n, [&](std::size_t i) { return as_double(x[i]) * as_double(x[i]); });
    double const bound = (static_cast<double>(n) / 64.0 + 8.0) * 0x1p-53;
    CHECK(std::fabs(l1 - absolute.first) <= bound * absolute.second);
    CHECK(std::fabs(l2 - square.first) <= bound * square.second);
    double largest = 0;
    for (auto const v : x) largest = std::fmax(largest, std::fabs(as_double(v)));
    CHECK(inf == largest);

    double more = 2.0, most = 1e9, least = 0.0;
    kernels::norm_partial(device, stream, x.data(), n, NormKind::l2, &more, true);
    kernels::norm_partial(device, stream, x.data(), n, NormKind::inf, &most, true);
    kernels::norm_partial(device, stream, x.data(), n, NormKind::inf, &least, true);
    CHECK(more == (n == 0 ? 2.0 : 2.0 + l2));
    CHECK(most == 1e9);
    CHECK(least == largest);

    if (n == 0) continue;
    for (float const bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      x[static_cast<std::size_t>(n - 1) / 2] = bad;
      for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) {
        double share = 0.0;
        kernels::norm_partial(device, stream, x.data(), n, kind, &share, false);
        CHECK_FALSE(std::isfinite(share));
        auto const good = random_values(n, 9);
        kernels::norm_partial(device, stream, good.data(), n, kind, &share, true);
        CHECK_FALSE(std::isfinite(share));
      }
    }
  }
}

TEST_CASE("the clip factor combines slices by the pairwise tree", "[kernels][norm]") {
  LoopDevice const device;
  LoopDevice::Stream stream;
  auto const tree = [](std::vector<double> level) {
    while (level.size() > 1) {
      std::vector<double> next;
      for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(level[i] + level[i + 1]);
      if (level.size() % 2 == 1) next.push_back(level.back());
      level = next;
    }
    return level.empty() ? 0.0 : level[0];
  };
  for (int count = 0; count <= 70; ++count) {
    auto slices = random_values<double>(count, 10);
    for (auto& slice : slices) slice = std::fabs(slice);
    fsdp::ClipScalars out{0.0, 0.0f, 3};
    kernels::clip_factor(device, stream, slices.data(), count, NormKind::l1, 0.5f, &out);
    CHECK(out.norm == tree(slices));
    CHECK(out.factor == static_cast<float>(std::fmin(1.0, 0.5 / (out.norm + 1e-6))));
    kernels::clip_factor(device, stream, slices.data(), count, NormKind::l2, 1e6f, &out);
    CHECK(out.norm == std::sqrt(tree(slices)));
    CHECK(out.factor == 1.0f);
    kernels::clip_factor(device, stream, slices.data(), count, NormKind::inf, 1.0f, &out);
    CHECK(out.norm == (count == 0 ? 0.0 : *std::max_element(slices.begin(), slices.end())));
    CHECK(out.skipped == 3);
    if (count == 0) continue;
    for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) {
      auto bad = slices;
      bad[static_cast<std::size_t>(count) / 2] = std::numeric_limits<double>::quiet_NaN();
      auto const before = out.skipped;
      kernels::clip_factor(device, stream, bad.data(), count, kind, 1.0f, &out);
      CHECK(out.factor == -1.0f);
      CHECK(out.skipped == before + 1);
    }
  }
}

TEST_CASE("adamw and sgd follow their formulas chunk by chunk", "[kernels][optim]") {
  LoopDevice const device{.reversed = true};
  LoopDevice::Stream stream;
  std::int64_t const n = 3001;
  // A hole at [1000, 1003) belongs to no chunk and must not change.
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 1000, 0.1f}, {1003, 1, 0.0f}, {1004, 1997, 0.0f}};
  auto const in_hole = [](std::size_t i) { return i >= 1000 && i < 1003; };
  auto const g = random_values(n, 11);
  float const factor = 0.7f, skip = -1.0f;

  SECTION("adamw") {
    auto p = random_values(n, 12), m = random_values(n, 13, 0.1), v = random_values(n, 14, 0.1);
    for (auto& value : v) value *= value;
    auto const p0 = p, m0 = m, v0 = v;
    int const step = 3;
    fsdp::AdamWScalars const s{.learning_rate = 1e-3f,
                               .beta1 = 0.9f,
                               .beta2 = 0.95f,
                               .epsilon = 1e-8f,
                               .correction1 = 1.0f - std::pow(0.9f, static_cast<float>(step)),
                               .correction2 = 1.0f - std::pow(0.95f, static_cast<float>(step))};
    kernels::adamw(device, stream, chunks.data(), 3, s, p.data(), g.data(), m.data(), v.data(), &skip);
    CHECK(p == p0);
    CHECK(m == m0);
    CHECK(v == v0);
    for (float const* const clip : {&factor, static_cast<float const*>(nullptr)}) {
      p = p0, m = m0, v = v0;
      kernels::adamw(device, stream, chunks.data(), 3, s, p.data(), g.data(), m.data(), v.data(), clip);
      for (std::size_t i = 0; i < p.size(); ++i) {
        if (in_hole(i)) {
          REQUIRE((p[i] == p0[i] && m[i] == m0[i] && v[i] == v0[i]));
          continue;
        }
        double const slope = static_cast<double>(g[i]) * (clip == nullptr ? 1.0 : static_cast<double>(*clip));
        double const b1 = static_cast<double>(s.beta1), b2 = static_cast<double>(s.beta2);
        double const first = b1 * static_cast<double>(m0[i]) + (1 - b1) * slope;
        double const second = b2 * static_cast<double>(v0[i]) + (1 - b2) * slope * slope;
        double const rate = static_cast<double>(s.learning_rate), decay = i < 1000 ? 0.1 : 0.0;
        double const move = rate * (first / static_cast<double>(s.correction1)) /
                            (std::sqrt(second / static_cast<double>(s.correction2)) + 1e-8);
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
      fsdp::SgdScalars const s{.learning_rate = 0.01f, .momentum = 0.9f};
      kernels::sgd(device, stream, chunks.data(), 3, s, p.data(), g.data(), with_momentum ? u.data() : nullptr, &skip);
      CHECK(p == p0);
      CHECK(u == u0);
      kernels::sgd(device, stream, chunks.data(), 3, s, p.data(), g.data(), with_momentum ? u.data() : nullptr,
                   &factor);
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
        double const exact = static_cast<double>(p0[i]) - static_cast<double>(s.learning_rate) * slope;
        REQUIRE(std::fabs(static_cast<double>(p[i]) - exact) <= 2 * float_unit * size);
      }
    }
  }
}
