// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products on the host.
// needs: OpenBLAS
#include "examples/nanogpt/gemm_host.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/host/device.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;

template <class T, class Out>
void check() {
  fsdp::host::Device const device{.threads = 3};
  fsdp::conformance::check_exact_products<T, Out>(device, {{1, 4112, 128, 1}, {272, 520, 8, 1}});  // tiles
  fsdp::conformance::check_product_errors<T, Out>(device, {{24, 40, 256, 1}, {16, 24, 64, 3}});
}

}  // namespace

TEST_CASE("host gemm: fp32", "[gemm]") { check<float, float>(); }
TEST_CASE("host gemm: fp64", "[gemm]") { check<double, double>(); }
TEST_CASE("host gemm: bf16 to fp32", "[gemm]") { check<bf16, float>(); }
TEST_CASE("host gemm: bf16 to bf16", "[gemm]") { check<bf16, bf16>(); }
TEST_CASE("host gemm: fp16 to fp32", "[gemm]") { check<fp16, float>(); }
TEST_CASE("host gemm: fp16 to fp16", "[gemm]") { check<fp16, fp16>(); }

TEST_CASE("host gemm: tiles cover a product once, and there are enough of them", "[gemm]") {
  using nanogpt::HostTiles;
  for (std::int64_t const m : {0, 1, 2, 15, 16, 17, 400, 1057})
    for (std::int64_t const n : {0, 1, 16, 33, 300, 2304})
      for (std::int64_t const k : {1, 768}) {
        CAPTURE(m, n, k);
        auto const tiles = HostTiles::of(m, n, k);
        std::vector<int> seen(static_cast<std::size_t>(m * n));
        for (std::int64_t index = 0; index < tiles.count(); ++index) {
          auto const tile = tiles.at(index);
          REQUIRE((tile.rows > 0 && tile.columns > 0));
          REQUIRE((tile.row + tile.rows <= m && tile.column + tile.columns <= n));
          for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row)
            for (std::int64_t column = tile.column; column < tile.column + tile.columns; ++column)
              ++seen[static_cast<std::size_t>(row * n + column)];
        }
        CHECK(seen == std::vector<int>(seen.size(), 1));
        CHECK(tiles.count() <= HostTiles::most);
      }
  // GPT-2 124M at 1,024 tokens, forward and gradients, its head in parts of 512 rows; a token by itself.
  CHECK(HostTiles::of(1024, 2304, 768).count() == 4);
  CHECK(HostTiles::of(1024, 3072, 768).count() == 8);
  CHECK(HostTiles::of(1024, 768, 3072).count() == 2);
  CHECK(HostTiles::of(768, 768, 1024).count() == 2);
  CHECK(HostTiles::of(512, 50304, 768).count() == 32);
  CHECK(HostTiles::of(512, 768, 50304).count() == 2);
  CHECK(HostTiles::of(1, 50304, 768).count() == 32);
  CHECK(HostTiles::of(1, 64, 64).count() == 1);
}

TEST_CASE("host gemm: any number of threads gives the same bits", "[gemm]") {
  auto const draw = [](std::size_t i, std::uint64_t salt) {
    return static_cast<double>(fsdp::conformance::hash(0, i, salt) >> 11) * 0x1p-53 - 0.5;
  };
  auto const run = [&](int threads, fsdp::conformance::GemmShape shape) {
    using fsdp::conformance::Op;
    fsdp::conformance::GemmCase<fsdp::host::Device, float, float> product(fsdp::host::Device{threads}, shape, Op::none,
                                                                          Op::transpose, false, draw);
    return product.run(1.0);
  };
  for (auto const shape : {fsdp::conformance::GemmShape{1600, 1000, 16, 1}, {1, 8192, 130, 1}, {40, 33, 64, 12}}) {
    CAPTURE(shape.m, shape.n, shape.k);
    auto const alone = run(1, shape);
    for (int const threads : {2, 3, 5, 8, 16}) CHECK(run(threads, shape) == alone);
  }
}
