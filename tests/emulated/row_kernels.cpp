// SPDX-License-Identifier: Apache-2.0
// The trainer's row kernels in emulated thread blocks, against plain loops in double.
// skip-sanitizers
// timeout: 600
// long
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "transformer/kernels/row_kernels.hpp"

using namespace emulated;
using fsdp::bf16;
using kernel_test::as_double;
using kernel_test::random_values;

namespace {

kernel_test::LoopDevice::Stream stream;

struct Shape {
  std::int64_t rows, columns;
};
/// One element; less than a pack; odd; more than all threads take at once; more than one chunk of rows.
std::vector<Shape> const shapes{{1, 1},  {2, 64},   {3, 65},   {2, 4099}, {34, 259},
                                {67, 9}, {37, 768}, {5, 1600}, {2, 2048}};

template <class T>
constexpr bool narrow = sizeof(T) == 2;

}  // namespace

TEMPLATE_TEST_CASE("emulated: layer norm", "[emulated][rows]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const x = random_values<A>(s.rows * s.columns, 1), weight = random_values<A>(s.columns, 2);
    auto const bias = random_values<A>(s.columns, 3);
    double const count = static_cast<double>(s.columns);
    Doubles mean, scale, plain, exact;
    for (std::int64_t r = 0; r < s.rows; ++r) {
      double sum = 0, variance = 0;
      auto const at = [&](std::int64_t c) { return as_double(x[size(r * s.columns + c)]); };
      for (std::int64_t c = 0; c < s.columns; ++c) sum += at(c) / count;
      for (std::int64_t c = 0; c < s.columns; ++c) variance += (at(c) - sum) * (at(c) - sum) / count;
      mean.push_back(sum);
      scale.push_back(1.0 / std::sqrt(variance + 1e-5));
      for (std::int64_t c = 0; c < s.columns; ++c) {
        plain.push_back((at(c) - sum) * scale.back() * as_double(weight[size(c)]));
        exact.push_back(plain.back() + as_double(bias[size(c)]));
      }
    }
    for (std::size_t const skip_of_views : {0u, 1u}) {  // aligned rows have kernels of their own
      auto const got = everywhere(
          [&](Device const& device, std::size_t skip) {
            View<A> const in(x, skip), w(weight, skip), b(bias, skip);
            View<A> with(std::vector<A>(x.size()), skip), without = with;
            View<float> m(std::vector<float>(size(s.rows)), skip), v = m;
            transformer::layer_norm_forward(device, stream, in.in(), w.in(), b.in(), with.out(), m.out(), v.out(),
                                            s.rows, s.columns);
            transformer::layer_norm_forward(device, stream, in.in(), w.in(), static_cast<A const*>(nullptr),
                                            without.out(), static_cast<float*>(nullptr), static_cast<float*>(nullptr),
                                            s.rows, s.columns);
            return std::vector{doubles(with), doubles(without), doubles(m), doubles(v)};
          },
          {skip_of_views});
      check_close<float>(got[2], mean, 16.0, 1.0);
      if (s.columns == 1) continue;  // x - mean is rounding alone, and 1e-5 scales it up
      check_close<float>(got[3], scale, 64.0, 0.0);
      double const slack = narrow<A> ? 1.1 : 64.0, least = narrow<A> ? 1.0 : 16.0;
      check_close<A>(got[0], exact, slack, least);
      check_close<A>(got[1], plain, slack, least);
    }
  }
}

