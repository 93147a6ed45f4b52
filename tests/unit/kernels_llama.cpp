// SPDX-License-Identifier: Apache-2.0
// The kernels of a Llama: against plain loops in double, and their gradients against finite differences in double.
// skip-tsan
// optimised
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"
#include "transformer/kernels/embedding.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/kernels/rope.hpp"
#include "transformer/kernels/swiglu.hpp"

using namespace kernel_test;
using fsdp::bf16;
using transformer::Compute;
using transformer::GroupedHeads;
using transformer::Pass;
using transformer::RopeScaling;

namespace {

LoopDevice const device{.reversed = true};
LoopDevice::Stream stream;

using Doubles = std::vector<double>;

struct Shape {
  std::int64_t rows, columns;
};
std::vector<Shape> const shapes{{0, 8}, {1, 1}, {1, 64}, {3, 65}, {31, 7}, {32, 128}, {33, 300}, {130, 257}};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::size_t area(Shape s) { return size(s.rows * s.columns); }

template <class T>
Doubles doubles(std::vector<T> const& values) {
  Doubles wide;
  for (auto const& value : values) wide.push_back(as_double(value));
  return wide;
}

/// The error of arithmetic in Compute<T> is below `steps` roundings of `scale`; the result is then rounded to T.
template <class T>
void check_each(std::vector<T> const& got, Doubles const& exact, Doubles const& scale, double steps) {
  REQUIRE(got.size() == exact.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const arithmetic = steps * rounding<Compute<T>> * scale[i];
    double const bound = arithmetic + 1.01 * rounding<T> * (std::fabs(exact[i]) + arithmetic);
    if (!(std::fabs(as_double(got[i]) - exact[i]) <= bound))
      FAIL("element " << i << " is " << as_double(got[i]) << ", not " << exact[i] << ", beyond " << bound);
  }
}

/// Central differences of `loss` in every element of `x`, against `gradient`.
template <class Loss>
void check_slope(Doubles& x, Doubles const& gradient, Loss loss, double tolerance = 2e-7) {
  REQUIRE(x.size() == gradient.size());
  double const h = 1e-5;
  for (std::size_t i = 0; i < x.size(); ++i) {
    double const kept = x[i];
    x[i] = kept + h;
    double const above = loss();
    x[i] = kept - h;
    double const below = loss();
    x[i] = kept;
    CAPTURE(i);
    CHECK(gradient[i] == Approx((above - below) / (2 * h)).margin(tolerance).epsilon(tolerance));
  }
}

double dot(Doubles const& a, Doubles const& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Roundings that a sum of n elements in 64 accumulators, and what is done with it, may take.
double steps_of_sum(std::int64_t n) { return static_cast<double>(n / 64) + 20.0; }

template <class A>
struct Normed {
  std::vector<A> y, sum;
  std::vector<Compute<A>> scale;
};

constexpr double epsilon = 1e-5;

template <class A>
Normed<A> norm(Shape s, std::vector<A> const& x, std::vector<A> const& weight) {
  Normed<A> r{std::vector<A>(area(s)), {}, std::vector<Compute<A>>(size(s.rows))};
  transformer::rms_norm_forward(device, stream, x.data(), weight.data(), r.y.data(), r.scale.data(), s.rows, s.columns,
                                epsilon);
  return r;
}

}  // namespace

TEMPLATE_TEST_CASE("rms norm matches a plain double loop", "[kernels][llama]", float, bf16, double) {
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const x = random_values<TestType>(s.rows * s.columns, 1);
    auto const weight = random_values<TestType>(s.columns, 2),
               residual = random_values<TestType>(s.rows * s.columns, 3);
    auto const check = [&](Doubles const& in, Normed<TestType> const& got) {
      Doubles exact, scales;
      for (std::int64_t row = 0; row < s.rows; ++row) {
        double squares = 0;
        for (std::int64_t c = 0; c < s.columns; ++c) squares += std::pow(in[size(row * s.columns + c)], 2);
        scales.push_back(1.0 / std::sqrt(squares / static_cast<double>(s.columns) + epsilon));
        for (std::int64_t c = 0; c < s.columns; ++c)
          exact.push_back(as_double(weight[size(c)]) * in[size(row * s.columns + c)] * scales.back());
      }
      Doubles magnitude(exact);
      for (auto& value : magnitude) value = std::fabs(value);
      check_each(got.y, exact, magnitude, steps_of_sum(s.columns));
      check_each(got.scale, scales, scales, steps_of_sum(s.columns));
    };
    check(doubles(x), norm(s, x, weight));
    // A residual addition before it: the norm is that of the sum as it is stored.
    Normed<TestType> both{std::vector<TestType>(area(s)), std::vector<TestType>(area(s)),
                          std::vector<Compute<TestType>>(size(s.rows))};
    transformer::residual_rms_norm_forward(device, stream, residual.data(), x.data(), both.sum.data(), weight.data(),
                                           both.y.data(), both.scale.data(), s.rows, s.columns, epsilon);
    for (std::size_t i = 0; i < x.size(); ++i)
      REQUIRE(as_double(both.sum[i]) ==
              as_double(fsdp::narrow<TestType>(fsdp::widen(residual[i]) + fsdp::widen(x[i]))));
    check(doubles(both.sum), both);
    // In place, and without a statistic: the same to the bit.
    auto in_place = x;
    transformer::rms_norm_forward(device, stream, static_cast<TestType const*>(in_place.data()), weight.data(),
                                  in_place.data(), static_cast<Compute<TestType>*>(nullptr), s.rows, s.columns,
                                  epsilon);
    CHECK(doubles(in_place) == doubles(norm(s, x, weight).y));
  }
}

