// SPDX-License-Identifier: Apache-2.0
// The library's kernels in emulated thread blocks, against plain loops in double.
// skip-tsan
// timeout: 600
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "fsdp/detail/comm/pairwise.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/muon.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"

using namespace emulated;
using fsdp::bf16;
using fsdp::fp16;
using fsdp::NormKind;
using kernel_test::as_double;
using kernel_test::random_values;
namespace kernels = fsdp::kernels;

namespace {

kernel_test::LoopDevice::Stream stream;

std::vector<std::int64_t> const lengths{1, 7, 2053, 16391};

template <class T>
constexpr bool narrow = sizeof(T) == 2;

}  // namespace

TEMPLATE_TEST_CASE("emulated: casts, accumulation and scaling", "[emulated][elementwise]", float, bf16, fp16) {
  for (auto const n : lengths) {
    CAPTURE(n);
    auto const x = random_values(n, 1, 100.0), start = random_values(n, 2);
    auto const r = random_values<TestType>(n, 3);
    Doubles cast, set, added, sum;
    for (std::size_t i = 0; i < x.size(); ++i) {
      cast.push_back(as_double(x[i]));
      set.push_back(as_double(r[i]) * static_cast<double>(0.3f));
      added.push_back(as_double(start[i]) + set[i]);
      sum.push_back(as_double(r[i]) + as_double(start[i]));
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<float> const in(x, skip), more(start, skip);
      View<TestType> y(r, skip), in_place(r, skip);
      View<TestType> const reduced(r, skip);
      View<float> back(x, skip), overwritten(start, skip), accumulated(start, skip), scaled(start, skip);
      View<double> wide(std::vector<double>(x.size()), skip);
      kernels::cast(device, stream, in.in(), y.out(), n);
      kernels::cast(device, stream, y.in(), back.out(), n);
      kernels::cast(device, stream, in.in(), wide.out(), n);
      kernels::accumulate(device, stream, reduced.in(), overwritten.out(), n, 0.3f, true);
      kernels::accumulate(device, stream, reduced.in(), accumulated.out(), n, 0.3f, false);
      kernels::add(device, stream, more.in(), in_place.out(), n);
      kernels::scale(device, stream, scaled.out(), n, -4.0f);
      return std::vector{doubles(y),           doubles(back),     doubles(wide),  doubles(overwritten),
                         doubles(accumulated), doubles(in_place), doubles(scaled)};
    });
    check_close<TestType>(got[0], cast, 1.0, 0.0);
    CHECK(got[1] == got[0]);
    CHECK(got[2] == cast);
    check_close<float>(got[3], set, 1.0, 0.0);
    check_close<float>(got[4], added, 2.0, 4.0);
    check_close<TestType>(got[5], sum, narrow<TestType> ? 1.1 : 1.0, narrow<TestType> ? 1e-3 : 0.0);
    for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(got[6][i] == -4.0 * as_double(start[i]));
  }
}

TEMPLATE_TEST_CASE("emulated: first values of tensors", "[emulated][elementwise]", float, bf16) {
  std::int64_t const n = 16500, first = 131;
  std::uint64_t const seed = 11, hash = fsdp::hash_name("a tensor");
  Doubles uniform, normal;
  for (std::int64_t i = first; i < first + n; ++i) {  // [Note: Random elements]
    auto const counter = static_cast<std::uint32_t>(i / 64 * 16 + i % 16);
    auto const w =
        fsdp::philox({counter, 0, static_cast<std::uint32_t>(hash), static_cast<std::uint32_t>(hash >> 32)}, seed);
    std::uint32_t const word[4] = {w.a, w.b, w.c, w.d};
    std::size_t const place = static_cast<std::size_t>(i % 64 / 16), pair = place / 2 * 2;
    uniform.push_back(-0.5 + 2.0 * (word[place] >> 8) * 0x1p-24);
    double const radius = std::sqrt(-2.0 * std::log((word[pair] >> 1) * 0x1p-31 + 0x1p-32));
    double const angle = 2.0 * std::acos(-1.0) * static_cast<std::int32_t>(word[pair + 1]) * 0x1p-32;
    normal.push_back(0.25 + 0.02 * radius * (place % 2 == 0 ? std::cos(angle) : std::sin(angle)));
  }
  auto const got = everywhere([&](Device const& device, std::size_t skip) {
    View<TestType> a(std::vector<TestType>(size(n)), skip), b = a, c = a, d = a;
    kernels::initialize(device, stream, a.out(), n, fsdp::init::uniform(-0.5f, 1.5f), seed, hash, first);
    kernels::initialize(device, stream, b.out(), n, fsdp::init::normal(0.25f, 0.02f), seed, hash, first);
    kernels::initialize(device, stream, c.out(), n, fsdp::init::constant(3.0f), seed, hash, first);
    kernels::initialize(device, stream, d.out(), n, fsdp::init::zeros, seed, hash, first);
    return std::vector{doubles(a), doubles(b), doubles(c), doubles(d)};
  });
  check_close<TestType>(got[0], uniform, narrow<TestType> ? 1.1 : 4.0, narrow<TestType> ? 1e-3 : 1.0);
  check_close<TestType>(got[1], normal, narrow<TestType> ? 1.1 : 16.0, narrow<TestType> ? 1e-3 : 0.25);
  CHECK(got[2] == Doubles(size(n), 3.0));
  CHECK(got[3] == Doubles(size(n), 0.0));
}