namespace {

/// dx, and both gradients of type G that held 0.5 before.
template <class A, class G>
void check_norm_gradient(Shape s, bool with_add) {
  CAPTURE(s.rows, s.columns, with_add);
  auto const x = random_values<A>(s.rows * s.columns, 4), dy = random_values<A>(s.rows * s.columns, 5);
  auto const past = random_values<A>(s.rows * s.columns, 6), weight = random_values<A>(s.columns, 7);
  auto const mean = random_values(s.rows, 8, 0.1);
  auto scale = random_values(s.rows, 9, 0.1);
  for (auto& value : scale) value += 1.0f;
  double const count = static_cast<double>(s.columns);
  Doubles dx, dw(size(s.columns), 0.5), db(dw);
  for (std::int64_t r = 0; r < s.rows; ++r) {
    double const m = as_double(mean[size(r)]), v = as_double(scale[size(r)]);
    double a = 0, b = 0;
    auto const normal = [&](std::int64_t c) { return (as_double(x[size(r * s.columns + c)]) - m) * v; };
    auto const up = [&](std::int64_t c) { return as_double(dy[size(r * s.columns + c)]); };
    for (std::int64_t c = 0; c < s.columns; ++c) {
      a += up(c) * as_double(weight[size(c)]) / count;
      b += up(c) * as_double(weight[size(c)]) * normal(c) / count;
      dw[size(c)] += up(c) * normal(c);
      db[size(c)] += up(c);
    }
    for (std::int64_t c = 0; c < s.columns; ++c) {
      double const add = with_add ? as_double(past[size(r * s.columns + c)]) : 0.0;
      dx.push_back(add + v * (up(c) * as_double(weight[size(c)]) - a - normal(c) * b));
    }
  }
  for (std::size_t const skip_of_views : {0u, 1u}) {  // aligned rows have kernels of their own
    auto const got = everywhere(
        [&](Device const& device, std::size_t skip) {
          View<A> const in(x, skip), w(weight, skip);
          View<A> up(dy, skip), add(past, skip);
          View<float> const m(mean, skip), v(scale, skip);
          View<G> weight_gradient(std::vector<G>(size(s.columns), G(0.5f)), skip), bias_gradient = weight_gradient;
          View<float> partials(std::vector<float>(size(transformer::layer_norm_partials(s.rows, s.columns))), skip);
          // The gradient of the inputs overwrites what is added to it, or what comes from above.
          A* const out = with_add ? add.out() : up.out();
          transformer::layer_norm_backward(device, stream, up.in(), in.in(), w.in(), m.in(), v.in(),
                                           with_add ? add.in() : static_cast<A const*>(nullptr), out,
                                           weight_gradient.out(), bias_gradient.out(), s.rows, s.columns,
                                           partials.out());
          return std::vector{doubles(with_add ? add : up), doubles(weight_gradient), doubles(bias_gradient)};
        },
        {skip_of_views});
    check_close<A>(got[0], dx, narrow<A> ? 1.1 : 256.0, narrow<A> ? 1.0 : 4.0);
    double const rows = static_cast<double>(s.rows);
    check_close<G>(got[1], dw, narrow<G> ? 1.1 : 64.0, narrow<G> ? 0.1 : rows + 1.0);
    check_close<G>(got[2], db, narrow<G> ? 1.1 : 64.0, narrow<G> ? 0.1 : rows + 1.0);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("emulated: layer norm's gradients", "[emulated][rows]", float, bf16) {
  for (auto const s : shapes) {
    check_norm_gradient<TestType, float>(s, true);
    check_norm_gradient<TestType, bf16>(s, false);
  }
  check_norm_gradient<TestType, float>({200, 300}, false);  // more than four chunks of rows, and a second strip
}

TEMPLATE_TEST_CASE("emulated: layer norm of a residual sum", "[emulated][rows]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const x = random_values<A>(s.rows * s.columns, 1), residual = random_values<A>(s.rows * s.columns, 2);
    auto const bias = random_values<A>(s.columns, 3), weight = random_values<A>(s.columns, 4);
    for (bool const with_bias : {false, true}) {
      auto const run = [&](Device const& device, std::size_t skip) {
        View<A> const in(x, skip), past(residual, skip), b(bias, skip), w(weight, skip);
        View<A> sum(std::vector<A>(x.size()), skip), y = sum;
        View<float> m(std::vector<float>(size(s.rows)), skip), v = m;
        transformer::residual_layer_norm_forward(device, stream, past.in(), in.in(), with_bias ? b.in() : nullptr,
                                                 sum.out(), w.in(), b.in(), y.out(), m.out(), v.out(), s.rows,
                                                 s.columns);
        return std::vector{doubles(sum), doubles(y), doubles(m), doubles(v)};
      };
      // Unaligned rows take the two kernels one after the other.
      auto const together = everywhere(run, {0}), apart = everywhere(run, {1});
      CHECK(together[0] == apart[0]);
      if (s.columns == 1) continue;  // x - mean is rounding alone, and 1e-5 scales it up
      check_close<float>(together[2], apart[2], 32.0, 1.0);
      check_close<float>(together[3], apart[3], 128.0, 0.0);
      check_close<A>(together[1], apart[1], narrow<A> ? 2.2 : 128.0, narrow<A> ? 2.0 : 32.0);
    }
  }
}

TEMPLATE_TEST_CASE("emulated: gelu, biases and residuals", "[emulated][rows]", float, bf16) {
  using A = TestType;
  double const least = narrow<A> ? 1e-3 : 4.0;
  for (std::int64_t const n : {1, 7, 2053, 16385}) {
    CAPTURE(n);
    auto const x = random_values<A>(n, 11, 3.0), dy = random_values<A>(n, 12);
    Doubles gelu, slope, sum;
    for (std::size_t i = 0; i < x.size(); ++i) {
      gelu.push_back(transformer::gelu(as_double(x[i])));
      slope.push_back(as_double(dy[i]) * transformer::gelu_with_derivative(as_double(x[i])).derivative);
      sum.push_back(as_double(x[i]) + as_double(dy[i]));
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<A> const in(x, skip);
      View<A> y(std::vector<A>(x.size()), skip), again(x, skip), dx(dy, skip), total(dy, skip);
      transformer::gelu_forward(device, stream, in.in(), y.out(), n);
      transformer::gelu_backward(device, stream, again.out(), dx.out(), n);
      transformer::add(device, stream, in.in(), total.in(), total.out(), n);
      return std::vector{doubles(y), doubles(dx), doubles(total), doubles(again)};
    });
    check_close<A>(got[0], gelu, 1.1, narrow<A> ? 1e-3 : 128.0);
    check_close<A>(got[1], slope, 4.0, narrow<A> ? 1e-3 : 32.0);
    check_close<A>(got[2], sum, 1.1, least);
    CHECK((got[3] == got[0]));
  }
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const x = random_values<A>(s.rows * s.columns, 13), residual = random_values<A>(s.rows * s.columns, 14);
    auto const bias = random_values<A>(s.columns, 15);
    Doubles sum, gelu, whole, column(size(s.columns), 2.0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      sum.push_back(as_double(x[i]) + as_double(bias[i % size(s.columns)]));
      gelu.push_back(transformer::gelu(sum.back()));
      whole.push_back(as_double(residual[i]) + sum.back());
      column[i % size(s.columns)] += as_double(x[i]);
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<A> const in(x, skip), past(residual, skip), b(bias, skip);
      View<A> biased(x, skip), kept(x, skip), activated(x, skip), out(x, skip);
      View<float> wide(std::vector<float>(size(s.columns), 2.0f), skip);
      View<bf16> small(std::vector<bf16>(size(s.columns), bf16(2.0f)), skip);
      View<float> partials(std::vector<float>(size(transformer::bias_partials(s.rows, s.columns))), skip);
      transformer::bias_add(device, stream, biased.out(), b.in(), s.rows, s.columns);
      transformer::bias_gelu_forward(device, stream, kept.out(), b.in(), activated.out(), s.rows, s.columns);
      transformer::bias_residual_forward(device, stream, past.in(), in.in(), b.in(), out.out(), s.rows, s.columns);
      transformer::bias_backward(device, stream, in.in(), s.rows, s.columns, wide.out(), partials.out());
      transformer::bias_backward(device, stream, in.in(), s.rows, s.columns, small.out(), partials.out());
      return std::vector{doubles(biased), doubles(kept), doubles(activated),
                         doubles(out),    doubles(wide), doubles(small)};
    });
    check_close<A>(got[0], sum, 1.1, least);
    check_close<A>(got[1], sum, 1.1, least);
    check_close<A>(got[2], gelu, narrow<A> ? 2.0 : 2.0, narrow<A> ? 1e-3 : 32.0);
    check_close<A>(got[3], whole, 2.2, least);
    check_close<float>(got[4], column, 16.0, static_cast<double>(s.rows) + 2.0);
    check_close<bf16>(got[5], column, 1.1, 0.1);
  }
}

