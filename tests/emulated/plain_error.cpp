// SPDX-License-Identifier: Apache-2.0
// Fused kernels err at most 1.5 times as much as the plain formula in fp32, rounded once: in emulated thread blocks and
// in a lane of the host, in fp32 and bf16.
// skip-tsan
// skip-sanitizers
// timeout: 600
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/detail/kernels/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "tests/emulated/plain_formulas.hpp"
#include "transformer/kernels/row_kernels.hpp"

using emulated::Doubles;
using emulated::size;
using fsdp::bf16;
using kernel_test::LoopDevice;
using kernel_test::random_values;

namespace {

LoopDevice::Stream stream;

/// Converts values to another type.
template <class To, class From>
std::vector<To> as(std::vector<From> const& from) {
  std::vector<To> to;
  for (auto const& value : from) to.push_back(fsdp::narrow<To>(fsdp::widen(value)));
  return to;
}

/// Squared errors of kernels and of their formulas, over several runs.
class Errors {
 public:
  /// @param plain  the formula in fp32; it is rounded to the type of `got`
  template <class T>
  void add(std::string const& what, std::vector<T> const& got, std::vector<float> const& plain, Doubles const& exact) {
    REQUIRE(got.size() == exact.size());
    REQUIRE(plain.size() == exact.size());
    auto& sums = sums_[what];
    for (std::size_t i = 0; i < got.size(); ++i) {
      sums.got += std::pow(kernel_test::as_double(got[i]) - exact[i], 2);
      sums.plain += std::pow(kernel_test::as_double(fsdp::narrow<T>(plain[i])) - exact[i], 2);
      sums.rounding += std::pow(exact[i] * kernel_test::rounding<T>, 2);
    }
  }
  /// Root of the mean square against the formula's. Where that errs not at all, one rounding is allowed.
  void check() const {
    for (auto const& [what, sums] : sums_) {
      double const ratio = std::sqrt(sums.got / (sums.plain > 0 ? sums.plain : sums.rounding + 1e-300));
      CAPTURE(what, sums.got, sums.plain);
      CHECK(ratio <= (sums.plain > 0 ? 1.5 : 1.0));
    }
  }