TEST_CASE("emulated: norms, the clip factor and the loss scale", "[emulated][norm]") {
  for (auto const n : {std::int64_t{1}, std::int64_t{2053}, std::int64_t{50001}}) {
    CAPTURE(n);
    auto const x = random_values(n, 8);
    double l1 = 0, l2 = 0, inf = 0;
    for (auto const v : x) {
      l1 += std::fabs(as_double(v));
      l2 += as_double(v) * as_double(v);
      inf = std::fmax(inf, std::fabs(as_double(v)));
    }
    auto broken = x;
    broken[x.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    auto const shares = kernels::norm_partial_count(n);
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<float> const in(x, skip), bad(broken, skip);
      View<double> partials(std::vector<double>(size(shares)), skip);
      View<double> digits(std::vector<double>(kernels::norm_digit_count), skip);
      Doubles totals, factors;
      for (auto const* const of : {&in, &bad}) {
        for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) {
          double total = -1;
          float const loss_scale = 4.0f;
          fsdp::ClipScalars clip{};
          fsdp::LossScale state{.scale = 8.0f, .good_steps = 1};
          kernels::norm_partials(device, stream, of->in(), n, kind, partials.out());
          kernels::norm_combine(device, stream, partials.in(), shares, kind, &total);
          kernels::norm_digits(device, stream, partials.in(), shares, digits.out());
          if (kind == NormKind::inf)
            kernels::clip_factor(device, stream, &total, 1, kind, 0.5f, &loss_scale, &clip);
          else
            kernels::clip_factor(device, stream, digits.in(), kernels::norm_digit_count, kind, 0.5f, &loss_scale,
                                 &clip);
          kernels::update_scale(device, stream, &clip, 2.0f, 0.5f, 2, &state);
          totals.push_back(total);
          factors.insert(factors.end(), {clip.norm, as_double(clip.factor), as_double(state.scale),
                                         static_cast<double>(state.good_steps)});
        }
      }
      return std::vector{totals, factors};
    });
    double const bound = static_cast<double>(n);
    CHECK(std::fabs(got[0][0] - l1) <= bound * 0x1p-53 * l1);
    CHECK(std::fabs(got[0][1] - l2) <= bound * 0x1p-53 * l2);
    CHECK(got[0][2] == inf);
    double const norms[3] = {l1 / 4.0, std::sqrt(l2) / 4.0, inf / 4.0};
    for (std::size_t kind = 0; kind < 3; ++kind) {
      CHECK(got[1][kind * 4] == Approx(norms[kind]).epsilon(1e-12));
      CHECK(got[1][kind * 4 + 1] == Approx(std::fmin(1.0, 0.5 / (norms[kind] + 1e-6)) / 4.0).epsilon(1e-6));
      CHECK(got[1][kind * 4 + 2] == 16.0);
      CHECK_FALSE(std::isfinite(got[0][3 + kind]));
      CHECK(got[1][(3 + kind) * 4 + 1] == -1.0);
      CHECK(got[1][(3 + kind) * 4 + 2] == 4.0);
    }
  }
}

