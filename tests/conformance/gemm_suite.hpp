// SPDX-License-Identifier: Apache-2.0
// The contract of matrix products on every device: exact sums, errors of the type that they are made in, and the same
// bits again.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/conformance/values.hpp"
#include "transformer/math/gemm.hpp"

namespace fsdp::conformance {

using transformer::Op;

struct GemmShape {
  std::int64_t m, n, k, batch;
};

/// One product, or a batch, with its operands on device D and on the host.
template <class D, class T, class Out>
class GemmCase {
 public:
  using Scalar = transformer::GemmScalar<Out>;
  static constexpr bool adds_bias = [] {
    if constexpr (transformer::Gemm<D>::adds_bias) return transformer::Gemm<D>::template can_add_bias<T, Out>;
    return false;
  }();

  /// @param gaps  elements between rows and matrices, so that nothing is aligned
  /// @param draw  draw(i, salt): element i of the operand `salt`
  template <class Draw>
  GemmCase(D const& device, GemmShape shape, Op op_a, Op op_b, bool gaps, Draw const& draw)
      : device_(device), stream_(device.make_stream("gemm")), gemm_(device), shape_(shape), op_a_(op_a), op_b_(op_b) {
    auto const [m, n, k, batch] = shape;
    std::int64_t const rows_a = op_a == Op::none ? m : k, rows_b = op_b == Op::none ? k : n;
    lda_ = (op_a == Op::none ? k : m) + (gaps ? 3 : 0);
    ldb_ = (op_b == Op::none ? n : k) + (gaps ? 1 : 0);
    ldc_ = n + (gaps ? 2 : 0);
    stride_a_ = rows_a * lda_ + (gaps ? 5 : 0);
    stride_b_ = rows_b * ldb_ + (gaps ? 7 : 0);
    stride_c_ = m * ldc_ + (gaps ? 4 : 0);
    fill(a_, stride_a_ * batch, 1, draw);
    fill(b_, stride_b_ * batch, 2, draw);
    fill(c_, stride_c_ * batch, 3, draw);
    fill(bias_, n, 4, draw);
  }

  /// The result by definition, summed in Real one product after another; elements between rows and matrices stay.
  template <class Real = double>
  std::vector<double> expected(double beta, bool bias = false) const {
    auto const doubles = [](auto const& values) {
      std::vector<double> list(values.size());
      std::transform(values.begin(), values.end(), list.begin(), [](auto value) { return to_double(value); });
      return list;
    };
    auto const a = doubles(a_), b = doubles(b_);
    auto result = doubles(c_);
    auto const [m, n, k, batch] = shape_;
    bool const plain_a = op_a_ == Op::none, plain_b = op_b_ == Op::none;
    auto const row_of_a = plain_a ? lda_ : 1, term_of_a = plain_a ? 1 : lda_;
    auto const column_of_b = plain_b ? 1 : ldb_, term_of_b = plain_b ? ldb_ : 1;
    for (std::int64_t i = 0; i < batch; ++i) {
      for (std::int64_t row = 0; row < m; ++row) {
        for (std::int64_t column = 0; column < n; ++column) {
          Real sum = bias ? static_cast<Real>(to_double(bias_[static_cast<std::size_t>(column)])) : Real{0};
          double const* const left = a.data() + i * stride_a_ + row * row_of_a;
          double const* const right = b.data() + i * stride_b_ + column * column_of_b;
          for (std::int64_t p = 0; p < k; ++p)
            sum += static_cast<Real>(left[p * term_of_a]) * static_cast<Real>(right[p * term_of_b]);
          auto& value = result[static_cast<std::size_t>(i * stride_c_ + row * ldc_ + column)];
          value = static_cast<double>(sum + static_cast<Real>(beta * value));
        }
      }
    }
    return result;
  }

  /// The result that the device gives. @param bias  needs adds_bias, a batch of one and beta = 0
  std::vector<Out> run(double beta, bool bias = false) {
    auto const [m, n, k, batch] = shape_;
    Buffer<T, D const> a(device_, a_.size()), b(device_, b_.size());
    Buffer<Out, D const> c(device_, c_.size()), row(device_, bias_.size());
    upload(device_, stream_, a.data(), a_);
    upload(device_, stream_, b.data(), b_);
    upload(device_, stream_, c.data(), c_);
    upload(device_, stream_, row.data(), bias_);
    auto const* const pa = static_cast<T const*>(a.data());
    auto const* const pb = static_cast<T const*>(b.data());
    if constexpr (adds_bias) {
      if (bias)
        gemm_.run_with_bias(stream_, op_a_, op_b_, m, n, k, Scalar{1}, pa, lda_, pb, ldb_,
                            static_cast<Out const*>(row.data()), c.data(), ldc_);
    }
    if (!bias && batch == 1)
      gemm_.run(stream_, op_a_, op_b_, m, n, k, Scalar{1}, pa, lda_, pb, ldb_, static_cast<Scalar>(beta), c.data(),
                ldc_);
    if (!bias && batch > 1)
      gemm_.batched(stream_, op_a_, op_b_, m, n, k, Scalar{1}, pa, lda_, stride_a_, pb, ldb_, stride_b_,
                    static_cast<Scalar>(beta), c.data(), ldc_, stride_c_, batch);
    return download(device_, stream_, c.data(), c_.size());
  }

  std::string text(double beta) const {
    return fmt::format("{} to {}, {}x{}x{} by {}, ops {} {}, beta {}", name(dtype_of<T>), name(dtype_of<Out>), shape_.m,
                       shape_.n, shape_.k, shape_.batch, static_cast<int>(op_a_), static_cast<int>(op_b_), beta);
  }
  transformer::Gemm<D>& gemm() { return gemm_; }