TEMPLATE_TEST_CASE("emulated: causal softmax", "[emulated][rows]", float, bf16) {
  using A = TestType;
  for (std::int64_t const keys : {1, 2, 65, 200, 2300}) {
    std::int64_t const rows = keys < 3 ? keys : 3, panels = 2;
    CAPTURE(keys, rows);
    double const scale = 0.125;
    auto const scores = random_values<A>(panels * rows * keys, 17, 30.0),
               up = random_values<A>(panels * rows * keys, 18);
    Doubles exact(scores.size(), 0.0), slope(scores.size(), 0.0);
    std::vector<A> probabilities(scores.size());
    for (std::int64_t row = 0; row < panels * rows; ++row) {
      std::int64_t const length = keys - rows + row % rows + 1;
      double largest = -HUGE_VAL, sum = 0, mean = 0;
      auto const at = [&](std::int64_t c) { return size(row * keys + c); };
      for (std::int64_t c = 0; c < length; ++c) largest = std::fmax(largest, scale * as_double(scores[at(c)]));
      for (std::int64_t c = 0; c < length; ++c) sum += std::exp(scale * as_double(scores[at(c)]) - largest);
      for (std::int64_t c = 0; c < length; ++c) {
        exact[at(c)] = std::exp(scale * as_double(scores[at(c)]) - largest) / sum;
        probabilities[at(c)] = fsdp::narrow<A>(exact[at(c)]);
        mean += as_double(probabilities[at(c)]) * as_double(up[at(c)]);
      }
      for (std::int64_t c = 0; c < length; ++c) {
        slope[at(c)] = as_double(probabilities[at(c)]) * (as_double(up[at(c)]) - mean) * scale;
      }
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<A> panel(scores, skip), gradient(up, skip);
      View<A> const p(probabilities, skip);
      transformer::causal_softmax(device, stream, panel.out(), panels, rows, keys, scale);
      transformer::causal_softmax_backward(device, stream, p.in(), gradient.out(), panels, rows, keys, scale);
      return std::vector{doubles(panel), doubles(gradient)};
    });
    check_close<A>(got[0], exact, narrow<A> ? 1.1 : 32.0, 1e-30);
    check_close<A>(got[1], slope, narrow<A> ? 1.1 : 16.0, narrow<A> ? 1e-3 : 1.0);
  }
}

