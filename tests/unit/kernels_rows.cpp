// SPDX-License-Identifier: Apache-2.0
// The trainer's row kernels: double forms against finite differences, narrower types against the double forms.
// skip-tsan
// optimised
// long
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/unit/kernels_support.hpp"
#include "transformer/kernels/row_kernels.hpp"

using namespace kernel_test;
using fsdp::bf16;
using transformer::Compute;

namespace {

LoopDevice const device{.reversed = true};
LoopDevice::Stream stream;

using Doubles = std::vector<double>;

struct Shape {
  std::int64_t rows, columns;
};
std::vector<Shape> const shapes{{0, 8}, {1, 1}, {1, 64}, {3, 65}, {31, 7}, {32, 128}, {33, 300}, {130, 257}};

template <class T, class From>
std::vector<T> converted(std::vector<From> const& from) {
  std::vector<T> to;
  for (auto const& value : from) to.push_back(fsdp::narrow<T>(fsdp::widen(value)));
  return to;
}

template <class T>
Doubles doubles(std::vector<T> const& values) {
  return converted<double>(values);
}

/// Every got within `factor` roundings of T of exact, relative to the larger of |exact| and `size`.
template <class T>
void check_close(std::vector<T> const& got, Doubles const& exact, double factor, double size) {
  REQUIRE(got.size() == exact.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    double const bound = factor * rounding<T> * std::fmax(std::fabs(exact[i]), size);
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
    double const slope = (above - below) / (2 * h);
    CAPTURE(i);
    CHECK(gradient[i] == Approx(slope).margin(tolerance).epsilon(tolerance));
  }
}

double dot(Doubles const& a, Doubles const& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

std::size_t area(Shape s) { return static_cast<std::size_t>(s.rows * s.columns); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <class A, class W>
struct NormResult {
  std::vector<A> y;
  std::vector<Compute<A>> mean, scale;
};
template <class A, class W>
NormResult<A, W> norm(Shape s, std::vector<A> const& x, std::vector<W> const& weight, W const* bias) {
  NormResult<A, W> r{std::vector<A>(area(s)), std::vector<Compute<A>>(size(s.rows)),
                     std::vector<Compute<A>>(size(s.rows))};
  transformer::layer_norm_forward(device, stream, x.data(), weight.data(), bias, r.y.data(), r.mean.data(),
                                  r.scale.data(), s.rows, s.columns);
  return r;
}

template <class A, class G>
struct NormGradient {
  std::vector<A> dx;
  std::vector<G> weight, bias;
};
template <class G, class A, class W>
NormGradient<A, G> norm_gradient(Shape s, std::vector<A> const& dy, std::vector<A> const& x,
                                 std::vector<W> const& weight, A const* add) {
  auto const forward = norm(s, x, weight, static_cast<W const*>(nullptr));
  NormGradient<A, G> g{std::vector<A>(area(s)), std::vector<G>(size(s.columns), G(0.5f)),
                       std::vector<G>(size(s.columns), G(0.25f))};
  std::vector<Compute<A>> partials(size(transformer::layer_norm_partials(s.rows, s.columns)));
  transformer::layer_norm_backward(device, stream, dy.data(), x.data(), weight.data(), forward.mean.data(),
                                   forward.scale.data(), add, g.dx.data(), g.weight.data(), g.bias.data(), s.rows,
                                   s.columns, partials.data());
  return g;
}

}  // namespace

TEMPLATE_TEST_CASE("layer norm matches a plain double loop", "[kernels][rows]", float, bf16, double) {
  for (auto const s : shapes) {
    auto const x = random_values<TestType>(s.rows * s.columns, 1);
    auto const weight = random_values<TestType>(s.columns, 2), bias = random_values<TestType>(s.columns, 3);
    auto const with = norm(s, x, weight, bias.data());
    auto const without = norm(s, x, weight, static_cast<TestType const*>(nullptr));
    Doubles exact(area(s)), plain(area(s));
    for (std::int64_t r = 0; r < s.rows; ++r) {
      auto const at = [&](std::int64_t c) { return size(r * s.columns + c); };
      double mean = 0, variance = 0;
      for (std::int64_t c = 0; c < s.columns; ++c) mean += as_double(x[at(c)]) / static_cast<double>(s.columns);
      for (std::int64_t c = 0; c < s.columns; ++c) {
        variance += std::pow(as_double(x[at(c)]) - mean, 2) / static_cast<double>(s.columns);
      }
      for (std::int64_t c = 0; c < s.columns; ++c) {
        plain[at(c)] = (as_double(x[at(c)]) - mean) / std::sqrt(variance + 1e-5) * as_double(weight[size(c)]);
        exact[at(c)] = plain[at(c)] + as_double(bias[size(c)]);
      }
    }
    if (s.columns == 1) continue;  // x - mean is rounding alone, and 1e-5 scales it up
    // Statistics are off by a few roundings; x - mean and the affine map cost as many. Values are below 16.
    double const slack = std::is_same_v<TestType, bf16> ? 1.1 : 64.0;
    check_close(with.y, exact, slack, 16.0 / (std::is_same_v<TestType, bf16> ? 16.0 : 1.0));
    check_close(without.y, plain, slack, 16.0 / (std::is_same_v<TestType, bf16> ? 16.0 : 1.0));
  }
}

TEST_CASE("layer norm's gradients are its slopes", "[kernels][rows]") {
  for (auto const s : {Shape{1, 5}, Shape{3, 65}, Shape{34, 9}}) {
    auto x = random_values<double>(s.rows * s.columns, 4), weight = random_values<double>(s.columns, 5);
    auto bias = random_values<double>(s.columns, 6);
    auto const dy = random_values<double>(s.rows * s.columns, 7), past = random_values<double>(s.rows * s.columns, 8);
    auto gradient = norm_gradient<double>(s, dy, x, weight, past.data());
    auto const alone = norm_gradient<double>(s, dy, x, weight, static_cast<double const*>(nullptr));
    for (auto& value : gradient.weight) value -= 0.5;  // what was there before
    for (auto& value : gradient.bias) value -= 0.25;
    auto const loss = [&] { return dot(norm(s, x, weight, bias.data()).y, dy); };
    check_slope(x, alone.dx, loss, 1e-6);
    check_slope(weight, gradient.weight, loss);
    check_slope(bias, gradient.bias, loss);
    for (std::size_t i = 0; i < past.size(); ++i) {
      CHECK(gradient.dx[i] == Approx(alone.dx[i] + past[i]).epsilon(1e-14).margin(1e-14));
    }
  }
}

TEMPLATE_TEST_CASE("layer norm's gradients keep their precision in narrow types", "[kernels][rows]", float, bf16) {
  for (auto const s : shapes) {
    if (s.columns == 1) continue;
    auto const x = random_values<TestType>(s.rows * s.columns, 9), dy = random_values<TestType>(s.rows * s.columns, 10);
    auto const weight = random_values<TestType>(s.columns, 11);
    auto const got = norm_gradient<float>(s, dy, x, weight, dy.data());
    auto const wide_dy = doubles(dy);
    auto const exact = norm_gradient<double>(s, wide_dy, doubles(x), doubles(weight), wide_dy.data());
    double const slack = std::is_same_v<TestType, bf16> ? 1.1 : 256.0;
    check_close(got.dx, exact.dx, slack, std::is_same_v<TestType, bf16> ? 1.0 : 4.0);
    check_close(got.weight, exact.weight, 64.0, static_cast<double>(s.rows) + 1.0);
    check_close(got.bias, exact.bias, 64.0, static_cast<double>(s.rows) + 1.0);
  }
}

TEMPLATE_TEST_CASE("gelu, biases and residuals match double", "[kernels][rows]", float, bf16, double) {
  using T = Compute<TestType>;
  auto const check_formula = [](auto formula, std::int64_t n) {
    using Formula = decltype(formula);
    auto const x = random_values<TestType>(n, 12, 3.0), dy = random_values<TestType>(n, 13);
    std::vector<TestType> y(x.size()), again(x), dx(dy);
    transformer::gelu_forward<Formula>(device, stream, x.data(), y.data(), n);
    transformer::gelu_backward<Formula>(device, stream, again.data(), dx.data(), n);
    CHECK((doubles(again) == doubles(y)));  // a bool: the values would take minutes to print
    Doubles exact, slope;
    for (std::size_t i = 0; i < x.size(); ++i) {
      exact.push_back(Formula::value(as_double(x[i])));
      slope.push_back(as_double(dy[i]) * Formula::with_derivative(as_double(x[i])).derivative);
    }
    check_close(y, exact, 1.1, std::is_same_v<T, double> ? 1.0 : (std::is_same_v<TestType, bf16> ? 1e-3 : 128.0));
    check_close(dx, slope, 4.0, std::is_same_v<TestType, bf16> ? 1e-3 : 32.0);
  };
  for (auto const n : sizes) {
    if (!fsdp::testing::next_cell()) continue;
    check_formula(transformer::ExactGelu{}, n);
    check_formula(transformer::TanhGelu{}, n);
  }
  for (auto const s : shapes) {
    auto const x = random_values<TestType>(s.rows * s.columns, 14), bias = random_values<TestType>(s.columns, 15);
    auto const residual = random_values<TestType>(s.rows * s.columns, 16);
    Doubles sum, gelu, whole, column(size(s.columns), 2.0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      double const b = as_double(bias[i % size(s.columns)]);
      sum.push_back(as_double(x[i]) + b);
      gelu.push_back(transformer::gelu(sum.back()));
      whole.push_back(as_double(residual[i]) + sum.back());
      column[i % size(s.columns)] += as_double(x[i]);
    }
    auto biased = x, kept = x;
    std::vector<TestType> activated(x.size()), out(x.size());
    transformer::bias_add(device, stream, biased.data(), bias.data(), s.rows, s.columns);
    transformer::bias_gelu_forward(device, stream, kept.data(), bias.data(), activated.data(), s.rows, s.columns);
    transformer::bias_residual_forward(device, stream, residual.data(), x.data(), bias.data(), out.data(), s.rows,
                                       s.columns);
    check_close(biased, sum, 1.1, std::is_same_v<TestType, bf16> ? 1e-3 : 4.0);
    check_close(kept, sum, 1.1, std::is_same_v<TestType, bf16> ? 1e-3 : 4.0);
    check_close(activated, gelu, 2.0, std::is_same_v<TestType, bf16> ? 1e-3 : 32.0);
    check_close(out, whole, 2.2, std::is_same_v<TestType, bf16> ? 1e-3 : 4.0);
    transformer::bias_add(device, stream, biased.data(), static_cast<TestType const*>(nullptr), s.rows, s.columns);
    check_close(biased, sum, 1.1, std::is_same_v<TestType, bf16> ? 1e-3 : 4.0);

    std::vector<T> gradient(size(s.columns), T(2)), partials(size(transformer::bias_partials(s.rows, s.columns)));
    transformer::bias_backward(device, stream, x.data(), s.rows, s.columns, gradient.data(), partials.data());
    check_close(gradient, column, 16.0, static_cast<double>(s.rows) + 2.0);
  }
}

TEMPLATE_TEST_CASE("causal softmax matches double and hides later keys", "[kernels][rows]", float, bf16, double) {
  for (std::int64_t const keys : {1, 2, 64, 65, 200}) {
    for (std::int64_t const rows : {std::int64_t{1}, keys / 2, keys}) {
      if (rows == 0) continue;
      std::int64_t const panels = 3;
      double const scale = 0.125;
      auto const scores = random_values<TestType>(panels * rows * keys, 17, 30.0);
      auto got = scores;
      transformer::causal_softmax(device, stream, got.data(), panels, rows, keys, scale);
      Doubles exact(scores.size(), 0.0);
      for (std::int64_t row = 0; row < panels * rows; ++row) {
        std::int64_t const length = keys - rows + row % rows + 1;
        double largest = -HUGE_VAL, sum = 0;
        auto const at = [&](std::int64_t c) { return size(row * keys + c); };
        for (std::int64_t c = 0; c < length; ++c) largest = std::fmax(largest, scale * as_double(scores[at(c)]));
        for (std::int64_t c = 0; c < length; ++c) sum += std::exp(scale * as_double(scores[at(c)]) - largest);
        for (std::int64_t c = 0; c < length; ++c) {
          exact[at(c)] = std::exp(scale * as_double(scores[at(c)]) - largest) / sum;
        }
        for (std::int64_t c = length; c < keys; ++c) REQUIRE(as_double(got[at(c)]) == 0.0);
      }
      check_close(got, exact, std::is_same_v<TestType, bf16> ? 1.1 : 32.0, 1e-30);
    }
  }
}

TEST_CASE("causal softmax's gradient is its slope, and 0 for later keys", "[kernels][rows]") {
  std::int64_t const panels = 2, rows = 5, keys = 70;
  double const scale = 0.7;
  auto scores = random_values<double>(panels * rows * keys, 18);
  auto const up = random_values<double>(panels * rows * keys, 19);
  auto const forward = [&] {
    auto p = scores;
    transformer::causal_softmax(device, stream, p.data(), panels, rows, keys, scale);
    return p;
  };
  auto const p = forward();
  auto gradient = up;
  transformer::causal_softmax_backward(device, stream, p.data(), gradient.data(), panels, rows, keys, scale);
  check_slope(scores, gradient, [&] { return dot(forward(), up); });
  auto const narrow_p = converted<float>(p);
  auto narrow_gradient = converted<float>(up);
  transformer::causal_softmax_backward(device, stream, narrow_p.data(), narrow_gradient.data(), panels, rows, keys,
                                       scale);
  check_close(narrow_gradient, gradient, 16.0, 1.0);
}

TEMPLATE_TEST_CASE("cross-entropy's loss and gradient match double", "[kernels][rows]", float, bf16, double) {
  using T = Compute<TestType>;
  for (std::int64_t const vocabulary : {1, 65, 1000}) {
    std::int64_t const rows = 5, padded = (vocabulary + 127) / 128 * 128;
    double const scale = 0.2;
    std::vector<std::int32_t> const targets{0, static_cast<std::int32_t>(vocabulary - 1), -1,
                                            static_cast<std::int32_t>(vocabulary / 2), 0};
    auto logits = random_values<TestType>(rows * padded, 20, 4.0);
    for (std::int64_t r = 0; r < rows; ++r) {  // what stands in the padding must not matter
      for (auto c = vocabulary; c < padded; ++c) logits[size(r * padded + c)] = fsdp::narrow<TestType>(1e4);
    }
    auto gradient = logits;
    std::vector<T> losses(size(rows), T(9)), alone(size(rows), T(9));
    auto untouched = logits;
    transformer::cross_entropy_forward(device, stream, untouched.data(), targets.data(), alone.data(), rows, vocabulary,
                                       padded);
    CHECK(doubles(untouched) == doubles(logits));
    transformer::cross_entropy_backward(device, stream, gradient.data(), targets.data(), losses.data(), rows,
                                        vocabulary, padded, scale);
    Doubles exact(gradient.size(), 0.0), loss(size(rows), 0.0);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (targets[size(r)] < 0) continue;
      double largest = -HUGE_VAL, sum = 0;
      auto const at = [&](std::int64_t c) { return size(r * padded + c); };
      for (std::int64_t c = 0; c < vocabulary; ++c) largest = std::fmax(largest, as_double(logits[at(c)]));
      for (std::int64_t c = 0; c < vocabulary; ++c) sum += std::exp(as_double(logits[at(c)]) - largest);
      for (std::int64_t c = 0; c < vocabulary; ++c) {
        exact[at(c)] =
            (std::exp(as_double(logits[at(c)]) - largest) / sum - (c == targets[size(r)] ? 1.0 : 0.0)) * scale;
      }
      loss[size(r)] = std::log(sum) + largest - as_double(logits[at(targets[size(r)])]);
    }
    check_close(losses, loss, 16.0, 16.0);
    check_close(alone, loss, 16.0, 16.0);
    check_close(gradient, exact, std::is_same_v<TestType, bf16> ? 1.1 : 32.0,
                std::is_same_v<TestType, bf16> ? 1e-4 : 1.0);
    double total = 1.0;
    transformer::sum(device, stream, losses.data(), rows, 0.25, &total, true);
    CHECK(total == Approx(1.0 + 0.25 * (loss[0] + loss[1] + loss[3] + loss[4])).epsilon(1e-5));
  }
}

TEST_CASE("cross-entropy's gradient is its slope", "[kernels][rows]") {
  std::int64_t const rows = 3, vocabulary = 67, padded = 128;
  std::vector<std::int64_t> const targets{66, -1, 3};
  auto logits = random_values<double>(rows * padded, 21);
  auto gradient = logits;
  Doubles losses(size(rows));
  transformer::cross_entropy_backward(device, stream, gradient.data(), targets.data(), losses.data(), rows, vocabulary,
                                      padded, 0.5);
  check_slope(logits, gradient, [&] {
    transformer::cross_entropy_forward(device, stream, logits.data(), targets.data(), losses.data(), rows, vocabulary,
                                       padded);
    return 0.5 * (losses[0] + losses[1] + losses[2]);
  });
}

TEMPLATE_TEST_CASE("embeddings add rows and gather their gradients in order", "[kernels][rows]", float, bf16, double) {
  std::int64_t const batch = 3, length = 17, columns = 19, vocabulary = 11;
  auto const token_weight = random_values<TestType>(vocabulary * columns, 22);
  auto const position_weight = random_values<TestType>((length + 4) * columns, 23);
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < batch * length; ++i) tokens.push_back(static_cast<std::int32_t>(i * i % vocabulary));
  for (std::int64_t const first : {0, 4}) {
    std::vector<TestType> out(size(batch * length * columns));
    transformer::embedding_forward(device, stream, tokens.data(), token_weight.data(), position_weight.data(),
                                   out.data(), batch, length, columns, first);
    Doubles exact(out.size());
    for (std::int64_t i = 0; i < batch * length * columns; ++i) {
      std::int64_t const row = i / columns, c = i % columns;
      exact[size(i)] = as_double(token_weight[size(tokens[size(row)] * columns + c)]) +
                       as_double(position_weight[size((first + row % length) * columns + c)]);
    }
    check_close(out, exact, 1.1, std::is_same_v<TestType, bf16> ? 1e-3 : 1.0);
  }
  auto const dy = random_values<TestType>(batch * length * columns, 24);
  std::vector<float> dt(size(vocabulary * columns), 0.5f), dp(size(length * columns), 0.25f), et(dt), ep(dp);
  transformer::embedding_backward(device, stream, tokens.data(), dy.data(), dt.data(), dp.data(), batch, length,
                                  columns);
  for (std::int64_t i = 0; i < batch * length * columns; ++i) {
    std::int64_t const row = i / columns, c = i % columns;
    et[size(tokens[size(row)] * columns + c)] += static_cast<float>(dy[size(i)]);
    ep[size(row % length * columns + c)] += static_cast<float>(dy[size(i)]);
  }
  CHECK(dt == et);  // the same additions in the same order
  CHECK(dp == ep);
}