TEMPLATE_TEST_CASE("emulated: adamw", "[emulated][optim]", float, bf16) {
  using P = TestType;
  std::int64_t const n = 4001;
  // A hole at [1000, 1003) belongs to no chunk and must not change. Moments of two chunks lie in another order.
  std::vector<fsdp::OptimizerChunk> const chunks{
      {0, 1000, 0.1f, 1, 0}, {1003, 1, 0.0f, 2, 0, 2997}, {1004, 2997, 0.0f, 3, 5, -1}};
  auto const place = [](std::size_t i) { return i < 1003 ? i : i == 1003 ? 4000 : i - 1; };
  auto const p0 = random_values<P>(n, 12), m0 = random_values<P>(n, 13, 0.1);
  auto const g = random_values(n, 11);
  auto v0 = m0;
  for (auto& value : v0) value = fsdp::narrow<P>(as_double(value) * as_double(value));
  fsdp::AdamWScalars const s{.beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f};
  auto const step = [&](bool stochastic, float factor) {
    return everywhere([&](Device const& device, std::size_t skip) {
      View<P> p(p0, skip), m(m0, skip), v(v0, skip);
      View<float> const gradient(g, skip);
      fsdp::OptimizerStep now{.taken = 2};
      fsdp::ClipScalars clip{.factor = factor};
      kernels::begin_step(device, stream, &now, 1e-2f, s.beta1, s.beta2, &clip);
      auto const run = [&](auto kind) {
        kernels::adamw<decltype(kind)::value>(device, stream, chunks.data(), 3, &now, s, p.out(), gradient.in(),
                                              m.out(), v.out(), 99);
      };
      stochastic ? run(std::true_type{}) : run(std::false_type{});
      return std::vector{doubles(p), doubles(m), doubles(v), Doubles{static_cast<double>(now.taken)}};
    });
  };
  auto const skipped = step(false, -1.0f);
  CHECK(skipped[0] == doubles(p0));
  CHECK(skipped[3][0] == 2.0);
  for (bool const stochastic : {false, true}) {
    if (stochastic && !narrow<P>) continue;
    CAPTURE(stochastic);
    auto const got = step(stochastic, 0.7f);
    CHECK(got[3][0] == 3.0);
    double const b1 = static_cast<double>(s.beta1), b2 = static_cast<double>(s.beta2),
                 rate = static_cast<double>(1e-2f);
    Doubles p, m(p0.size()), v(p0.size());
    for (std::size_t i = 0; i < p0.size(); ++i) {
      auto const at = place(i);
      if (i >= 1000 && i < 1003) {
        REQUIRE(got[0][i] == as_double(p0[i]));
        REQUIRE((got[1][i] == as_double(m0[i]) && got[2][i] == as_double(v0[i])));
        p.push_back(got[0][i]), m[i] = got[1][i], v[i] = got[2][i];
        continue;
      }
      double const slope = as_double(g[i]) * static_cast<double>(0.7f);
      m[at] = b1 * as_double(m0[at]) + (1 - b1) * slope;
      v[at] = b2 * as_double(v0[at]) + (1 - b2) * slope * slope;
      double const move = m[at] / (1 - b1 * b1 * b1) / (std::sqrt(v[at] / (1 - b2 * b2 * b2)) + 1e-8);
      p.push_back(as_double(p0[i]) * (1 - rate * (i < 1000 ? 0.1 : 0.0)) - rate * move);
    }
    double const slack = stochastic ? 2.1 : narrow<P> ? 1.1 : 16.0, least = narrow<P> ? 1e-2 : 1.0;
    check_close<P>(got[0], p, slack, narrow<P> ? 0.1 : 4.0);
    check_close<P>(got[1], m, slack, least);
    check_close<P>(got[2], v, slack, least);
  }
}

