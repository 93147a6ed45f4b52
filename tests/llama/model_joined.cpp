// SPDX-License-Identifier: Apache-2.0
// Linear layers with one input: one product or several.
//
// links: llama_layers_host
// skip-tsan
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/layout.hpp"
#include "tests/catch.hpp"
#include "transformer/layers/joined_linear.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using Vector = std::vector<double>;
constexpr std::int64_t rows = 5, in = 3, outs[] = {4, 2, 1}, all = 7;

template <class E>
transformer::JoinedLinear<E, 3> layers_in(auto& storage, std::int64_t gap) {
  transformer::JoinedLinear<E, 3> layers;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < 3; at += outs[i++] * in + gap) {
    layers.weights[i].data = storage.data() + at;
    layers.weights[i].extents = {outs[i], in};
  }
  return layers;
}

Vector numbers(std::int64_t count, double start) {
  Vector values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(std::sin(start + static_cast<double>(i)));
  return values;
}

double largest_difference(Vector const& a, Vector const& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

/// Results, the gradient of the inputs, and those of the matrices, which lie `gap` elements apart.
std::vector<Vector> joined(std::int64_t gap, bool fresh, bool one_is_frozen) {
  fsdp::host::Device const device;
  auto stream = device.make_stream("compute");
  transformer::Gemm<fsdp::host::Device> gemm(device);
  auto const together = numbers(all * in, 1.0), x = numbers(rows * in, 2.0), dy = numbers(rows * all, 3.0);
  Vector w(static_cast<std::size_t>(all * in + 2 * gap), std::nan("")), dw(w.size(), 0.5);
  auto const layers = layers_in<double>(w, gap);
  auto gradients = layers_in<fsdp::Gradient<double>>(dw, gap);
  std::int64_t at = 0;
  transformer::JoinedLinear<double const, 3> constant;
  for (std::size_t i = 0; i < 3; at += outs[i++] * in) {
    std::copy_n(together.data() + at, outs[i] * in, layers.weights[i].data);
    constant.weights[i] = {layers.weights[i].data, layers.weights[i].extents};
    gradients.weights[i].fresh = fresh;
  }
  if (one_is_frozen) gradients.weights[1].data = nullptr;
  CHECK(constant.side_by_side() == (gap == 0));
  Vector y(rows * all), dx(rows * in);
  transformer::Adapters<fsdp::host::Device, double> const no_adapters;
  transformer::LinearPass<fsdp::host::Device, double> const pass{device, stream, gemm, no_adapters, nullptr, rows};
  transformer::joined_linear(pass, constant, x.data(), y.data());
  transformer::joined_linear_backward(pass, constant, gradients, x.data(), dy.data(), dx.data());
  device.synchronize(stream);
  Vector whole;
  at = 0;
  for (std::size_t i = 0; i < 3; at += outs[i++] * in + gap)
    whole.insert(whole.end(), dw.begin() + at, dw.begin() + at + outs[i] * in);
  return {y, dx, whole};
}

}  // namespace

TEST_CASE("joined linear layers are the same side by side and apart", "[llama][joined]") {
  for (bool const fresh : {true, false}) {
    auto const together = joined(0, fresh, false), apart = joined(3, fresh, false);
    // Sums of at most 7 products of values up to 1.
    for (std::size_t i = 0; i < together.size(); ++i) CHECK(largest_difference(together[i], apart[i]) < 1e-14);
    CHECK(largest_difference(together[2], joined(0, !fresh, false)[2]) == 0.5);
  }
}

TEST_CASE("a frozen one among joined linear layers has no gradient", "[llama][joined]") {
  auto const whole = joined(0, true, false)[2], part = joined(0, true, true)[2];
  for (std::size_t i = 0; i < whole.size(); ++i) {
    bool const is_frozen = i >= 12 && i < 18;
    CHECK(part[i] == (is_frozen ? 0.5 : whole[i]));
  }
}
