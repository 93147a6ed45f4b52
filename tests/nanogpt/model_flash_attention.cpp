// SPDX-License-Identifier: Apache-2.0
// The trainer's attention where it is flash attention, against the same class by panels in double precision: shapes,
// places and dropout masks that it hands on.
// skip-tsan
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "attention.hpp"
#include "fsdp/host/device.hpp"
#include "gemm_host.hpp"
#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "tests/support/emulated_tile.hpp"

using fsdp::bf16;

namespace nanogpt {
/// Flash attention needs no other products.
template <>
class Gemm<emulated::Device> {
 public:
  template <class... Args>
  void batched(Args const&...) {
    fsdp::fail<fsdp::Error>("a product outside flash attention");
  }
};
}  // namespace nanogpt

namespace {

constexpr std::int64_t heads = 2, size = 64, batch = 2, length = 70;

nanogpt::GptConfig config() {
  nanogpt::GptConfig c;
  c.n_head = heads;
  c.n_embd = heads * size;
  c.block_size = 100;
  return c;
}

struct Attention {
  emulated::Doubles mixed, gradient;
};

/// By panels of 16 rows, in double precision.
Attention by_panels(std::vector<bf16> const& qkv, std::vector<bf16> const& up, nanogpt::Pass const& pass,
                    nanogpt::DropoutMask const& mask) {
  fsdp::host::Device const device;
  auto stream = device.make_stream("compute");
  nanogpt::Gemm<fsdp::host::Device> gemm(device);
  nanogpt::Context<fsdp::host::Device, double> context{device, &gemm, config(), {}, {}};
  context.plan.panel = 16;
  emulated::Doubles scores(static_cast<std::size_t>(16 * pass.capacity * heads)), scores_gradient(scores.size());
  context.workspace.scores = scores.data();
  context.workspace.scores_gradient = scores_gradient.data();
  context.workspace.score_elements = static_cast<std::int64_t>(scores.size());
  auto const wide = emulated::doubles(qkv), wide_up = emulated::doubles(up);
  Attention a{emulated::Doubles(up.size()), emulated::Doubles(qkv.size())};
  nanogpt::CausalAttention<fsdp::host::Device, double> const attention(context);
  attention.forward(stream, pass, mask, wide.data(), a.mixed.data(), nullptr);
  if (pass.position == 0)
    attention.backward(stream, pass, mask, wide.data(), nullptr, nullptr, wide_up.data(), a.gradient.data());
  device.synchronize(stream);
  return a;
}

Attention by_flash(std::vector<bf16> const& qkv, std::vector<bf16> const& up, nanogpt::Pass const& pass,
                   nanogpt::DropoutMask const& mask) {
  emulated::Device const device;
  emulated::Device::Stream stream;
  nanogpt::Gemm<emulated::Device> gemm;
  nanogpt::Context<emulated::Device, bf16> context{device, &gemm, config(), {}, {}};
  context.plan.batch = batch;
  context.plan.sequence = pass.capacity;
  auto const statistics = static_cast<std::size_t>(nanogpt::flash_shape(context.config, context.plan).statistics());
  emulated::Aligned<float> log_sums(statistics), products(statistics);
  context.workspace.products = products.data();
  emulated::Aligned<bf16> const in(qkv.begin(), qkv.end()), in_up(up.begin(), up.end());
  emulated::Aligned<bf16> mixed(up.size()), gradient(qkv.size());
  nanogpt::CausalAttention<emulated::Device, bf16> const attention(context);
  attention.forward(stream, pass, mask, in.data(), mixed.data(), log_sums.data());
  if (pass.position == 0)
    attention.backward(stream, pass, mask, in.data(), mixed.data(), log_sums.data(), in_up.data(), gradient.data());
  Attention a;
  for (auto const& value : mixed) a.mixed.push_back(kernel_test::as_double(value));
  for (auto const& value : gradient) a.gradient.push_back(kernel_test::as_double(value));
  return a;
}

/// Largest difference by the largest value.
double difference(emulated::Doubles const& a, emulated::Doubles const& b) {
  double largest = 0, value = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]));
    value = std::max(value, std::abs(b[i]));
  }
  return value == 0 ? largest : largest / value;
}

}  // namespace

TEST_CASE("attention of the trainer is the same by flash attention and by panels", "[emulated][flash]") {
  for (float const dropout : {0.0f, 0.25f}) {
    nanogpt::Pass pass;
    pass.batch = batch;
    pass.length = pass.capacity = length;
    pass.sequence = 5;
    nanogpt::DropoutMask const mask{dropout, 1337, 4, 9};
    auto const qkv = kernel_test::random_values<bf16>(batch * length * 3 * heads * size, 21);
    auto const up = kernel_test::random_values<bf16>(batch * length * heads * size, 22);
    auto const exact = by_panels(qkv, up, pass, mask), ours = by_flash(qkv, up, pass, mask);
    CAPTURE(dropout);
    // Probabilities and slopes are rounded to bf16, 2^-9 each; a wrong mask or place gives differences near 1.
    CHECK(difference(ours.mixed, exact.mixed) < 0.01);
    CHECK(difference(ours.gradient, exact.gradient) < 0.01);
  }
}

TEST_CASE("attention of the trainer decodes by flash attention", "[emulated][flash]") {
  nanogpt::Pass pass;
  pass.batch = batch;
  pass.length = 3;
  pass.position = 66;
  pass.capacity = 80;
  auto const qkv = kernel_test::random_values<bf16>(batch * 80 * 3 * heads * size, 23);
  auto const up = kernel_test::random_values<bf16>(batch * 3 * heads * size, 24);
  CHECK(difference(by_flash(qkv, up, pass, {}).mixed, by_panels(qkv, up, pass, {}).mixed) < 0.01);
}