 private:
  struct Sums {
    double got = 0, plain = 0, rounding = 0;
  };
  std::map<std::string, Sums> sums_;
};

struct Shape {
  std::int64_t rows, columns;
};
/// One element; odd; in packs; one chunk of rows and several; as many rows as a sequence of 2048.
std::vector<Shape> const shapes{{1, 1}, {1, 65}, {2, 768}, {3, 1601}, {7, 129}, {31, 260}, {97, 64}, {2048, 20}};

/// Runs that give a row kernel at least 32 rows, and 256 elements: less may be a formula's luck.
unsigned runs_of(Shape s) {
  return static_cast<unsigned>(std::max((31 + s.rows) / s.rows, (255 + s.rows * s.columns) / (s.rows * s.columns)));
}

template <class A, class Device>
void check_rows(Device const& device, Shape s) {
  std::int64_t const rows = s.rows, columns = s.columns;
  Errors errors;
  for (unsigned run = 0; run < runs_of(s); ++run) {
    auto const n = rows * columns;
    unsigned const seed = 100 * run;
    auto const x = random_values<A>(n, seed + 1, 2.0), dy = random_values<A>(n, seed + 2);
    auto const past = random_values<A>(n, seed + 3);
    auto const weight = random_values<A>(columns, seed + 4), bias = random_values<A>(columns, seed + 5);
    std::vector<A> y(x.size());
    std::vector<float> mean(size(rows)), scale(mean);
    // The formula in fp32 and in double, of arguments converted to each.
    auto const add = [&](auto const& formula, std::vector<std::string> const& names, auto const&... got) {
      auto const plain = formula(0.0f);
      auto const exact = formula(0.0);
      std::size_t i = 0;
      ((errors.add(names[i], got, plain[i], exact[i]), ++i), ...);
    };

    std::vector<float> dw(size(columns)), db(dw), partials(size(transformer::layer_norm_partials(rows, columns)));
    mean = random_values(rows, seed + 6, 0.1), scale = random_values(rows, seed + 7, 0.1);
    for (auto& value : scale) value += 1.0f;
    transformer::layer_norm_backward(device, stream, dy.data(), x.data(), weight.data(), mean.data(), scale.data(),
                                     past.data(), y.data(), dw.data(), db.data(), rows, columns, partials.data());
    add(
        [&](auto t) {
          using T = decltype(t);
          return plain::layer_norm_gradient<T>(as<T>(dy), as<T>(x), as<T>(weight), as<T>(mean), as<T>(scale),
                                               as<T>(past));
        },
        {"layer norm's gradient", "weight gradient", "bias gradient"}, y, dw, db);

    std::vector<float> wide(size(columns));
    std::vector<bf16> small(size(columns));
    transformer::bias_backward(device, stream, dy.data(), rows, columns, wide.data(), partials.data());
    transformer::bias_backward(device, stream, dy.data(), rows, columns, small.data(), partials.data());
    std::vector<std::int32_t> const together(size(rows), 0);
    add(
        [&](auto t) {
          auto const sums = plain::group_sums(as<decltype(t)>(dy), together, 1);
          return plain::Lists<decltype(t)>{sums, sums};
        },
        {"column sums", "column sums in bf16"}, wide, small);

    // Thread blocks have a row each, and nothing but sums over rows depends on how many there are.
    if (std::is_same_v<Device, emulated::Device> && rows > 100) continue;

    if (columns > 1) {  // x - mean of one element is rounding alone, and 1e-5 scales it up
      transformer::layer_norm_forward(device, stream, x.data(), weight.data(), bias.data(), y.data(), mean.data(),
                                      scale.data(), rows, columns);
      add([&](auto t) { return plain::layer_norm(as<decltype(t)>(x), as<decltype(t)>(weight), as<decltype(t)>(bias)); },
          {"layer norm", "mean", "scale"}, y, mean, scale);
      std::vector<A> sum(x.size());
      transformer::residual_layer_norm_forward(device, stream, past.data(), x.data(), bias.data(), sum.data(),
                                               weight.data(), bias.data(), y.data(), mean.data(), scale.data(), rows,
                                               columns);
      add(
          [&](auto t) {
            return plain::layer_norm(as<decltype(t)>(sum), as<decltype(t)>(weight), as<decltype(t)>(bias));
          },
          {"layer norm of a sum"}, y);
    }
    auto kept = x;
    transformer::bias_gelu_forward(device, stream, kept.data(), bias.data(), y.data(), rows, columns);
    add([&](auto t) { return plain::gelu(as<decltype(t)>(x), as<decltype(t)>(bias)); }, {"bias", "bias and gelu"}, kept,
        y);
    auto hidden = x;
    y = dy;
    transformer::gelu_backward(device, stream, hidden.data(), y.data(), n);
    add(
        [&](auto t) {
          return plain::Lists<decltype(t)>{plain::gelu_gradient(as<decltype(t)>(x), as<decltype(t)>(dy))};
        },
        {"gelu's gradient"}, y);
    transformer::bias_residual_forward(device, stream, past.data(), x.data(), bias.data(), y.data(), rows, columns);
    add(
        [&](auto t) {
          using T = decltype(t);
          return plain::Lists<T>{plain::bias_residual(as<T>(past), as<T>(x), as<T>(bias))};
        },
        {"bias and residual"}, y);

    std::int64_t const of_panel = rows <= columns ? rows : 1, panels = rows / of_panel;
    y = x;
    transformer::causal_softmax(device, stream, y.data(), panels, of_panel, columns, 0.125);
    auto const probabilities = y;
    add(
        [&](auto t) {
          using T = decltype(t);
          return plain::Lists<T>{plain::softmax(as<T>(x), size(columns), T(0.125), size(of_panel))};
        },
        {"softmax"}, y);
    y = dy;
    transformer::causal_softmax_backward(device, stream, probabilities.data(), y.data(), panels, of_panel, columns,
                                         0.125);
    add(
        [&](auto t) {
          using T = decltype(t);
          return plain::Lists<T>{plain::softmax_gradient(as<T>(probabilities), as<T>(dy), size(columns), T(0.125))};
        },
        {"softmax's gradient"}, y);

    y = x;
    std::vector<std::int32_t> targets;
    for (std::int64_t r = 0; r < rows; ++r) targets.push_back(static_cast<std::int32_t>((r * 9 + run) % columns));
    float const part = 1.0f / static_cast<float>(rows);
    transformer::cross_entropy_backward(device, stream, y.data(), targets.data(), mean.data(), rows, columns, columns,
                                        static_cast<double>(part));
    add([&](auto t) { return plain::cross_entropy<decltype(t)>(as<decltype(t)>(x), size(columns), targets, part); },
        {"loss", "classifier"}, mean, y);
  }
  CAPTURE(Device::name, sizeof(A), rows, columns);
  errors.check();
}

template <class A, class Device>
void check_embedding(Device const& device, std::int64_t batch, std::int64_t length, std::int64_t columns) {
  Errors errors;
  std::int64_t const vocabulary = 13, rows = batch * length;
  auto const token = random_values<A>(vocabulary * columns, 1), position = random_values<A>(length * columns, 2);
  auto const dy = random_values<A>(rows * columns, 3);
  std::vector<std::int32_t> tokens, positions;
  for (std::int64_t i = 0; i < rows; ++i) {
    tokens.push_back(static_cast<std::int32_t>(i * i % vocabulary));
    positions.push_back(static_cast<std::int32_t>(i % length));
  }
  std::vector<A> out(dy.size());
  transformer::embedding_forward(device, stream, tokens.data(), token.data(), position.data(), out.data(), batch,
                                 length, columns);
  auto const rows_of = [&](auto t) {
    std::vector<decltype(t)> sum;
    for (std::size_t i = 0; i < dy.size(); ++i) {
      auto const row = i / size(columns), c = i % size(columns);
      sum.push_back(as<decltype(t)>(std::vector{token[static_cast<std::size_t>(tokens[row]) * size(columns) + c]})[0] +
                    as<decltype(t)>(std::vector{position[row % size(length) * size(columns) + c]})[0]);
    }
    return sum;
  };
  errors.add("embedding", out, rows_of(0.0f), rows_of(0.0));
  std::vector<float> of_tokens(token.size()), of_positions(position.size());
  transformer::embedding_backward(device, stream, tokens.data(), dy.data(), of_tokens.data(), of_positions.data(),
                                  batch, length, columns);
  auto const groups = [&](auto const& group, std::int64_t count, auto t) {
    return plain::group_sums(as<decltype(t)>(dy), group, size(count));
  };
  errors.add("tokens' gradient", of_tokens, groups(tokens, vocabulary, 0.0f), groups(tokens, vocabulary, 0.0));
  errors.add("positions' gradient", of_positions, groups(positions, length, 0.0f), groups(positions, length, 0.0));
  CAPTURE(Device::name, sizeof(A), batch, length, columns);
  errors.check();
}

/// Small values, where GELU is about x / 2, and large ones, where it is 0 or x.
template <class A, class Device>
void check_gelu(Device const& device, double deviation) {
  std::int64_t const n = 5001;
  auto const x = random_values<A>(n, 1, deviation), dy = random_values<A>(n, 2);
  std::vector<A> y(x.size()), hidden(x), dx(dy);
  transformer::gelu_forward(device, stream, x.data(), y.data(), n);
  transformer::gelu_backward(device, stream, hidden.data(), dx.data(), n);
  Errors errors;
  errors.add("gelu", y, plain::gelu(as<float>(x), {0.0f})[1], plain::gelu(as<double>(x), {0.0})[1]);
  errors.add("gelu's gradient", dx, plain::gelu_gradient(as<float>(x), as<float>(dy)),
             plain::gelu_gradient(as<double>(x), as<double>(dy)));
  CAPTURE(Device::name, sizeof(A), deviation);
  errors.check();
}

template <class A, class Device>
void check_dropout(Device const& device, float probability) {
  std::int64_t const n = 16501;
  auto const x = random_values<A>(n, 1);
  std::vector<A> y(x.size());
  transformer::dropout(device, stream, x.data(), y.data(), n, {.probability = probability, .seed = 2}, 3);
  auto const formula = [&](auto t) {
    auto out = as<decltype(t)>(x);
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] *= fsdp::widen(y[i]) == 0.0f ? 0 : 1 / (1 - static_cast<decltype(t)>(probability));
    return out;
  };
  Errors errors;
  errors.add("dropout", y, formula(0.0f), formula(0.0));
  CAPTURE(Device::name, sizeof(A), probability);
  errors.check();
}