TEMPLATE_TEST_CASE("emulated: sgd", "[emulated][optim]", float, bf16) {
  using P = TestType;
  std::int64_t const n = 3001;
  // Velocities lie in another order than parameters.
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 1000, 0.1f, 1, 0, 2001}, {1000, 2001, 0.0f, 2, 7, -1000}};
  auto const place = [](std::size_t i) { return i < 1000 ? i + 2001 : i - 1000; };
  auto const p0 = random_values<P>(n, 15);
  auto const g = random_values(n, 16), u0 = random_values(n, 17);
  for (int const kind : {0, 1, 2, 3}) {  // plain, with momentum, with momentum and stochastic rounding, with Nesterov's
    if (kind == 2 && !narrow<P>) continue;
    CAPTURE(kind);
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<P> p(p0, skip);
      View<float> u(u0, skip);
      View<float> const gradient(g, skip);
      fsdp::OptimizerStep const now{.taken = 1, .factor = 0.7f, .learning_rate = 0.01f};
      float* const velocity = kind == 0 ? nullptr : u.out();
      fsdp::SgdScalars const scalars{0.9f, kind == 3};
      if (kind == 2)
        kernels::sgd<true>(device, stream, chunks.data(), 2, &now, scalars, p.out(), gradient.in(), velocity, 99);
      else
        kernels::sgd(device, stream, chunks.data(), 2, &now, scalars, p.out(), gradient.in(), velocity);
      return std::vector{doubles(p), doubles(u)};
    });
    Doubles p, u(p0.size());
    for (std::size_t i = 0; i < p0.size(); ++i) {
      double const decay = i < 1000 ? static_cast<double>(0.1f) : 0.0, inertia = static_cast<double>(0.9f);
      double const slope = as_double(g[i]) * static_cast<double>(0.7f) + decay * as_double(p0[i]);
      auto& velocity = u[place(i)];
      velocity = as_double(u0[place(i)]);
      if (kind > 0) velocity = slope + inertia * velocity;
      double const move = kind == 0 ? slope : kind == 3 ? slope + inertia * velocity : velocity;
      p.push_back(as_double(p0[i]) - static_cast<double>(0.01f) * move);
    }
    check_close<P>(got[0], p, kind == 2 ? 2.1 : narrow<P> ? 1.1 : 4.0, narrow<P> ? 0.01 : 4.0);
    check_close<float>(got[1], u, 4.0, 4.0);
  }
}

TEST_CASE("emulated: products and transposed matrices", "[emulated][muon]") {
  struct Shape {
    std::int64_t m, n, k;
  };
  for (auto const& shape :
       {Shape{1, 1, 1}, Shape{4, 512, 4}, Shape{5, 513, 7}, Shape{9, 1100, 3}, Shape{3, 33, 130}}) {
    auto const m = shape.m, n = shape.n, k = shape.k;  // clang 14 captures no structured binding
    CAPTURE(m, n, k);
    // Small whole numbers, so that every order of a sum has the same value.
    auto const whole = [](std::int64_t count, unsigned seed) {
      auto values = random_values(count, seed, 2.0);
      for (auto& value : values) value = std::round(value);
      return values;
    };
    auto const a = whole(m * k, 21), b = whole(k * n, 22), c0 = whole(m * n, 23);
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<float> const left(a, skip), right(b, skip);
      View<float> c(c0, skip), fresh(std::vector<float>(c0.size(), std::numeric_limits<float>::quiet_NaN()), skip),
          turned(b, skip);
      kernels::product(device, stream, m, n, k, 2.0f, left.in(), right.in(), -3.0f, c.out());
      kernels::product(device, stream, m, n, k, 1.0f, left.in(), right.in(), 0.0f, fresh.out());
      kernels::transpose(device, stream, k, n, right.in(), turned.out());
      return std::vector{doubles(c), doubles(fresh), doubles(turned)};
    });
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (std::int64_t t = 0; t < k; ++t)
          sum += as_double(a[static_cast<std::size_t>(i * k + t)]) * as_double(b[static_cast<std::size_t>(t * n + j)]);
        auto const at = static_cast<std::size_t>(i * n + j);
        REQUIRE(got[0][at] == 2 * sum - 3 * as_double(c0[at]));
        REQUIRE(got[1][at] == sum);
      }
    for (std::int64_t i = 0; i < k; ++i)
      for (std::int64_t j = 0; j < n; ++j)
        REQUIRE(got[2][static_cast<std::size_t>(j * k + i)] == as_double(b[static_cast<std::size_t>(i * n + j)]));
  }
}