TEST_CASE("rms norm's gradients are its slopes", "[kernels][llama]") {
  Shape const s{5, 7};
  auto x = random_values<double>(35, 1), weight = random_values<double>(7, 2);
  auto const dy = random_values<double>(35, 3);
  auto const loss = [&] { return dot(norm(s, x, weight).y, dy); };
  Doubles dx(35), dw(7), partials(size(transformer::rms_norm_partials(5, 7)));
  auto const scale = norm(s, x, weight).scale;
  transformer::rms_norm_backward(device, stream, dy.data(), x.data(), weight.data(), scale.data(),
                                 static_cast<double const*>(nullptr), dx.data(), dw.data(), s.rows, s.columns,
                                 partials.data());
  check_slope(x, dx, loss);
  check_slope(weight, dw, loss);
}

TEMPLATE_TEST_CASE("rms norm's gradients match plain double loops", "[kernels][llama]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const x = random_values<A>(s.rows * s.columns, 1), dy = random_values<A>(s.rows * s.columns, 2);
    auto const weight = random_values<A>(s.columns, 3), past = random_values<A>(s.rows * s.columns, 4);
    auto const scale = norm(s, x, weight).scale;
    double const n = static_cast<double>(s.columns);
    Doubles own, own_size, dw(size(s.columns)), dw_size(dw);
    for (std::int64_t row = 0; row < s.rows; ++row) {
      double const v = as_double(scale[size(row)]);
      double mean = 0, mean_size = 0;
      auto const normal = [&](std::int64_t c) { return v * as_double(x[size(row * s.columns + c)]); };
      auto const up = [&](std::int64_t c) { return as_double(dy[size(row * s.columns + c)]); };
      auto const gain = [&](std::int64_t c) { return as_double(weight[size(c)]); };
      for (std::int64_t c = 0; c < s.columns; ++c) {
        mean += up(c) * gain(c) * normal(c) / n;
        mean_size += std::fabs(up(c) * gain(c) * normal(c)) / n;
        dw[size(c)] += up(c) * normal(c);
        dw_size[size(c)] += std::fabs(up(c) * normal(c));
      }
      for (std::int64_t c = 0; c < s.columns; ++c) {
        own.push_back(v * (up(c) * gain(c) - normal(c) * mean));
        own_size.push_back(v * (std::fabs(up(c) * gain(c)) + std::fabs(normal(c)) * mean_size));
      }
    }
    auto const run = [&](A const* add, A* dx, float* gradient, bool fresh) {
      std::vector<float> partials(size(transformer::rms_norm_partials(s.rows, s.columns)), NAN);
      transformer::rms_norm_backward(device, stream, dy.data(), x.data(), weight.data(), scale.data(), add, dx,
                                     gradient, s.rows, s.columns, gradient == nullptr ? nullptr : partials.data(),
                                     fresh);
    };
    Doubles with_past = own, with_past_size = own_size, after = dw, after_size = dw_size;
    for (std::size_t i = 0; i < own.size(); ++i) {
      with_past[i] += as_double(past[i]);
      with_past_size[i] += std::fabs(as_double(past[i]));
    }
    for (std::size_t c = 0; c < dw.size(); ++c) {
      after[c] += 0.5;
      after_size[c] += 0.5;
    }
    double const steps = steps_of_sum(s.columns), row_steps = static_cast<double>(s.rows) + 4.0;
    for (bool const trains : {true, false}) {
      CAPTURE(trains);
      // Set alone; then added to the residual stream's gradient in place, with a gradient of the weight before.
      std::vector<A> dx(area(s), A(7.0f));
      std::vector<float> gradient(size(s.columns), NAN);
      run(nullptr, dx.data(), trains ? gradient.data() : nullptr, true);
      check_each(dx, own, own_size, steps);
      if (trains && s.rows > 0) check_each(gradient, dw, dw_size, row_steps);
      dx = past;
      std::fill(gradient.begin(), gradient.end(), 0.5f);
      run(dx.data(), dx.data(), trains ? gradient.data() : nullptr, false);
      check_each(dx, with_past, with_past_size, steps);
      if (trains) check_each(gradient, after, after_size, row_steps);
    }
  }
}