template <class P, class Device>
void check_optimizers(Device const& device, std::int64_t n, int step, double gradient_size) {
  Errors errors;
  auto const p0 = random_values<P>(n, 1), m0 = random_values<P>(n, 2, step == 1 ? 0.0 : 0.1);
  auto const g = random_values(n, 3, gradient_size), u0 = random_values(n, 4);
  auto v0 = random_values<P>(n, 5, step == 1 ? 0.0 : 0.1);
  for (auto& value : v0) value = fsdp::narrow<P>(kernel_test::as_double(value) * kernel_test::as_double(value));
  fsdp::AdamWScalars const scalars{};
  plain::Adam const adam{1e-3f, 0.1f, scalars.beta1, scalars.beta2, scalars.epsilon, 0.7f, step};
  std::vector<fsdp::OptimizerChunk> const chunks{{0, static_cast<std::int32_t>(n), adam.decay}};
  fsdp::OptimizerStep now{.taken = step - 1};
  fsdp::ClipScalars clip{.factor = adam.factor};
  fsdp::kernels::begin_step(device, stream, &now, adam.rate, adam.beta1, adam.beta2, &clip);
  auto p = p0, m = m0, v = v0;
  fsdp::kernels::adamw(device, stream, chunks.data(), 1, &now, scalars, p.data(), g.data(), m.data(), v.data());
  auto const moments = [&](auto t) {
    using T = decltype(t);
    return plain::adamw<T>(adam, as<T>(p0), as<T>(g), as<T>(m0), as<T>(v0));
  };
  auto const plain = moments(0.0f);
  auto const exact = moments(0.0);
  errors.add("adamw", p, plain[0], exact[0]);
  errors.add("first moment", m, plain[1], exact[1]);
  errors.add("second moment", v, plain[2], exact[2]);

  auto u = u0;
  p = p0;
  fsdp::kernels::sgd(device, stream, chunks.data(), 1, &now, fsdp::SgdScalars{0.9f}, p.data(), g.data(), u.data());
  auto const momentum = [&](auto t) {
    using T = decltype(t);
    plain::Lists<T> out{as<T>(p0), as<T>(u0)};
    for (std::size_t i = 0; i < p0.size(); ++i) {
      T const slope = static_cast<T>(g[i]) * static_cast<T>(adam.factor) + static_cast<T>(adam.decay) * out[0][i];
      out[1][i] = static_cast<T>(0.9f) * out[1][i] + slope;
      out[0][i] -= static_cast<T>(adam.rate) * out[1][i];
    }
    return out;
  };
  auto const plain_sgd = momentum(0.0f);
  auto const exact_sgd = momentum(0.0);
  errors.add("sgd", p, plain_sgd[0], exact_sgd[0]);
  errors.add("velocity", u, plain_sgd[1], exact_sgd[1]);
  CAPTURE(Device::name, sizeof(P), n, step, gradient_size);
  errors.check();
}

}  // namespace

