// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products on CUDA.
// timeout: 470
#include <cstddef>
#include <vector>

#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"
#include "tests/conformance/gpu.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;
using fsdp::conformance::GemmCase;
using fsdp::cuda::Device;
using transformer::Op;

bool const ready = fsdp::testing::need_gpu();

template <class T, class Out>
void check() {
  Device const device;
  fsdp::conformance::check_exact_products<T, Out>(device);
#if defined(FSDP_CUDA_STANDIN)
  fsdp::conformance::check_product_errors<T, Out>(device, {{24, 40, 64, 1}, {16, 24, 32, 6}, {8, 16, 1024, 1}});
#else
  // The last two: few results of long sums, which are cut into parts.
  fsdp::conformance::check_product_errors<T, Out>(
      device, {{256, 384, 512, 1}, {128, 256, 64, 6}, {64, 64, 8192, 1}, {8, 128, 16384, 1}});
#endif
}

}  // namespace

TEST_CASE("gemm: fp32", "[gemm]") { check<float, float>(); }
TEST_CASE("gemm: fp64", "[gemm]") { check<double, double>(); }
TEST_CASE("gemm: bf16 to fp32", "[gemm]") { check<bf16, float>(); }
TEST_CASE("gemm: bf16 to bf16", "[gemm]") { check<bf16, bf16>(); }
TEST_CASE("gemm: fp16 to fp32", "[gemm]") { check<fp16, float>(); }
TEST_CASE("gemm: fp16 to fp16", "[gemm]") { check<fp16, fp16>(); }

TEST_CASE("gemm: a shape is planned once, whatever beta; another alignment is another plan", "[gemm]") {
  Device const device;
  auto stream = device.make_stream("gemm");
  transformer::Gemm<Device> gemm(device);
  fsdp::conformance::Buffer<float, Device const> memory(device, 3 * 64 * 64 + 1);
  device.zero_async(stream, memory.data(), memory.size() * sizeof(float));
  float const* const a = memory.data();
  auto const run = [&](float const* b, float beta) {
    gemm.run(stream, Op::none, Op::none, 64, 64, 64, 1, a, 64, b, 64, beta, memory.data() + 2 * 64 * 64, 64);
  };
  run(a + 64 * 64, 0);
  run(a + 64 * 64, 1);
  CHECK(gemm.plans() == 1);
  auto const before = device.memory().free;
  for (int i = 0; i < 100; ++i) run(a + 64 * 64, static_cast<float>(i % 2));
  CHECK(gemm.plans() == 1);
  CHECK(device.memory().free == before);
  run(a + 1, 0);
  CHECK(gemm.plans() == 2);
  device.synchronize(stream);
}

TEST_CASE("gemm: one object serves one stream", "[gemm]") {
  Device const device;
  auto first = device.make_stream("first"), second = device.make_stream("second");
  transformer::Gemm<Device> gemm(device);
  fsdp::conformance::Buffer<float, Device const> memory(device, 3);
  device.zero_async(first, memory.data(), memory.size() * sizeof(float));
  float const* const a = memory.data();
  auto const run = [&](Device::Stream& stream) {
    gemm.run(stream, Op::none, Op::none, 1, 1, 1, 1, a, 1, a + 1, 1, 0, memory.data() + 2, 1);
  };
  run(first);
  CHECK_THROWS_AS(run(second), fsdp::UsageError);
  device.synchronize(first);
}
