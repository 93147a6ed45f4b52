// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products on the host.
// needs: OpenBLAS
// skip-tsan
// links: transformer_math
#include "transformer/math/gemm_host.hpp"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gemm_suite.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;

using fsdp::conformance::GemmShape;

template <class T, class Out>
void check(std::vector<GemmShape> exact = {}, std::vector<GemmShape> const& more = {}) {
  fsdp::host::Device const device{.threads = 3};
  exact.insert(exact.end(), {{1, 4112, 128, 1}, {272, 520, 8, 1}});  // tiles
  fsdp::conformance::check_exact_products<T, Out>(device, exact);
  std::vector<GemmShape> shapes{{24, 40, 256, 1}, {16, 24, 64, 3}};
  shapes.insert(shapes.end(), more.begin(), more.end());
  fsdp::conformance::check_product_errors<T, Out>(device, shapes);
}

/// While it lives, products of fp32 are OpenBLAS's.
class ByOpenblas {
 public:
  ByOpenblas() { transformer::uses_fp32_products() = false; }
  ~ByOpenblas() { transformer::uses_fp32_products() = was_; }
  ByOpenblas(ByOpenblas const&) = delete;
  ByOpenblas& operator=(ByOpenblas const&) = delete;

 private:
  bool was_ = transformer::uses_fp32_products();
};

}  // namespace

TEST_CASE("host gemm: fp32", "[gemm]") {
  // Every number of rows in a tile, columns beside its vectors, several blocks of terms and of columns.
  std::vector<GemmShape> shapes;
  for (std::int64_t rows = 2; rows <= 15; ++rows) shapes.push_back({rows, 16 * rows + 1, 2 * rows + 1, 1});
  shapes.insert(shapes.end(), {{29, 33, 400, 1}, {113, 48, 50, 1}, {113, 48, 50, 2}, {20, 1553, 17, 1}, {3, 64, 0, 1}});
  check<float, float>(shapes, {{40, 70, 1200, 1}});
}
TEST_CASE("host gemm: fp32 errs no more than 1.5 times as much as a plain loop", "[gemm]") {
  fsdp::host::Device const device;
  std::vector<GemmShape> const shapes{{2, 40, 33, 1}, {40, 70, 1200, 1}, {128, 64, 257, 1}, {30, 48, 64, 2}};
  fsdp::conformance::check_errors_beside_plain<float, float>(device, shapes);
}
TEST_CASE("host gemm: fp32 by OpenBLAS", "[gemm]") {
  ByOpenblas const there;
  check<float, float>();
}
TEST_CASE("host gemm: fp64", "[gemm]") { check<double, double>(); }
TEST_CASE("host gemm: bf16 to fp32", "[gemm]") { check<bf16, float>(); }
TEST_CASE("host gemm: bf16 to bf16", "[gemm]") { check<bf16, bf16>(); }
TEST_CASE("host gemm: fp16 to fp32", "[gemm]") { check<fp16, float>(); }
TEST_CASE("host gemm: fp16 to fp16", "[gemm]") { check<fp16, fp16>(); }

TEST_CASE("host gemm: tiles cover a product once, and there are enough of them", "[gemm]") {
  using transformer::HostTiles;
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

TEST_CASE("host gemm: tiles for threads cover a product once", "[gemm]") {
  for (std::int64_t const m : {0, 1, 13, 15, 400, 1057})
    for (std::int64_t const n : {0, 1, 31, 33, 2304})
      for (int const threads : {1, 2, 3, 5, 16}) {
        CAPTURE(m, n, threads);
        auto const tiles = transformer::tiles_for_threads(m, n, 4096, threads);
        std::vector<int> seen(static_cast<std::size_t>(m * n));
        for (std::int64_t index = 0; index < tiles.count(); ++index) {
          auto const tile = tiles.at(index);
          REQUIRE((tile.rows > 0 && tile.columns > 0));
          for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row)
            for (std::int64_t column = tile.column; column < tile.column + tile.columns; ++column)
              ++seen.at(static_cast<std::size_t>(row * n + column));
        }
        CHECK(seen == std::vector<int>(seen.size(), 1));
        CHECK(tiles.count() <= 2 * threads);
      }
  CHECK(transformer::tiles_for_threads(1024, 768, 768, 1).count() == 1);
  CHECK(transformer::tiles_for_threads(1024, 768, 768, 2).count() == 4);
  CHECK(transformer::tiles_for_threads(1024, 50304, 768, 16).count() == 32);
}