TEMPLATE_TEST_CASE("fused row kernels err hardly more than plain formulas", "[emulated][rows]", float, bf16) {
  for (auto const& shape : shapes) {
    check_rows<TestType>(emulated::Device{}, shape);
    check_rows<TestType>(LoopDevice{}, shape);
  }
}

TEMPLATE_TEST_CASE("embeddings, dropout and optimizers err hardly more than plain formulas", "[emulated][rows]", float,
                   bf16) {
  auto const both = [](auto const& check) {
    check(emulated::Device{});
    check(LoopDevice{});
  };
  both([](auto const& device) { check_embedding<TestType>(device, 1, 1, 33); });
  both([](auto const& device) { check_embedding<TestType>(device, 2, 65, 64); });
  both([](auto const& device) { check_embedding<TestType>(device, 3, 333, 33); });
  both([](auto const& device) { check_embedding<TestType>(device, 1, 2048, 20); });
  for (double const deviation : {0.03, 0.5, 1.0, 5.0})
    both([&](auto const& device) { check_gelu<TestType>(device, deviation); });
  for (float const probability : {0.1f, 0.2f, 0.3f, 0.5f})
    both([&](auto const& device) { check_dropout<TestType>(device, probability); });
  for (int const step : {1, 2, 10, 1000}) {
    for (double const gradient_size : {1e-3, 0.1, 10.0})
      both([&](auto const& device) { check_optimizers<TestType>(device, 4099, step, gradient_size); });
  }
}