TEMPLATE_TEST_CASE("emulated: cross-entropy", "[emulated][rows]", float, bf16) {
  using A = TestType;
  for (std::int64_t const vocabulary : {1, 65, 1000, 5003}) {
    std::int64_t const rows = 5, padded = (vocabulary + 127) / 128 * 128;
    CAPTURE(vocabulary);
    double const scale = 0.2;
    std::vector<std::int32_t> const targets{0, static_cast<std::int32_t>(vocabulary - 1), -1,
                                            static_cast<std::int32_t>(vocabulary / 2), 0};
    auto logits = random_values<A>(rows * padded, 20, 4.0);
    for (std::int64_t r = 0; r < rows; ++r) {  // what stands in the padding must not matter
      for (auto c = vocabulary; c < padded; ++c) logits[size(r * padded + c)] = fsdp::narrow<A>(1e4);
    }
    Doubles exact(logits.size(), 0.0), loss(size(rows), 0.0);
    double total = 1.0;
    for (std::int64_t r = 0; r < rows; ++r) {
      if (targets[size(r)] < 0) continue;
      double largest = -HUGE_VAL, sum = 0;
      auto const at = [&](std::int64_t c) { return size(r * padded + c); };
      for (std::int64_t c = 0; c < vocabulary; ++c) largest = std::fmax(largest, as_double(logits[at(c)]));
      for (std::int64_t c = 0; c < vocabulary; ++c) sum += std::exp(as_double(logits[at(c)]) - largest);
      for (std::int64_t c = 0; c < vocabulary; ++c) {
        double const p = std::exp(as_double(logits[at(c)]) - largest) / sum;
        exact[at(c)] = (p - (c == targets[size(r)] ? 1.0 : 0.0)) * scale;
      }
      loss[size(r)] = std::log(sum) + largest - as_double(logits[at(targets[size(r)])]);
      total += 0.25 * loss[size(r)];
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<A> gradient(logits, skip), untouched(logits, skip);
      View<std::int32_t> const target(targets, skip);
      View<float> losses(std::vector<float>(size(rows), 9.0f), skip), alone = losses;
      View<double> sum(std::vector<double>(1, 1.0), skip);
      transformer::cross_entropy_forward(device, stream, untouched.out(), target.in(), alone.out(), rows, vocabulary,
                                         padded);
      transformer::cross_entropy_backward(device, stream, gradient.out(), target.in(), losses.out(), rows, vocabulary,
                                          padded, scale);
      transformer::sum(device, stream, losses.in(), rows, 0.25, sum.out(), true);
      return std::vector{doubles(gradient), doubles(losses), doubles(alone), doubles(untouched), doubles(sum)};
    });
    check_close<A>(got[0], exact, narrow<A> ? 1.1 : 32.0, narrow<A> ? 1e-4 : 1.0);
    check_close<float>(got[1], loss, 16.0, 16.0);
    check_close<float>(got[2], loss, 16.0, 16.0);
    CHECK(got[3] == doubles(logits));
    CHECK(got[4][0] == Approx(total).epsilon(1e-5));
  }
}