#if !defined(TRANSFORMER_PLAIN_GEMM)
TEST_CASE("host gemm: a lower trapezoid spares work and changes no bit that is wanted", "[gemm]") {
  using transformer::Fp32Product, transformer::Lower, transformer::Op;
  if (!transformer::has_fp32_products()) {
    WARN("skipped: this processor has no AVX-512");
    return;
  }
  auto const draw = [](std::int64_t count, std::uint64_t salt) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i)
      values.push_back(static_cast<float>(
          static_cast<double>(fsdp::conformance::hash(0, static_cast<std::size_t>(i), salt) >> 11) * 0x1p-53 - 0.5));
    return values;
  };
  auto const lies_in = [](std::int64_t row, std::int64_t column, std::int64_t rows, std::int64_t columns) {
    return column - row <= columns - rows;
  };
  constexpr float untouched = 12345;
  for (auto const& [rows, keys] :
       {std::pair<std::int64_t, std::int64_t>{256, 256}, {70, 450}, {1, 40}, {15, 15}, {28, 47}, {300, 900}})
    for (std::int64_t const size : {64, 5})
      for (bool const adds : {false, true}) {
        CAPTURE(rows, keys, size, adds);
        auto scores = draw(rows * keys, 1);
        for (std::int64_t i = 0; i < rows * keys; ++i)
          if (!lies_in(i / keys, i % keys, rows, keys)) scores[static_cast<std::size_t>(i)] = 0;
        auto const run = [&](Fp32Product product, std::vector<float> const& a, std::vector<float> const& b) {
          std::vector<float> c(static_cast<std::size_t>(product.m * product.n), adds ? 0.25F : untouched);
          transformer::multiply_fp32(product, a.data(), b.data(), c.data());
          return c;
        };
        auto const values = draw(keys * size, 2), queries = draw(rows * size, 3);
        Fp32Product mixed{Op::none, Op::none, rows, size, keys, keys, size, size, adds};
        Fp32Product slopes{Op::transpose, Op::none, keys, size, rows, keys, size, size, adds};
        auto const all_mixed = run(mixed, scores, values), all_slopes = run(slopes, scores, queries);
        mixed.lower = slopes.lower = Lower::left;
        CHECK(run(mixed, scores, values) == all_mixed);
        CHECK(run(slopes, scores, queries) == all_slopes);

        Fp32Product products{Op::none, Op::transpose, rows, keys, size, size, size, keys, adds};
        auto const all = run(products, queries, values);
        products.lower = Lower::result;
        auto const some = run(products, queries, values);
        std::int64_t left = 0, different = 0;
        for (std::int64_t i = 0; i < rows * keys; ++i) {
          auto const at = static_cast<std::size_t>(i);
          if (lies_in(i / keys, i % keys, rows, keys) && some[at] != all[at]) ++different;
          if (some[at] == (adds ? 0.25F : untouched)) ++left;
        }
        CHECK(different == 0);
        if (rows == 256) CHECK(left >= rows * (rows - 2 * 32) / 2);
      }
}
#endif

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
  for (auto const shape :
       {GemmShape{1600, 1000, 16, 1}, {1, 8192, 130, 1}, {40, 33, 64, 12}, {100, 200, 900, 1}, {421, 64, 256, 1}}) {
    CAPTURE(shape.m, shape.n, shape.k);
    auto const alone = run(1, shape);
    auto const counts = fsdp::testing::sanitized ? std::vector{5} : std::vector{2, 3, 5, 8, 16};
    for (int const threads : counts) CHECK(run(threads, shape) == alone);
    ByOpenblas const there;
    auto const theirs = run(1, shape);
    for (int const threads : counts) CHECK(run(threads, shape) == theirs);
  }
}