TEMPLATE_TEST_CASE("dropout is a function of the index alone", "[kernels][rows]", float, bf16, double) {
  transformer::DropoutMask const mask{.probability = 0.2f, .seed = 5, .step = 9, .site = 3};
  std::int64_t const n = 50001;
  std::vector<TestType> const ones(size(n), TestType(1.0f));
  std::vector<TestType> whole(ones), part(ones);
  transformer::dropout(device, stream, ones.data(), whole.data(), n, mask, 0);
  std::int64_t kept = 0;
  for (auto const& value : whole) {
    REQUIRE((as_double(value) == 0.0 || as_double(value) == as_double(TestType(1.0f / 0.8f))));
    kept += as_double(value) != 0.0;
  }
  double const count = static_cast<double>(n);
  CHECK(std::fabs(static_cast<double>(kept) / count - 0.8) <= 5.0 * std::sqrt(0.16 / count));

  transformer::dropout(device, stream, ones.data(), part.data(), 1000, mask, 777);
  for (std::int64_t i = 0; i < 1000; ++i) REQUIRE(as_double(part[size(i)]) == as_double(whole[size(777 + i)]));

  // Panels (2, 3, 20) of an array (2, 10, 50) at rows from 4: the mask is that of the whole array.
  transformer::dropout_panels(device, stream, ones.data(), part.data(), 2, 3, 20, mask, 4 * 50, 10 * 50, 50);
  for (std::int64_t i = 0; i < 2 * 3 * 20; ++i) {
    std::int64_t const p = i / 60, r = i / 20 % 3, c = i % 20;
    REQUIRE(as_double(part[size(i)]) == as_double(whole[size(p * 500 + (4 + r) * 50 + c)]));
  }
  for (auto other : {transformer::DropoutMask{0.2f, 6, 9, 3}, transformer::DropoutMask{0.2f, 5, 10, 3},
                     transformer::DropoutMask{0.2f, 5, 9, 4}}) {
    auto different = ones;
    transformer::dropout(device, stream, ones.data(), different.data(), n, other, 0);
    CHECK(doubles(different) != doubles(whole));
  }
  transformer::dropout(device, stream, ones.data(), part.data(), n, transformer::DropoutMask{}, 0);
  CHECK(doubles(part) == doubles(ones));
}
