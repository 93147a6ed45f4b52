// SPDX-License-Identifier: Apache-2.0
// The trainer's row kernels in emulated thread blocks against the same in double precision: what row_kernels_cuda.cu
// asks of a GPU holds there.
// skip-tsan
// labels: emulated
// optimised
#include "tests/catch.hpp"
#include "tests/nanogpt/row_kernels_cases.hpp"
#include "tests/support/emulated_device.hpp"

TEST_CASE("row kernels in emulated thread blocks: bf16", "[emulated][rows]") {
  model_test::check_row_kernels<fsdp::bf16>(emulated::Device{});
}
TEST_CASE("row kernels in emulated thread blocks: fp32", "[emulated][rows]") {
  model_test::check_row_kernels<float>(emulated::Device{});
}
