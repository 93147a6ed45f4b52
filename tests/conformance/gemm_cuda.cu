// SPDX-License-Identifier: Apache-2.0
// nanogpt's matrix products on CUDA against plain loops, with values whose sums are exact in every type.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "examples/nanogpt/gemm_cuda.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/conformance/values.hpp"

namespace {

using fsdp::bf16;
using fsdp::fp16;
using fsdp::conformance::Buffer;
using fsdp::conformance::download;
using fsdp::conformance::from_double;
using fsdp::conformance::hash;
using fsdp::conformance::to_double;
using fsdp::conformance::upload;
using fsdp::cuda::Device;
using nanogpt::Op;
using Gemm = nanogpt::Gemm<Device>;

bool const ready = fsdp::testing::need_gpu();

struct Shape {
  std::int64_t m, n, k, batch;
};

/// -1, 0 or 1: sums of up to 128 products are exact in bf16.
template <class T>
std::vector<T> draw(std::size_t count, std::uint64_t salt) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = from_double<T>(static_cast<double>(hash(0, i, salt) % 3) - 1.0);
  return values;
}

/// As numbers: a zero's sign depends on the order of the products.
template <class T>
std::vector<double> plain(std::vector<T> const& values) {
  std::vector<double> result;
  for (auto const value : values) result.push_back(to_double(value) + 0.0);
  return result;
}

template <class T, class Out>
void check(Device const& device, Shape shape, Op op_a, Op op_b, double beta) {
  auto const [m, n, k, batch] = shape;
  std::int64_t const rows_a = op_a == Op::none ? m : k, lda = (op_a == Op::none ? k : m) + 3;
  std::int64_t const rows_b = op_b == Op::none ? k : n, ldb = (op_b == Op::none ? n : k) + 1;
  std::int64_t const ldc = n + 2;
  std::int64_t const stride_a = rows_a * lda + 5, stride_b = rows_b * ldb + 7, stride_c = m * ldc + 4;
  auto const a = draw<T>(static_cast<std::size_t>(stride_a * batch), 1);
  auto const b = draw<T>(static_cast<std::size_t>(stride_b * batch), 2);
  auto const c = draw<Out>(static_cast<std::size_t>(stride_c * batch), 3);
  auto expected = c;
  for (std::int64_t i = 0; i < batch; ++i) {
    for (std::int64_t row = 0; row < m; ++row) {
      for (std::int64_t column = 0; column < n; ++column) {
        double sum = 0;
        for (std::int64_t p = 0; p < k; ++p) {
          auto const at_a = i * stride_a + (op_a == Op::none ? row * lda + p : p * lda + row);
          auto const at_b = i * stride_b + (op_b == Op::none ? p * ldb + column : column * ldb + p);
          sum += to_double(a[static_cast<std::size_t>(at_a)]) * to_double(b[static_cast<std::size_t>(at_b)]);
        }
        auto& result = expected[static_cast<std::size_t>(i * stride_c + row * ldc + column)];
        result = from_double<Out>(sum + beta * to_double(result));
      }
    }
  }
  auto stream = device.make_stream("gemm");
  Gemm gemm(device);
  Buffer<T, Device const> on_a(device, a.size()), on_b(device, b.size());
  Buffer<Out, Device const> on_c(device, c.size());
  upload(device, stream, on_a.data(), a);
  upload(device, stream, on_b.data(), b);
  upload(device, stream, on_c.data(), c);
  using Scalar = nanogpt::GemmScalar<Out>;
  auto const* const pa = static_cast<T const*>(on_a.data());
  auto const* const pb = static_cast<T const*>(on_b.data());
  if (batch == 1) {
    gemm.run(stream, op_a, op_b, m, n, k, Scalar{1}, pa, lda, pb, ldb, static_cast<Scalar>(beta), on_c.data(), ldc);
  } else {
    gemm.batched(stream, op_a, op_b, m, n, k, Scalar{1}, pa, lda, stride_a, pb, ldb, stride_b,
                 static_cast<Scalar>(beta), on_c.data(), ldc, stride_c, batch);
  }
  auto const what = fmt::format("{} to {}, {}x{}x{} by {}, ops {} {}, beta {}", fsdp::name(fsdp::dtype_of<T>),
                                fsdp::name(fsdp::dtype_of<Out>), m, n, k, batch, static_cast<int>(op_a),
                                static_cast<int>(op_b), beta);
  // Elements between rows and matrices must be untouched: everything is compared.
  fsdp::conformance::expect_equal(plain(download(device, stream, on_c.data(), c.size())), plain(expected), what);
}

template <class T, class Out>
void check_all() {
  Device const device;
  for (auto const shape :
       {Shape{1, 1, 1, 1}, Shape{3, 5, 7, 1}, Shape{1, 65, 33, 1}, Shape{128, 96, 128, 1}, Shape{17, 9, 31, 6}}) {
    for (auto const op_a : {Op::none, Op::transpose}) {
      for (auto const op_b : {Op::none, Op::transpose}) {
        for (double const beta : {0.0, 1.0, 2.0}) check<T, Out>(device, shape, op_a, op_b, beta);
      }
    }
  }
}

}  // namespace

TEST_CASE("gemm: fp32", "[gemm]") { check_all<float, float>(); }
TEST_CASE("gemm: fp64", "[gemm]") { check_all<double, double>(); }
TEST_CASE("gemm: bf16 to fp32", "[gemm]") { check_all<bf16, float>(); }
TEST_CASE("gemm: bf16 to bf16", "[gemm]") { check_all<bf16, bf16>(); }
TEST_CASE("gemm: fp16 to fp32", "[gemm]") { check_all<fp16, float>(); }
TEST_CASE("gemm: fp16 to fp16", "[gemm]") { check_all<fp16, fp16>(); }

TEST_CASE("gemm: fp32 keeps all bits of its operands (no TF32)", "[gemm]") {
  Device const device;
  auto stream = device.make_stream("gemm");
  Gemm gemm(device);
  constexpr std::size_t size = 64;
  std::vector<float> diagonal(size * size, 0.0f), unit(size * size, 0.0f);
  for (std::size_t i = 0; i < size; ++i) {
    diagonal[i * size + i] = 1.0f + 0x1p-20f;
    unit[i * size + i] = 1.0f;
  }
  Buffer<float, Device const> a(device, size * size), b(device, size * size), c(device, size * size);
  upload(device, stream, a.data(), diagonal);
  upload(device, stream, b.data(), unit);
  auto const n = static_cast<std::int64_t>(size);
  gemm.run(stream, Op::none, Op::none, n, n, n, 1.0f, static_cast<float const*>(a.data()), n,
           static_cast<float const*>(b.data()), n, 0.0f, c.data(), n);
  fsdp::conformance::expect_equal(download(device, stream, c.data(), size * size), diagonal, "a diagonal matrix");
}

TEST_CASE("gemm: a second stream is refused", "[gemm]") {
  Device const device;
  auto first = device.make_stream("first");
  auto second = device.make_stream("second");
  Gemm gemm(device);
  Buffer<float, Device const> data(device, 12);
  auto const* const in = static_cast<float const*>(data.data());
  device.zero_async(first, data.data(), 12 * sizeof(float));
  gemm.run(first, Op::none, Op::none, 2, 2, 2, 1.0f, in, 2, in + 4, 2, 0.0f, data.data() + 8, 2);
  CHECK_THROWS_AS(gemm.run(second, Op::none, Op::none, 2, 2, 2, 1.0f, in, 2, in + 4, 2, 0.0f, data.data() + 8, 2),
                  fsdp::UsageError);
  device.synchronize(first);
}
