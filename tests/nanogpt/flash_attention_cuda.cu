// SPDX-License-Identifier: Apache-2.0
// Flash attention on a GPU against attention by panels in double precision on the host.
// timeout: 470
// links: nanogpt_layers_cuda
#include "fsdp/cuda.hpp"
#include "nanogpt/instances/layers_cuda.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/nanogpt/attention_support.hpp"

namespace {

#if defined(FSDP_CUDA_STANDIN)
constexpr bool in_emulation = true;  // in thread blocks on the host, which take their time
#else
constexpr bool in_emulation = false;
#endif

using fsdp::cuda::Device;

bool const ready = fsdp::testing::need_gpu();

model_test::Attention on_gpu(model_test::AttentionCase const& c) {
  Device const device;
  auto stream = device.make_stream("compute");
  transformer::Gemm<Device> gemm(device);
  return model_test::by_flash(device, stream, gemm, c);
}

/// As exact as in emulated thread blocks (model_flash_attention.cpp), and the same in every run.
void check(model_test::AttentionCase const& c) {
  CAPTURE(c.heads, c.size, c.pass.batch, c.pass.length, c.pass.position, c.mask.probability);
  auto const exact = model_test::by_panels(c), ours = on_gpu(c);
  CHECK(model_test::difference(ours.mixed, exact.mixed) < 0.01);
  if (c.pass.position == 0) CHECK(model_test::difference(ours.gradient, exact.gradient) < 0.01);
  if (in_emulation) return;  // thread blocks run in one order
  auto const again = on_gpu(c);
  CHECK(again.mixed == ours.mixed);
  CHECK(again.gradient == ours.gradient);
}

}  // namespace

TEST_CASE("flash attention on a GPU: sizes around a tile", "[nanogpt][flash]") {
  for (std::int64_t const size : {64, 128}) {
    for (std::int64_t const length : {1, 2, 63, 64, 65, 127, 128, 129, 333}) {
      if (in_emulation && length > 65) continue;  // emulated/flash_attention.cpp has the other lengths
      check(model_test::attention_case(in_emulation ? 1 : 3, size, 2, length));
    }
    if (!in_emulation) check(model_test::attention_case(1, size, 1, 1000));
  }
}

TEST_CASE("flash attention on a GPU: dropout", "[nanogpt][flash]") {
  for (std::int64_t const size : {64, 128}) {
    for (std::int64_t const length : {5, 64, 200}) {
      if (in_emulation && length > 64) continue;
      check(model_test::attention_case(2, size, 2, length, 0.25f));
    }
  }
}

TEST_CASE("flash attention on a GPU: decoding", "[nanogpt][flash]") {
  for (std::int64_t const size : {64, 128}) {
    check(model_test::attention_case(2, size, 2, 1, 0.0f, 99, 5));
    check(model_test::attention_case(2, size, 1, 70, 0.0f, 62, 0));
  }
}

TEST_CASE("flash attention on a GPU: long sequences", "[nanogpt][flash][large]") {
  for (std::int64_t const size : {64, 128}) check(model_test::attention_case(2, size, 1, in_emulation ? 200 : 2047));
}
