// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products where cuBLASLt knows no algorithm: the next way computes them, and the last one says why
// there is none.
#include <cstdint>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"
#include "tests/standin/cublas/cublas.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace {

using fsdp::bf16;
using fsdp::conformance::Buffer;
using fsdp::conformance::download;
using fsdp::conformance::upload;
using fsdp::cuda::Device;
using standin::cublas::Algorithms;
using transformer::Gemm;
using transformer::Op;

/// Holds settings as long as it lives.
struct Configured {
  explicit Configured(Algorithms algorithms, bool gemm_ex = true) {
    standin::cublas::configure({.algorithms = algorithms, .gemm_ex = gemm_ex});
  }
  Configured(Configured const&) = delete;
  Configured& operator=(Configured const&) = delete;
  ~Configured() { standin::cublas::configure({}); }
};

/// Calls since `before`.
standin::cublas::Calls calls_since(standin::cublas::Calls const& before) {
  auto const now = standin::cublas::calls();
  return {now.heuristics - before.heuristics, now.products - before.products, now.gemm_ex - before.gemm_ex};
}

}  // namespace

TEST_CASE("products that no algorithm serves under the mask are computed without it", "[gemm]") {
  Configured const settings(Algorithms::none_under_the_mask);
  auto const before = standin::cublas::calls();
  fsdp::conformance::check_exact_products<bf16, bf16>(Device());
  auto const calls = calls_since(before);
  CHECK(calls.products > 0);
  CHECK(calls.gemm_ex == 0);
}

TEST_CASE("products that cuBLASLt declines are cuBLAS's: of all types, with biases and in batches", "[gemm]") {
  Configured const settings(Algorithms::none);
  auto const before = standin::cublas::calls();
  auto const handles = standin::cublas::live_handles();
  Device const device;
  fsdp::conformance::check_exact_products<float, float>(device);
  fsdp::conformance::check_exact_products<double, double>(device);
  fsdp::conformance::check_exact_products<bf16, bf16>(device);
  fsdp::conformance::check_exact_products<bf16, float>(device);
  auto const calls = calls_since(before);
  CHECK(calls.gemm_ex > 0);
  CHECK(calls.products == 0);
  CHECK(calls.heuristics == 0);
  CHECK(standin::cublas::live_handles() == handles);
}

TEST_CASE("a bias is added before the result is rounded, whoever computes", "[gemm]") {
  // 1 - 2^-10 is 1 in bf16; with the bias it lies below the middle of two bf16, and 1 with the bias on it, where the
  // even neighbour is the upper one.
  std::vector<bf16> const a{bf16(1.0f), bf16(-0x1p-5f)}, b{bf16(1.0f), bf16(0x1p-5f)}, bias{bf16(1 + 3 * 0x1p-7f)};
  for (auto const algorithms : {Algorithms::every, Algorithms::none}) {
    Configured const settings(algorithms);
    Device const device;
    auto stream = device.make_stream("gemm");
    Gemm<Device> gemm(device);
    Buffer<bf16, Device const> left(device, 2), right(device, 2), row(device, 1), result(device, 1);
    upload(device, stream, left.data(), a);
    upload(device, stream, right.data(), b);
    upload(device, stream, row.data(), bias);
    bf16 const *const pa = left.data(), *const pb = right.data(), *const pr = row.data();
    gemm.run_with_bias(stream, Op::none, Op::none, 1, 1, 2, 1.0f, pa, 2, pb, 1, pr, result.data(), 1);
    CHECK(static_cast<float>(download(device, stream, result.data(), 1)[0]) == 2 + 0x1p-6f);
  }
}

TEST_CASE("a product that nothing computes ends with its shape, and is asked for again", "[gemm]") {
  Device const device;
  auto stream = device.make_stream("gemm");
  Gemm<Device> gemm(device);
  Buffer<float, Device const> memory(device, 3 * 16);
  device.zero_async(stream, memory.data(), memory.size() * sizeof(float));
  float const* const a = memory.data();
  auto const run = [&] { gemm.run(stream, Op::none, Op::none, 4, 4, 4, 1, a, 4, a + 16, 4, 0, memory.data() + 32, 4); };
  auto const before = standin::cublas::calls();
  {
    Configured const settings(Algorithms::none, false);
    std::string text;
    try {
      run();
    } catch (fsdp::VendorError const& error) {
      text = error.what();
    }
    CHECK(text.find("cuBLASLt has no algorithm for a matrix product, and cuBLAS fails (not supported") == 0);
    CHECK(text.find("batch 1, m 4, n 4, k 4") != text.npos);
  }
  Configured const settings(Algorithms::none);
  for (int i = 0; i < 3; ++i) run();
  CHECK(gemm.plans() == 1);
  CHECK(calls_since(before).gemm_ex == 3);
  device.synchronize(stream);
}
