// SPDX-License-Identifier: Apache-2.0
// Attention by panels against the definition, forward and backward, in double.
// skip-tsan
// optimised

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/catch.hpp"
#include "tests/nanogpt/model_support.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using model_test::Device;
using model_test::random_vector;
using Vector = std::vector<double>;

/// softmax(q k^T / sqrt(Q)) v with a loop for every index.
Vector naive_attention(Vector const& qkv, std::int64_t batch, std::int64_t length, std::int64_t heads,
                       std::int64_t size) {
  auto const width = heads * size;
  Vector out(static_cast<std::size_t>(batch * length * width));
  auto const at = [&](std::int64_t b, std::int64_t t, std::int64_t part, std::int64_t h, std::int64_t i) {
    return qkv[static_cast<std::size_t>(((b * length + t) * 3 + part) * width + h * size + i)];
  };
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t t = 0; t < length; ++t) {
        Vector weight;
        double sum = 0;
        for (std::int64_t u = 0; u <= t; ++u) {
          double score = 0;
          for (std::int64_t i = 0; i < size; ++i) score += at(b, t, 0, h, i) * at(b, u, 1, h, i);
          weight.push_back(std::exp(score / std::sqrt(static_cast<double>(size))));
          sum += weight.back();
        }
        for (std::int64_t i = 0; i < size; ++i) {
          double value = 0;
          for (std::int64_t u = 0; u <= t; ++u) value += weight[static_cast<std::size_t>(u)] / sum * at(b, u, 2, h, i);
          out[static_cast<std::size_t>((b * length + t) * width + h * size + i)] = value;
        }
      }
    }
  }
  return out;
}

/// An attention with its workspace, on a stream of its own. Scratch starts as NaN: nothing may read it unwritten.
struct Fixture {
  Device device;
  Device::Stream stream = device.make_stream("compute");
  transformer::Gemm<Device> gemm{device};
  transformer::AttentionContext<Device, double> context{device, &gemm, {}, {}};
  Vector scores, gradient;

  Fixture(std::int64_t heads, std::int64_t size, std::int64_t panel, std::int64_t elements) {
    context.plan.shape = {heads, size};
    context.plan.panel = panel;
    scores.assign(static_cast<std::size_t>(elements), std::nan(""));
    gradient = scores;
    context.scratch.scores = scores.data();
    context.scratch.scores_gradient = gradient.data();
    context.scratch.score_elements = elements;
  }
};

transformer::Pass whole(std::int64_t batch, std::int64_t length) {
  transformer::Pass pass;
  pass.batch = batch;
  pass.length = pass.capacity = length;
  return pass;
}

double largest_difference(Vector const& a, Vector const& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double const difference = std::abs(a[i] - b[i]);
    largest = difference <= largest ? largest : difference;  // NaN gets through
  }
  return largest;
}

}  // namespace

TEST_CASE("attention equals its definition for any panel size", "[nanogpt][model][attention]") {
  std::int64_t const heads = 3, size = 4;
  for (std::int64_t const length : {1, 2, 7, 12}) {
    for (std::int64_t const panel : {1, 3, 4, 256}) {
      for (std::int64_t const groups : {1, 2, 3}) {
        CAPTURE(length, panel, groups);
        std::int64_t const batch = 2;
        Fixture f(heads, size, panel, groups * std::min(panel, length) * length);
        auto const qkv = random_vector<double>(batch * length * 3 * heads * size, 11);
        Vector mixed(static_cast<std::size_t>(batch * length * heads * size), std::nan(""));
        transformer::CausalAttention<Device, double> const attention(f.context);
        attention.forward(f.stream, whole(batch, length), {}, qkv.data(), mixed.data(), nullptr);
        f.device.synchronize(f.stream);
        // Sums of at most 12 products of values up to 1: errors of a few units of 2^-53.
        CHECK(largest_difference(mixed, naive_attention(qkv, batch, length, heads, size)) < 1e-14);
      }
    }
  }
}

TEST_CASE("attention's backward is the derivative of its definition", "[nanogpt][model][attention]") {
  std::int64_t const heads = 2, size = 3, batch = 2;
  for (std::int64_t const length : {1, 5, 8}) {
    for (std::int64_t const panel : {2, 4, 256}) {
      CAPTURE(length, panel);
      Fixture f(heads, size, panel, std::min(panel, length) * length);
      auto qkv = random_vector<double>(batch * length * 3 * heads * size, 13);
      auto const weight = random_vector<double>(batch * length * heads * size, 17);
      Vector gradient(qkv.size(), std::nan(""));
      transformer::CausalAttention<Device, double> const attention(f.context);
      attention.backward(f.stream, whole(batch, length), {}, qkv.data(), nullptr, nullptr, weight.data(),
                         gradient.data());
      f.device.synchronize(f.stream);
      auto const loss = [&] {
        auto const out = naive_attention(qkv, batch, length, heads, size);
        double sum = 0;
        for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * weight[i];
        return sum;
      };
      CHECK(model_test::gradient_error(qkv, gradient, loss, qkv.size()) < 1e-8);
    }
  }
}

TEST_CASE("attention's dropout does not depend on how the work is cut", "[nanogpt][model][attention]") {
  std::int64_t const heads = 3, size = 4, batch = 2, length = 9;
  auto const qkv = random_vector<double>(batch * length * 3 * heads * size, 11);
  auto const weight = random_vector<double>(batch * length * heads * size, 17);
  transformer::DropoutMask const mask{0.5f, 1337, 7, 3};
  auto const run = [&](std::int64_t panel, std::int64_t groups, Vector& gradient) {
    Fixture f(heads, size, panel, groups * std::min(panel, length) * length);
    Vector mixed(weight.size());
    gradient.assign(qkv.size(), 0);
    transformer::CausalAttention<Device, double> const attention(f.context);
    auto const pass = whole(batch, length);
    attention.forward(f.stream, pass, mask, qkv.data(), mixed.data(), nullptr);
    attention.backward(f.stream, pass, mask, qkv.data(), nullptr, nullptr, weight.data(), gradient.data());
    f.device.synchronize(f.stream);
    return mixed;
  };
  Vector gradient, other_gradient;
  auto const mixed = run(256, 3, gradient);
  CHECK(largest_difference(mixed, run(2, 1, other_gradient)) < 1e-14);
  CHECK(largest_difference(gradient, other_gradient) < 1e-14);
  CHECK(largest_difference(mixed, naive_attention(qkv, batch, length, heads, size)) > 0.01);
}

TEST_CASE("attention of appended rows equals attention of the whole", "[nanogpt][model][attention]") {
  std::int64_t const heads = 2, size = 4, length = 10, width = heads * size;
  auto const qkv = random_vector<double>(length * 3 * width, 19);
  auto const expected = naive_attention(qkv, 1, length, heads, size);
  Fixture f(heads, size, 4, 4 * length);
  transformer::CausalAttention<Device, double> const attention(f.context);
  Vector mixed(expected.size());
  std::int64_t position = 0;
  for (std::int64_t const count : {5, 1, 1, 3}) {
    transformer::Pass pass;
    pass.length = count;
    pass.position = position;
    pass.capacity = length;
    attention.forward(f.stream, pass, {}, qkv.data(), mixed.data() + position * width, nullptr);
    position += count;
  }
  f.device.synchronize(f.stream);
  CHECK(largest_difference(mixed, expected) < 1e-14);
}
