// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products on the host.
// needs: OpenBLAS
#include "examples/nanogpt/gemm_host.hpp"

#include <vector>

#include "fsdp/host/device.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;

template <class T, class Out>
void check() {
  fsdp::host::Device const device;
  fsdp::conformance::check_exact_products<T, Out>(device);
  fsdp::conformance::check_product_errors<T, Out>(device, {{24, 40, 256, 1}, {16, 24, 64, 3}});
}

}  // namespace

TEST_CASE("host gemm: fp32", "[gemm]") { check<float, float>(); }
TEST_CASE("host gemm: fp64", "[gemm]") { check<double, double>(); }
TEST_CASE("host gemm: bf16 to fp32", "[gemm]") { check<bf16, float>(); }
TEST_CASE("host gemm: bf16 to bf16", "[gemm]") { check<bf16, bf16>(); }
TEST_CASE("host gemm: fp16 to fp32", "[gemm]") { check<fp16, float>(); }
TEST_CASE("host gemm: fp16 to fp16", "[gemm]") { check<fp16, fp16>(); }