namespace {

/// The angle of HuggingFace's wavelengths, in long double.
long double angle(RopeScaling const& scaling, long double theta, std::int64_t head, std::int64_t i,
                  std::int64_t position) {
  long double const plain = 1.0L / std::pow(theta, static_cast<long double>(2 * i) / static_cast<long double>(head));
  long double const wavelength = 2.0L * 3.14159265358979323846264L / plain;
  long double const factor = scaling.factor;
  long double frequency = plain;
  if (scaling.kind == RopeScaling::Kind::linear) frequency = plain / factor;
  if (scaling.kind == RopeScaling::Kind::llama3) {
    auto const original = static_cast<long double>(scaling.original_max_position_embeddings);
    long double const low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    long double const smooth = (original / wavelength - low) / (high - low);
    if (wavelength > original / low) {
      frequency = plain / factor;
    } else if (wavelength >= original / high) {
      frequency = (1 - smooth) * plain / factor + smooth * plain;
    }
  }
  return frequency * static_cast<long double>(position);
}

std::vector<RopeScaling> const scalings{
    {}, {.kind = RopeScaling::Kind::linear, .factor = 4.0}, {RopeScaling::Kind::llama3, 8.0, 1.0, 4.0, 128}};

}  // namespace

TEST_CASE("the table of rotations is the definition's, rounded once", "[kernels][llama]") {
  for (auto const& scaling : scalings) {
    for (double const theta : {10000.0, 1e6}) {
      std::int64_t const head = 32, positions = 3000;
      auto const table = transformer::rope_table(scaling, theta, head, positions);
      REQUIRE(table.size() == size(head * positions));
      int kinds[3] = {};
      for (std::int64_t i = 0; i < head / 2; ++i) {
        double const frequency = transformer::rope_frequency(scaling, theta, head, i);
        double const plain = transformer::rope_frequency({}, theta, head, i);
        ++kinds[frequency == plain ? 0 : frequency == plain / scaling.factor ? 1 : 2];
        for (std::int64_t p = 0; p < positions; p += 13) {
          long double const a = angle(scaling, theta, head, i, p);
          // An angle below 3000 in double is exact to 2^-41; the entry is rounded to 2^-25.
          double const bound = 0x1p-25 + 0x1p-38;
          CHECK(std::fabs(static_cast<double>(table[size(p * head + i)] - std::cos(a))) <= bound);
          CHECK(std::fabs(static_cast<double>(table[size(p * head + head / 2 + i)] - std::sin(a))) <= bound);
        }
      }
      // llama3 has frequencies of all three kinds here.
      if (scaling.kind == RopeScaling::Kind::llama3) CHECK((kinds[0] > 0 && kinds[1] > 0 && kinds[2] > 0));
    }
  }
}

