// SPDX-License-Identifier: Apache-2.0
// nanogpt's products of bf16 on the host by oneDNN. Where it has no kernel, plain loops stand in and must pass too.
// needs: OpenBLAS
// links: transformer_bf16 transformer_math
// skip-tsan
#include "transformer/math/bf16_products.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"
#include "tests/support/sanitized.hpp"
#include "transformer/math/gemm_host.hpp"

// A namespace with a name: a program of its own, beside the others' plain loops.
namespace narrow_products {

using fsdp::bf16;
using transformer::Op;

template <class Out>
void check() {
  fsdp::host::Device const device;
  fsdp::conformance::check_exact_products<bf16, Out>(device);
  // A row, sizes of a model, and those that no vector divides.
  std::int64_t const terms = fsdp::testing::sanitized ? 101 : 1001;
  fsdp::conformance::check_product_errors<bf16, Out>(
      device, {{1, 384, 96, 1}, {64, 96, 256, 1}, {65, 130, terms, 1}, {48, 64, 64, 3}});
  fsdp::conformance::check_errors_beside_plain<bf16, Out>(device, {{64, 96, 256, 1}, {65, 130, terms, 1}});
}

/// C (n, n) of ones times ones, which is n everywhere.
bool all_are(std::int64_t n, std::vector<float> const& c) {
  return std::all_of(c.begin(), c.end(), [&](float value) { return value == static_cast<float>(n); });
}
std::vector<float> ones_squared(std::int64_t n) {
  auto const elements = static_cast<std::size_t>(n * n);
  std::vector<bf16> const one(elements, bf16(1.0f));
  std::vector<float> c(elements);
  if (!transformer::multiply_bf16({Op::none, Op::transpose, n, n, n, n, n, n, false, true}, one.data(), one.data(),
                                  c.data()))
    std::fill(c.begin(), c.end(), static_cast<float>(n));
  return c;
}

TEST_CASE("host gemm by oneDNN: bf16 to fp32", "[gemm]") { check<float>(); }
TEST_CASE("host gemm by oneDNN: bf16 to bf16", "[gemm]") { check<bf16>(); }

TEST_CASE("a processor with units for bf16 multiplies with them", "[gemm]") {
  if (transformer::bf16_units().empty()) return;
  std::vector<bf16> const a(64 * 64, bf16(0.5f));
  std::vector<float> c(64 * 64, 1.0f);
  for (auto const op_a : {Op::none, Op::transpose})
    for (auto const op_b : {Op::none, Op::transpose})
      CHECK(transformer::multiply_bf16({op_a, op_b, 64, 64, 64, 64, 64, 64, true, true}, a.data(), a.data(), c.data()));
  CHECK(c == std::vector<float>(64 * 64, 65.0f));
}

TEST_CASE("more shapes than are kept, on several threads", "[gemm]") {
  bool right[3]{};
  std::vector<std::thread> threads;
  for (bool& mine : right)
    threads.emplace_back([&mine] {
      mine = true;
      for (int round = 0; round < 2; ++round)
        for (std::int64_t n = 1; n <= 40; ++n) mine = mine && all_are(n, ones_squared(n));
    });
  for (auto& thread : threads) thread.join();
  CHECK((right[0] && right[1] && right[2]));
  for (std::int64_t rows = 1; rows <= 1100; ++rows) {  // as a sample's cache of keys grows
    std::vector<bf16> const keys(static_cast<std::size_t>(rows * 8), bf16(1.0f)), query(8, bf16(1.0f));
    std::vector<float> scores(static_cast<std::size_t>(rows));
    bool const done = transformer::multiply_bf16({Op::none, Op::transpose, 1, rows, 8, 8, 8, rows, false, true},
                                                 query.data(), keys.data(), scores.data());
    if (done) REQUIRE(scores == std::vector<float>(static_cast<std::size_t>(rows), 8.0f));
  }
}

}  // namespace narrow_products
