// SPDX-License-Identifier: Apache-2.0
// The model on a GPU: fp32 against the host's fp32, bf16 against fp32; evaluation and decoding in both.
// timeout: 470
// nvcc-full
// links: nanogpt_layers_cuda nanogpt_layers_host
#include <cmath>
#include <cstddef>

#include "fsdp/cuda.hpp"
#include "fsdp/host.hpp"
#include "nanogpt/instances/layers_cuda.hpp"
#include "nanogpt/instances/layers_host.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/nanogpt/training.hpp"

namespace {

using model_test::Outcome;

bool const ready = fsdp::testing::need_gpu();
#if defined(FSDP_CUDA_STANDIN)
constexpr bool repeats = false;  // emulated thread blocks run in one order
constexpr int steps = 3;         // and take their time
#else
constexpr bool repeats = true;
constexpr int steps = 20;
#endif

static_assert(fsdp::PinsMemory<fsdp::cuda::Device>, "batches and losses cross in page-locked memory");

template <class P, class D>
Outcome train(D const& device) {
  return model_test::train<P>(fsdp::FullShard{}, device, model_test::aligned_run(64, steps));
}
template <class P>
Outcome on_gpu() {
  return train<P>(fsdp::cuda::Device{});
}

/// The first run in fp32, which both tests compare with.
Outcome const& fp32_on_gpu() {
  static Outcome const outcome = on_gpu<fsdp::Fp32>();
  return outcome;
}

}  // namespace

TEST_CASE("fp32 on a GPU is the host's fp32", "[nanogpt][model]") {
  auto const& gpu = fp32_on_gpu();
  // TF32 would round every operand to 2^-11.
  model_test::check_alike(gpu, train<fsdp::Fp32>(fsdp::host::Device{}), 1e-4, 1e-3f);
  if (repeats) CHECK(on_gpu<fsdp::Fp32>() == gpu);
}

TEST_CASE("bf16 on a GPU trains as fp32 does", "[nanogpt][model]") {
  auto const narrow = on_gpu<fsdp::Bf16>();
  // The bounds of model_precision.cpp, where the same is checked on the host: a loss, a mean over rows, moves by less
  // than one rounding of 2^-9, and 2^-8 leaves room for what 20 small steps make of it; logits of about 1 go through
  // ten.
  model_test::check_alike(narrow, fp32_on_gpu(), 0x1p-8, 10 * 0x1p-9f);
  if (repeats) CHECK(on_gpu<fsdp::Bf16>() == narrow);
}