namespace {

struct RopeCase {
  GroupedHeads heads;
  Pass pass;
};
std::vector<RopeCase> const ropes{{{1, 1, 2}, {.batch = 1, .length = 1, .capacity = 1}},
                                  {{6, 2, 6}, {.batch = 2, .length = 5, .position = 3, .capacity = 11}},
                                  {{4, 4, 16}, {.batch = 3, .length = 7, .capacity = 7}},
                                  {{8, 1, 10}, {.batch = 1, .length = 1, .position = 9, .capacity = 12}}};

/// Where element i of a head of kind q, k or v (0, 1, 2) lies in what attention reads.
std::size_t packed_at(RopeCase const& c, std::int64_t b, std::int64_t t, std::int64_t kind, std::int64_t head,
                      std::int64_t i) {
  return size(((b * c.pass.capacity + c.pass.position + t) * 3 + kind) * c.heads.width() + head * c.heads.size + i);
}

}  // namespace

TEMPLATE_TEST_CASE("rope rotates queries and keys, and repeats groups, by positions", "[kernels][llama]", float, bf16,
                   double) {
  using A = TestType;
  for (auto const& c : ropes) {
    auto const& h = c.heads;
    CAPTURE(h.heads, h.kv_heads, h.size);
    auto const in = random_values<A>(c.pass.rows() * h.projected(), 5);
    auto const table = transformer::rope_table({}, 100.0, h.size, c.pass.position + c.pass.length);
    A const untouched(41.0f);
    std::vector<A> packed(size(c.pass.batch * c.pass.capacity * 3 * h.width()), untouched);
    transformer::rope_forward(device, stream, h, c.pass, in.data(), table.data(), packed.data());
    std::vector<A> got;
    Doubles exact, magnitude;
    for (std::int64_t b = 0; b < c.pass.batch; ++b) {
      for (std::int64_t t = 0; t < c.pass.length; ++t) {
        auto const projected = [&](std::int64_t head, std::int64_t i) {
          return as_double(in[size((b * c.pass.length + t) * h.projected() + head * h.size + i)]);
        };
        for (std::int64_t kind = 0; kind < 3; ++kind) {
          for (std::int64_t head = 0; head < h.heads; ++head) {
            std::int64_t const source =
                kind == 0 ? head : h.heads + (kind - 1) * h.kv_heads + head / (h.heads / h.kv_heads);
            for (std::int64_t i = 0; i < h.size / 2; ++i) {
              std::complex<double> pair(projected(source, i), projected(source, i + h.size / 2));
              double const turn = std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(h.size));
              if (kind < 2) pair *= std::polar(1.0, turn * static_cast<double>(c.pass.position + t));
              auto const low = packed_at(c, b, t, kind, head, i), high = low + size(h.size / 2);
              for (auto const& [at, part] : {std::pair{low, pair.real()}, std::pair{high, pair.imag()}}) {
                got.push_back(packed[at]);
                packed[at] = untouched;
                exact.push_back(part);
                magnitude.push_back(std::abs(projected(source, i)) + std::abs(projected(source, i + h.size / 2)));
              }
            }
          }
        }
      }
    }
    // The table is of fp32: 1 rounding; two products and their sum: 2.
    double const steps = std::is_same_v<A, double> ? 3.0 * 0x1p-24 / 0x1p-53 : 3.0;
    check_each(got, exact, magnitude, steps);
    CHECK(doubles(packed) == Doubles(packed.size(), 41.0));  // rows of other positions
  }
}

