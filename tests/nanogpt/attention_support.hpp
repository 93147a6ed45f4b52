// SPDX-License-Identifier: Apache-2.0
// The trainer's attention on some device, and by panels in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/host.hpp"
#include "fsdp/memory.hpp"
#include "tests/unit/kernels_support.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/math/gemm_host.hpp"

namespace model_test {

using fsdp::bf16;
using Doubles = std::vector<double>;

/// A case of attention: bf16 rows, and the gradient of the result.
struct AttentionCase {
  std::int64_t heads = 2, size = 64;
  transformer::Pass pass;
  transformer::DropoutMask mask;
  std::vector<bf16> qkv, up;

  transformer::AttentionPlan plan() const {
    transformer::AttentionPlan plan;
    plan.shape = {heads, size};
    plan.batch = pass.batch;
    plan.sequence = pass.capacity;
    return plan;
  }
  std::int64_t statistics() const { return transformer::flash_shape(plan()).statistics(); }
};

inline AttentionCase attention_case(std::int64_t heads, std::int64_t size, std::int64_t batch, std::int64_t length,
                                    float dropout = 0.0f, std::int64_t position = 0, std::int64_t spare = 0) {
  AttentionCase c;
  c.heads = heads;
  c.size = size;
  c.pass.batch = batch;
  c.pass.length = length;
  c.pass.position = position;
  c.pass.capacity = position + length + spare;
  c.pass.sequence = 5;
  c.mask = {dropout, 1337, 4, 9};
  c.qkv = kernel_test::random_values<bf16>(batch * c.pass.capacity * 3 * heads * size, 21);
  c.up = kernel_test::random_values<bf16>(batch * length * heads * size, 22);
  return c;
}

struct Attention {
  Doubles mixed, gradient;  // the gradient of qkv: only where the pass begins at position 0
};

inline Doubles wide(std::vector<bf16> const& values) {
  Doubles result;
  for (auto const& value : values) result.push_back(kernel_test::as_double(value));
  return result;
}

/// By panels of 16 rows, in double precision.
inline Attention by_panels(AttentionCase const& c) {
  fsdp::host::Device const device;
  auto stream = device.make_stream("compute");
  transformer::Gemm<fsdp::host::Device> gemm(device);
  transformer::AttentionContext<fsdp::host::Device, double> context{device, &gemm, c.plan(), {}};
  context.plan.panel = 16;
  Doubles scores(static_cast<std::size_t>(16 * c.pass.capacity * c.heads)), scores_gradient(scores.size());
  context.scratch.scores = scores.data();
  context.scratch.scores_gradient = scores_gradient.data();
  context.scratch.score_elements = static_cast<std::int64_t>(scores.size());
  auto const qkv = wide(c.qkv), up = wide(c.up);
  Attention a{Doubles(up.size()), Doubles(qkv.size())};
  transformer::CausalAttention<fsdp::host::Device, double> const attention(context);
  attention.forward(stream, c.pass, c.mask, qkv.data(), a.mixed.data(), nullptr);
  if (c.pass.position == 0)
    attention.backward(stream, c.pass, c.mask, qkv.data(), nullptr, nullptr, up.data(), a.gradient.data());
  device.synchronize(stream);
  return a;
}

/// By the kernels of a device that has flash attention.
template <class D>
Attention by_flash(D const& device, typename D::Stream& stream, transformer::Gemm<D>& gemm, AttentionCase const& c) {
  transformer::AttentionContext<D, bf16> context{device, &gemm, c.plan(), {}};
  fsdp::MemoryAccount account;
  auto const room = [&](std::size_t bytes) {
    return fsdp::AccountedMemory<D const>(device, account, fsdp::MemoryTag::workspace, bytes);
  };
  auto const bytes = [](std::vector<bf16> const& values) { return values.size() * sizeof(bf16); };
  auto const statistics = static_cast<std::size_t>(c.statistics()) * sizeof(float);
  auto const qkv = room(bytes(c.qkv)), up = room(bytes(c.up)), mixed = room(bytes(c.up)), gradient = room(bytes(c.qkv)),
             log_sums = room(statistics), products = room(statistics);
  device.copy_async(stream, qkv.data(), c.qkv.data(), bytes(c.qkv));
  device.copy_async(stream, up.data(), c.up.data(), bytes(c.up));
  device.zero_async(stream, gradient.data(), bytes(c.qkv));
  context.scratch.products = products.template as<float>();
  transformer::CausalAttention<D, bf16> const attention(context);
  attention.forward(stream, c.pass, c.mask, qkv.template as<bf16>(), mixed.template as<bf16>(),
                    log_sums.template as<float>());
  if (c.pass.position == 0) {
    attention.backward(stream, c.pass, c.mask, qkv.template as<bf16>(), mixed.template as<bf16>(),
                       log_sums.template as<float>(), up.template as<bf16>(), gradient.template as<bf16>());
  }
  std::vector<bf16> out(c.up.size()), qkv_gradient(c.qkv.size());
  device.copy_async(stream, out.data(), mixed.data(), bytes(out));
  device.copy_async(stream, qkv_gradient.data(), gradient.data(), bytes(qkv_gradient));
  device.synchronize(stream);
  return {wide(out), wide(qkv_gradient)};
}

/// Largest difference by the largest value.
inline double difference(Doubles const& a, Doubles const& b) {
  double largest = 0, value = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::abs(a[i] - b[i]));
    value = std::max(value, std::abs(b[i]));
  }
  return value == 0 ? largest : largest / value;
}

}  // namespace model_test