TEMPLATE_TEST_CASE("emulated: embeddings", "[emulated][rows]", float, bf16) {
  using A = TestType;
  for (std::int64_t const columns : {1, 19, 2307}) {
    std::int64_t const batch = 3, length = 5, first = 4, vocabulary = 7;
    CAPTURE(columns);
    auto const token = random_values<A>(vocabulary * columns, 22);
    auto const position = random_values<A>((length + first) * columns, 23);
    auto const dy = random_values<A>(batch * length * columns, 24);
    std::vector<std::int32_t> tokens;
    for (std::int64_t i = 0; i < batch * length; ++i) tokens.push_back(static_cast<std::int32_t>(i * i % vocabulary));
    Doubles exact(dy.size());
    std::vector<float> dt(token.size(), 0.5f), dp(size(length * columns), 0.25f);
    auto const dt0 = dt, dp0 = dp;
    for (std::int64_t i = 0; i < batch * length * columns; ++i) {
      std::int64_t const row = i / columns, c = i % columns;
      auto const of_token = size(tokens[size(row)] * columns + c);
      exact[size(i)] = as_double(token[of_token]) + as_double(position[size((first + row % length) * columns + c)]);
      dt[of_token] += static_cast<float>(dy[size(i)]);
      dp[size(row % length * columns + c)] += static_cast<float>(dy[size(i)]);
    }
    auto const got = everywhere([&](Device const& device, std::size_t skip) {
      View<std::int32_t> const ids(tokens, skip);
      View<A> const token_weight(token, skip), position_weight(position, skip), up(dy, skip);
      View<A> out(dy, skip);
      View<float> token_gradient(dt0, skip), position_gradient(dp0, skip);
      transformer::embedding_forward(device, stream, ids.in(), token_weight.in(), position_weight.in(), out.out(),
                                     batch, length, columns, first);
      transformer::embedding_backward(device, stream, ids.in(), up.in(), token_gradient.out(), position_gradient.out(),
                                      batch, length, columns);
      return std::vector{doubles(out), doubles(token_gradient), doubles(position_gradient)};
    });
    check_close<A>(got[0], exact, 1.1, narrow<A> ? 1e-3 : 1.0);
    CHECK(got[1] == doubles(dt));  // the same additions in the same order
    CHECK(got[2] == doubles(dp));
  }
}

TEMPLATE_TEST_CASE("emulated: dropout", "[emulated][rows]", float, bf16) {
  using A = TestType;
  transformer::DropoutMask const mask{.probability = 0.2f, .seed = 5, .step = 9, .site = 3};
  bool const whole = GENERATE(false, true);  // groups: thread blocks have a kernel for them, if the views are aligned
  std::int64_t const n = whole ? 257 * 64 : 16500, first = whole ? 12 * 64 : 777;
  auto const x = random_values<A>(n, 25);
  // [Note: Random elements]: 64 elements a group, 16 counters of four words.
  auto const dropped = [&](std::int64_t element) {
    auto const sequence = mask.sequence();
    auto const counter = static_cast<std::uint64_t>(element / 64 * 16 + element % 16);
    auto const words =
        fsdp::philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                      static_cast<std::uint32_t>(sequence.id), static_cast<std::uint32_t>(sequence.id >> 32)},
                     sequence.seed);
    std::uint32_t const word[4] = {words.a, words.b, words.c, words.d};
    return fsdp::uniform_below_one(word[element % 64 / 16]) < mask.probability;
  };
  Doubles flat, panels;
  auto const kept = [&](std::int64_t i, std::int64_t element) {
    return dropped(element) ? 0.0 : as_double(x[size(i)]) * static_cast<double>(1.0f / (1.0f - 0.2f));
  };
  for (std::int64_t i = 0; i < n; ++i) flat.push_back(kept(i, first + i));
  for (std::int64_t i = 0; i < 2 * 3 * 20; ++i) {
    panels.push_back(kept(i, first + i / 60 * 500 + i / 20 % 3 * 50 + i % 20));
  }
  auto const got = everywhere([&](Device const& device, std::size_t skip) {
    View<A> const in(x, skip);
    View<A> out(x, skip), part(std::vector<A>(2 * 3 * 20), skip);
    transformer::dropout(device, stream, in.in(), out.out(), n, mask, first);
    transformer::dropout_panels(device, stream, in.in(), part.out(), 2, 3, 20, mask, first, 500, 50);
    return std::vector{doubles(out), doubles(part)};
  });
  check_close<A>(got[0], flat, 1.1, 1e-30);
  check_close<A>(got[1], panels, 1.1, 1e-30);
}