TEST_CASE("rope's backward is the adjoint of its forward, to the rounding of double", "[kernels][llama]") {
  for (auto c : ropes) {
    c.pass.position = 0;
    c.pass.capacity = c.pass.length;
    auto const& h = c.heads;
    CAPTURE(h.heads, h.kv_heads, h.size);
    auto const table = transformer::rope_table({}, 100.0, h.size, c.pass.length);
    auto const x = random_values<double>(c.pass.rows() * h.projected(), 5);
    auto const up = random_values<double>(c.pass.rows() * 3 * h.width(), 6);
    Doubles y(up.size()), dx(x.size());
    transformer::rope_forward(device, stream, h, c.pass, x.data(), table.data(), y.data());
    transformer::rope_backward(device, stream, h, c.pass, up.data(), table.data(), dx.data());
    CHECK(dot(up, y) == Approx(dot(dx, x)).epsilon(1e-12).margin(1e-12));
    // Each element of the gradient: y is linear in x.
    for (std::size_t i = 0; i < x.size(); ++i) {
      Doubles one(x.size());
      one[i] = 1.0;
      transformer::rope_forward(device, stream, h, c.pass, one.data(), table.data(), y.data());
      CHECK(std::fabs(dot(up, y) - dx[i]) <= 1e-13);
    }
  }
}

TEMPLATE_TEST_CASE("rope's backward sums groups in fp32 and rounds once", "[kernels][llama]", float, bf16) {
  using A = TestType;
  for (auto c : ropes) {
    c.pass.position = 0;
    c.pass.capacity = c.pass.length;
    auto const& h = c.heads;
    auto const table = transformer::rope_table({}, 100.0, h.size, c.pass.length);
    auto const up = random_values<A>(c.pass.rows() * 3 * h.width(), 6);
    auto const wide = doubles(up);
    double largest = 0;
    for (auto const value : wide) largest = std::max(largest, std::fabs(value));
    std::vector<A> dx(size(c.pass.rows() * h.projected()));
    Doubles exact(dx.size());
    transformer::rope_backward(device, stream, h, c.pass, up.data(), table.data(), dx.data());
    transformer::rope_backward(device, stream, h, c.pass, wide.data(), table.data(), exact.data());
    // Two sums of `group` elements each, with group - 1 roundings; two products and their sum.
    double const group = static_cast<double>(h.group());
    check_each(dx, exact, Doubles(dx.size(), 2.0 * group * largest), group + 1.0);
  }
}

TEST_CASE("silu and its derivative keep their documented error over all of fp32", "[kernels][llama]") {
  double value_error = 0, slope_error = 0;
  for (std::uint64_t word = 0; word <= 0xffffffffull; word += 1511) {
    float const x = fsdp::detail::bit_cast<float>(static_cast<std::uint32_t>(word));
    auto const got = transformer::silu_with_derivative(x);
    float const value = transformer::silu(x);
    if (std::isnan(x)) {
      if (!(std::isnan(value) && std::isnan(got.value) && std::isnan(got.derivative))) FAIL("NaN is lost");
      continue;
    }
    if (std::isinf(x)) continue;
    if (value != got.value) FAIL("the value beside the derivative differs at " << x);
    auto const wide = static_cast<double>(x);
    double const logistic = 1.0 / (1.0 + std::exp(-wide)), exact = wide * logistic;
    if (x >= -87.0f) {
      double const unit = std::ldexp(1.0, std::ilogb(std::fmax(std::fabs(exact), 0x1p-126)) - 23);
      value_error = std::fmax(value_error, std::fabs(static_cast<double>(value) - exact) / unit);
    } else {
      CHECK(std::fabs(static_cast<double>(value)) < 2e-36);
    }
    double const slope = wide < -700.0 ? 0.0 : logistic + wide * logistic / (1.0 + std::exp(wide));
    double const slope_unit = std::fmax(1.0, std::fabs(static_cast<double>(x)));
    slope_error = std::fmax(slope_error, std::fabs(static_cast<double>(got.derivative) - slope) / slope_unit);
  }
  CHECK(value_error <= 3.0);
  CHECK(slope_error <= 2.5e-7);
  float const infinity = std::numeric_limits<float>::infinity();
  CHECK(transformer::silu(infinity) == infinity);
  CHECK(transformer::silu_with_derivative(infinity).derivative == 1.0f);
  CHECK(std::fabs(transformer::silu(-infinity)) < 2e-36f);
  CHECK(std::fabs(transformer::silu_with_derivative(-infinity).derivative) < 2e-36f);
}