 private:
  template <class E, class Draw>
  static void fill(std::vector<E>& values, std::int64_t count, std::uint64_t salt, Draw const& draw) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) values.push_back(from_double<E>(draw(i, salt)));
  }

  D device_;
  typename D::Stream stream_;
  transformer::Gemm<D> gemm_;
  GemmShape shape_;
  Op op_a_, op_b_;
  std::int64_t lda_ = 0, ldb_ = 0, ldc_ = 0, stride_a_ = 0, stride_b_ = 0, stride_c_ = 0;
  std::vector<T> a_, b_;
  std::vector<Out> c_, bias_;
};

/// Calls body(op_a, op_b) for all four.
template <class Body>
void each_op(Body const& body) {
  for (auto const op_a : {Op::none, Op::transpose})
    for (auto const op_b : {Op::none, Op::transpose}) body(op_a, op_b);
}

/// Values whose sums are exact in every type, in matrices with gaps: every element is compared, between rows too.
/// @param more  shapes that a model takes other ways for
template <class T, class Out, class D>
void check_exact_products(D const& device, std::vector<GemmShape> const& more = {}) {
  // -1, 0 or 1: sums of up to 128 products, and twice one, are exact in bf16.
  auto const draw = [](std::size_t i, std::uint64_t salt) { return static_cast<double>(hash(0, i, salt) % 3) - 1.0; };
  std::vector<GemmShape> shapes{{1, 1, 1, 1}, {3, 5, 7, 1}, {1, 65, 33, 1}, {128, 96, 120, 1}, {17, 9, 31, 6}};
  shapes.insert(shapes.end(), more.begin(), more.end());
  for (auto const shape : shapes) {
    each_op([&](Op op_a, Op op_b) {
      if (!fsdp::testing::next_cell(7)) return;
      GemmCase<D, T, Out> product(device, shape, op_a, op_b, true, draw);
      auto const compare = [&](double beta, bool bias) {
        std::vector<Out> rounded;  // + 0: a zero's sign depends on the order of the products
        for (auto const value : product.expected(beta, bias)) rounded.push_back(from_double<Out>(value + 0.0));
        auto got = product.run(beta, bias);
        for (auto& value : got) value = from_double<Out>(to_double(value) + 0.0);
        expect_equal(got, rounded, product.text(beta) + (bias ? ", bias" : ""));
      };
      for (double const beta : {0.0, 1.0, 2.0}) compare(beta, false);
      if (product.adds_bias && shape.batch == 1 && shape.k > 1) compare(0.0, true);
    });
  }
}

/// Root of the mean square of what results differ by, by that of the expected ones.
template <class Values>
double product_error(Values const& got, std::vector<double> const& expected) {
  double squares = 0, reference = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    squares += std::pow(to_double(got[i]) - expected[i], 2);
    reference += std::pow(expected[i], 2);
  }
  return std::sqrt(squares / reference);
}

/// Operands of a model: uniform in [-1/2, 1/2].
inline double draw_uniform(std::size_t i, std::uint64_t salt) {
  return static_cast<double>(hash(0, i, salt) >> 11) * 0x1p-53 - 0.5;
}

/// Products of T that are summed in fp32 err at most 1.5 times as much as a plain loop in fp32.
template <class T, class Out, class D>
void check_errors_beside_plain(D const& device, std::vector<GemmShape> const& shapes) {
  for (auto const shape : shapes) {
    each_op([&](Op op_a, Op op_b) {
      GemmCase<D, T, Out> product(device, shape, op_a, op_b, false, draw_uniform);
      for (double const beta : {0.0, 1.0}) {
        auto const expected = product.expected(beta);
        std::vector<Out> plain;
        for (auto const value : product.template expected<float>(beta)) plain.push_back(from_double<Out>(value));
        double const error = product_error(product.run(beta), expected), of_plain = product_error(plain, expected);
        expect(error <= 1.5 * of_plain, "{}: error {:.3g} of the result, a plain loop's is {:.3g}", product.text(beta),
               error, of_plain);
      }
    });
  }
}

/// The error of a model's products against fp64, and that they repeat bit by bit.
///
/// Operands are uniform in [-1/2, 1/2], so a sum of k products has the deviation sqrt(k) / 12. Sums in fp32, each
/// addition off by at most half a unit, have an error of about 0.4 sqrt(k) 2^-24 of that; four times as much is
/// allowed, and k / 4 for tensor cores, which cut off instead of rounding. With TF32 it were 3e-4, with sums in bf16
/// over 2^-9. A result rounded to bf16 (fp16) is off by at most 2^-9 (2^-12) of itself.
template <class T, class Out, class D>
void check_product_errors(D const& device, std::vector<GemmShape> const& shapes) {
  for (auto const shape : shapes) {
    each_op([&](Op op_a, Op op_b) {
      GemmCase<D, T, Out> product(device, shape, op_a, op_b, false, draw_uniform);
      double const k = static_cast<double>(shape.k);
      double const sums = sizeof(T) == 8 ? k * 0x1p-53 : 0x1p-24 * (1.6 * std::sqrt(k) + (sizeof(T) == 2 ? k / 4 : 0));
      double const rounding = std::is_same_v<Out, bf16> ? 0x1p-9 : std::is_same_v<Out, fp16> ? 0x1p-12 : 0x1p-24;
      for (double const beta : {0.0, 1.0}) {
        auto const expected = product.expected(beta);
        auto const got = product.run(beta);
        double const error = product_error(got, expected);
        expect(error <= sums + rounding, "{}: error {:.3g} of the result, at most {:.3g} expected", product.text(beta),
               error, sums + rounding);
        expect_equal(product.run(beta), got, product.text(beta) + ", again");
      }
    });
  }
}

}  // namespace fsdp::conformance