TEMPLATE_TEST_CASE("emulated: momentum and updates of Muon", "[emulated][muon]", float, bf16) {
  using P = TestType;
  std::int64_t const n = 3001;
  std::vector<fsdp::OptimizerChunk> const chunks{{0, 1000, 0.1f, 1, 0, 2001}, {1000, 2001, 0.0f, 2, 7, -1000}};
  auto const place = [](std::size_t i) { return i < 1000 ? i + 2001 : i - 1000; };
  auto const p0 = random_values<P>(n, 31);
  auto const g = random_values(n, 32), m0 = random_values(n, 33), moves = random_values(n, 34);
  for (int const kind : {0, 1, 2, 3}) {  // plain, Nesterov's, stochastic rounding, skipped
    if (kind == 2 && !narrow<P>) continue;
    CAPTURE(kind);
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<P> p(p0, skip);
      View<float> m(m0, skip), out(moves, skip);
      View<float> const gradient(g, skip), by(moves, skip);
      fsdp::OptimizerStep const now{.taken = 1, .factor = kind == 3 ? -1.0f : 0.7f, .learning_rate = 0.01f};
      kernels::muon_momentum(device, stream, chunks.data(), 2, &now, fsdp::SgdScalars{0.9f, kind == 1}, gradient.in(),
                             m.out(), out.out());
      if (kind == 2)
        kernels::muon_update<true>(device, stream, chunks.data(), 2, &now, p.out(), by.in(), 99);
      else
        kernels::muon_update(device, stream, chunks.data(), 2, &now, p.out(), by.in());
      return std::vector{doubles(p), doubles(m), doubles(out)};
    });
    Doubles p, m(p0.size()), out;
    for (std::size_t i = 0; i < p0.size(); ++i) {
      double const beta = static_cast<double>(0.9f), slope = as_double(g[i]) * static_cast<double>(0.7f);
      double const decay = i < 1000 ? static_cast<double>(0.1f) : 0.0, rate = static_cast<double>(0.01f);
      auto& average = m[place(i)];
      average = as_double(m0[place(i)]);
      if (kind != 3) average = beta * average + (1 - beta) * slope;
      out.push_back(kind == 1 ? beta * average + (1 - beta) * slope : average);
      p.push_back(kind == 3 ? as_double(p0[i]) : as_double(p0[i]) * (1 - rate * decay) - rate * as_double(moves[i]));
    }
    check_close<P>(got[0], p, kind == 2 ? 2.1 : narrow<P> ? 1.1 : 4.0, narrow<P> ? 0.01 : 4.0);
    check_close<float>(got[1], m, 4.0, 4.0);
    check_close<float>(got[2], out, 4.0, 4.0);
  }
}

TEMPLATE_TEST_CASE("emulated: averages of weights", "[emulated][ema]", float, bf16) {
  using P = TestType;
  for (auto const n : lengths) {
    CAPTURE(n);
    auto const p0 = random_values<P>(n, 41);
    auto const a0 = random_values(n, 42), b0 = random_values(n, 43);
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<P> const p(p0, skip);
      View<float> taken(a0, skip), left(a0, skip), a(a0, skip), b(b0, skip), unit(a0, skip);
      fsdp::ClipScalars const take{.factor = 0.5f}, leave{.factor = -1.0f};
      kernels::update_average(device, stream, taken.out(), p.in(), n, 0.75f, &take);
      kernels::update_average(device, stream, left.out(), p.in(), n, 0.75f, &leave);
      kernels::swap(device, stream, a.out(), b.out(), n);
      double const squares = 16.0;
      kernels::normalise(device, stream, unit.out(), n, &squares, 1e-7f, 2.0f);
      return std::vector{doubles(taken), doubles(left), doubles(a), doubles(b), doubles(unit)};
    });
    Doubles taken, unit;
    for (std::size_t i = 0; i < a0.size(); ++i) {
      taken.push_back(0.75 * as_double(a0[i]) + 0.25 * as_double(p0[i]));
      unit.push_back(0.5 * as_double(a0[i]));
    }
    check_close<float>(got[0], taken, 4.0, 4.0);
    CHECK(got[1] == doubles(a0));
    CHECK(got[2] == doubles(b0));
    CHECK(got[3] == doubles(a0));
    CHECK(got[4] == unit);
  }
}

TEMPLATE_TEST_CASE("emulated: sums over ranks", "[emulated][pairwise]", float, bf16) {
  std::int64_t const n = 5003;
  for (int const ranks : {1, 2, 3, 8, 9, 64}) {
    CAPTURE(ranks);
    std::vector<std::vector<TestType>> sources;
    Doubles exact(size(n), 0.0);
    for (int rank = 0; rank < ranks; ++rank) {
      sources.push_back(random_values<TestType>(n, static_cast<unsigned>(30 + rank)));
      for (std::size_t i = 0; i < exact.size(); ++i) exact[i] += as_double(sources.back()[i]);
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      std::vector<View<TestType>> views;
      std::vector<TestType const*> from;
      for (auto const& source : sources) views.emplace_back(source, skip);
      for (auto const& view : views) from.push_back(view.in());
      auto& last = views.back();  // summed into one of the sources
      fsdp::pairwise::launch_sum(device, stream, from.data(), ranks, last.out(), n);
      return std::vector<Doubles>{doubles(last)};
    });
    check_close<TestType>(got[0], exact, narrow<TestType> ? 1.1 : 8.0, narrow<TestType> ? 1e-2 : 16.0);
  }
}