TEMPLATE_TEST_CASE("swiglu and its gradient match plain double loops", "[kernels][llama]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const in = random_values<A>(2 * s.rows * s.columns, 7, 3.0), up = random_values<A>(s.rows * s.columns, 8);
    Doubles exact, exact_size, slopes(in.size()), slopes_size(in.size());
    for (std::int64_t row = 0; row < s.rows; ++row) {
      for (std::int64_t c = 0; c < s.columns; ++c) {
        auto const gate = size(2 * row * s.columns + c), other = gate + size(s.columns);
        double const g = as_double(in[gate]), u = as_double(in[other]), d = as_double(up[size(row * s.columns + c)]);
        auto const [value, derivative] = transformer::silu_with_derivative(g);
        exact.push_back(value * u);
        exact_size.push_back(std::fabs(value * u));
        slopes[gate] = d * u * derivative;
        slopes_size[gate] = std::fabs(d * u) * std::fmax(1.0, std::fabs(g));
        slopes[other] = d * value;
        slopes_size[other] = std::fabs(d * value);
      }
    }
    std::vector<A> y(area(s)), gradient = up, both = in;
    transformer::swiglu_forward(device, stream, in.data(), y.data(), s.rows, s.columns);
    transformer::swiglu_backward(device, stream, both.data(), gradient.data(), s.rows, s.columns);
    // silu is exact to 3 units, which are 6 roundings; its derivative to 2.5e-7, which are 4.2.
    check_each(y, exact, exact_size, 8.0);
    check_each(both, slopes, slopes_size, 8.0);
    CHECK(doubles(gradient) == doubles(y));
  }
}

TEST_CASE("swiglu's gradient is its slope", "[kernels][llama]") {
  auto in = random_values<double>(2 * 3 * 5, 9, 2.0);
  auto const up = random_values<double>(3 * 5, 10);
  auto slopes = in, again = up;
  transformer::swiglu_backward(device, stream, slopes.data(), again.data(), 3, 5);
  Doubles y(15);
  check_slope(in, slopes, [&] {
    transformer::swiglu_forward(device, stream, in.data(), y.data(), 3, 5);
    return dot(y, up);
  });
}

TEMPLATE_TEST_CASE("token embeddings are rows of the table, and their gradients sums in row order", "[kernels][llama]",
                   float, bf16) {
  using A = TestType;
  std::vector<std::int32_t> const tokens{3, 0, 3, 4, 3};
  std::int64_t const rows = 5, columns = 9;
  auto const table = random_values<A>(5 * columns, 11), up = random_values<A>(rows * columns, 12);
  std::vector<A> out(size(rows * columns));
  transformer::token_embedding_forward(device, stream, tokens.data(), table.data(), out.data(), rows, columns);
  std::vector<float> gradient(table.size(), 0.5f), expected = gradient;
  transformer::token_embedding_backward(device, stream, tokens.data(), up.data(), gradient.data(), rows, columns);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    auto const at = size(tokens[size(i / columns)] * columns + i % columns);
    CHECK(as_double(out[size(i)]) == as_double(table[at]));
    expected[at] += fsdp::widen(up[size(i)]);
  }
  CHECK(gradient == expected);
}
