// SPDX-License-Identifier: Apache-2.0
// The trainer's row kernels on a GPU against the same in double precision on the host.
// timeout: 470
#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/nanogpt/row_kernels_cases.hpp"

namespace {
bool const ready = fsdp::testing::need_gpu();
}

TEST_CASE("row kernels on a GPU: bf16", "[nanogpt][rows]") {
  model_test::check_row_kernels<fsdp::bf16>(fsdp::cuda::Device{});
}
TEST_CASE("row kernels on a GPU: fp32", "[nanogpt][rows]") {
  model_test::check_row_kernels<float>(fsdp::cuda::Device{});
}
