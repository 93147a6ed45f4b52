// SPDX-License-Identifier: Apache-2.0
// Row kernels on a device, against themselves in double precision in a loop on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/memory.hpp"
#include "tests/catch.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/unit/kernels_support.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/kernels/rope.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/kernels/swiglu.hpp"

namespace model_test {

using Doubles = std::vector<double>;

/// A device, elements A and memory for a few arrays, `skip` elements behind aligned addresses.
template <class D, class A>
class Bench {
 public:
  using Element = A;
  using Real = fsdp::Compute<A>;

  explicit Bench(D device, std::size_t skip = 0)
      : device_(std::move(device)), stream_(device_.make_stream("rows", fsdp::StreamPriority::normal)), skip_(skip) {}

  D const& device() const { return device_; }
  typename D::Stream& stream() { return stream_; }

  /// An array with these values, of elements T.
  template <class T = A>
  T* put(Doubles const& values) {
    std::vector<T> narrow;
    for (double const value : values) {
      if constexpr (std::is_integral_v<T>) {
        narrow.push_back(static_cast<T>(value));
      } else {
        narrow.push_back(fsdp::narrow<T>(value));
      }
    }
    auto const bytes = narrow.size() * sizeof(T);
    memory_.emplace_back(device_, account_, fsdp::MemoryTag::workspace, bytes + skip_ * sizeof(T));
    T* const place = memory_.back().template as<T>() + skip_;
    device_.copy_async(stream_, place, narrow.data(), bytes);
    device_.synchronize(stream_);
    return place;
  }
  template <class T = A>
  T* blank(std::int64_t n, double value = 0) {
    return put<T>(Doubles(static_cast<std::size_t>(n), value));
  }
  template <class T>
  Doubles get(T const* place, std::int64_t n) {
    std::vector<T> values(static_cast<std::size_t>(n));
    device_.copy_async(stream_, values.data(), place, values.size() * sizeof(T));
    device_.synchronize(stream_);
    Doubles wide;
    for (auto const& value : values) wide.push_back(kernel_test::as_double(value));
    return wide;
  }

 private:
  D device_;
  fsdp::MemoryAccount account_;
  typename D::Stream stream_;
  std::size_t skip_;
  std::list<fsdp::AccountedMemory<D const>> memory_;
};

/// Values that bf16 holds exactly.
inline Doubles values(std::int64_t n, unsigned seed) {
  Doubles wide;
  for (auto const& value : kernel_test::random_values<fsdp::bf16>(n, seed))
    wide.push_back(kernel_test::as_double(value));
  return wide;
}

inline void append(Doubles& all, Doubles const& more) { all.insert(all.end(), more.begin(), more.end()); }

/// y, mean and scale; then the sum of a residual and its norm.
template <class B>
std::vector<Doubles> layer_norm(B& b, std::int64_t rows, std::int64_t columns) {
  using A = typename B::Element;
  using Real = typename B::Real;
  auto const n = rows * columns;
  A const *x = b.put(values(n, 1)), *residual = b.put(values(n, 2)), *weight = b.put(values(columns, 3)),
          *bias = b.put(values(columns, 4));
  A *y = b.blank(n), *sum = b.blank(n), *of_sum = b.blank(n);
  Real *mean = b.template blank<Real>(rows), *scale = b.template blank<Real>(rows);
  transformer::layer_norm_forward(b.device(), b.stream(), x, weight, bias, y, mean, scale, rows, columns);
  std::vector<Doubles> all{b.get(y, n), b.get(mean, rows), b.get(scale, rows)};
  transformer::residual_layer_norm_forward(b.device(), b.stream(), residual, x, bias, sum, weight, bias, of_sum, mean,
                                           scale, rows, columns);
  all.push_back(b.get(sum, n));
  all.push_back(b.get(of_sum, n));
  return all;
}

/// dx with what is added to it, and both gradients of parameters; then the gradient of a bias. The gradients again,
/// fresh: what was there does not count.
template <class B>
std::vector<Doubles> layer_norm_gradient(B& b, std::int64_t rows, std::int64_t columns) {
  using A = typename B::Element;
  using Real = typename B::Real;
  auto const n = rows * columns;
  A const *dy = b.put(values(n, 5)), *x = b.put(values(n, 6)), *add = b.put(values(n, 7)),
          *weight = b.put(values(columns, 8));
  Real const *mean = b.template put<Real>(values(rows, 9)), *scale = b.template put<Real>(values(rows, 10));
  A* const dx = b.blank(n);
  Real *dw = b.template blank<Real>(columns, 0.5), *db = b.template blank<Real>(columns, 0.5),
       *bias = b.template blank<Real>(columns, 0.25);
  Real* const partials = b.template blank<Real>(
      std::max(transformer::layer_norm_partials(rows, columns), transformer::bias_partials(rows, columns)));
  transformer::layer_norm_backward(b.device(), b.stream(), dy, x, weight, mean, scale, add, dx, dw, db, rows, columns,
                                   partials);
  transformer::bias_backward(b.device(), b.stream(), dy, rows, columns, bias, partials);
  std::vector<Doubles> all{b.get(dx, n), b.get(dw, columns), b.get(db, columns), b.get(bias, columns)};
  for (auto* const gradient : {&dw, &db, &bias}) *gradient = b.template blank<Real>(columns, std::nan(""));
  transformer::layer_norm_backward(b.device(), b.stream(), dy, x, weight, mean, scale, add, dx, dw, db, rows, columns,
                                   partials, true);
  transformer::bias_backward(b.device(), b.stream(), dy, rows, columns, bias, partials, true);
  for (auto* const gradient : {dw, db, bias}) all.push_back(b.get(gradient, columns));
  return all;
}

/// Losses, and the gradient of the logits.
template <class B>
std::vector<Doubles> cross_entropy(B& b, std::int64_t rows, std::int64_t vocabulary) {
  using Real = typename B::Real;
  auto const padded = (vocabulary + 127) / 128 * 128;
  auto* const logits = b.put(values(rows * padded, 11));
  Doubles targets;
  for (std::int64_t row = 0; row < rows; ++row)
    targets.push_back(row == 1 ? -1.0 : static_cast<double>(row * 37 % vocabulary));
  auto const* const chosen = b.template put<std::int32_t>(targets);
  Real* const losses = b.template blank<Real>(rows);
  transformer::cross_entropy_forward(b.device(), b.stream(), logits, chosen, losses, rows, vocabulary, padded);
  std::vector<Doubles> all{b.get(losses, rows)};
  transformer::cross_entropy_backward(b.device(), b.stream(), logits, chosen, losses, rows, vocabulary, padded, 4.0);
  all.push_back(b.get(losses, rows));
  all.push_back(b.get(logits, rows * padded));
  return all;
}

/// Both GELUs, of sums with a bias and without, and backward, which has the value again.
template <class B>
std::vector<Doubles> gelu(B& b, std::int64_t rows, std::int64_t columns) {
  auto const n = rows * columns;
  auto const *const x = b.put(values(n, 12)), *const bias = b.put(values(columns, 14));
  std::vector<Doubles> all;
  auto const run = [&](auto formula) {
    using Formula = decltype(formula);
    auto *y = b.blank(n), *again = b.put(values(n, 12)), *dx = b.put(values(n, 13));
    auto *of_sum = b.blank(n), *sum = b.put(values(n, 15));
    transformer::gelu_forward<Formula>(b.device(), b.stream(), x, y, n);
    transformer::gelu_backward<Formula>(b.device(), b.stream(), again, dx, n);
    transformer::bias_gelu_forward<Formula>(b.device(), b.stream(), sum, bias, of_sum, rows, columns);
    for (auto* const result : {y, again, dx, sum, of_sum}) all.push_back(b.get(result, n));
  };
  run(transformer::ExactGelu{});
  run(transformer::TanhGelu{});
  return all;
}

/// y and scale, with and without a residual addition before it; the gradients of a norm that trains, added to others,
/// and of one that is frozen.
template <class B>
std::vector<Doubles> rms_norm(B& b, std::int64_t rows, std::int64_t columns) {
  using A = typename B::Element;
  using Real = typename B::Real;
  auto const n = rows * columns;
  A const *x = b.put(values(n, 1)), *residual = b.put(values(n, 2)), *weight = b.put(values(columns, 3)),
          *dy = b.put(values(n, 5)), *add = b.put(values(n, 7));
  A *y = b.blank(n), *sum = b.blank(n), *of_sum = b.blank(n), *dx = b.blank(n), *frozen = b.blank(n);
  Real *scale = b.template blank<Real>(rows), *scale_of_sum = b.template blank<Real>(rows);
  Real *partials = b.template blank<Real>(transformer::rms_norm_partials(rows, columns)),
       *dw = b.template blank<Real>(columns, 0.5), *fresh = b.template blank<Real>(columns, std::nan(""));
  auto& stream = b.stream();
  transformer::rms_norm_forward(b.device(), stream, x, weight, y, scale, rows, columns, 1e-5);
  transformer::residual_rms_norm_forward(b.device(), stream, residual, x, sum, weight, of_sum, scale_of_sum, rows,
                                         columns, 1e-5);
  transformer::rms_norm_backward(b.device(), stream, dy, x, weight, scale, add, dx, dw, rows, columns, partials);
  transformer::rms_norm_backward(b.device(), stream, dy, x, weight, scale, static_cast<A const*>(nullptr), dx, fresh,
                                 rows, columns, partials, true);
  std::vector<Doubles> all;
  for (auto const* const result : {y, sum, of_sum, dx}) all.push_back(b.get(result, n));
  transformer::rms_norm_backward(b.device(), stream, dy, x, weight, scale, add, dx, dw, rows, columns, partials);
  transformer::rms_norm_backward(b.device(), stream, dy, x, weight, scale, add, frozen, static_cast<Real*>(nullptr),
                                 rows, columns, static_cast<Real*>(nullptr));
  for (auto const* const result : {dx, frozen}) all.push_back(b.get(result, n));
  for (auto const* const result : {dw, fresh}) all.push_back(b.get(result, columns));
  for (auto const* const result : {scale, scale_of_sum}) all.push_back(b.get(result, rows));
  return all;
}

/// Inputs of attention with grouped heads in the middle of a cache, and the gradient of the projections.
template <class B>
std::vector<Doubles> rope(B& b, transformer::GroupedHeads const& heads, transformer::Pass pass) {
  auto const packed_rows = pass.batch * pass.capacity, width = 3 * heads.width();
  auto const* const projected = b.put(values(pass.rows() * heads.projected(), 16));
  auto const table = transformer::rope_table({}, 10000.0, heads.size, pass.position + pass.length);
  auto const* const angles = b.template put<float>(Doubles(table.begin(), table.end()));
  auto* const packed = b.blank(packed_rows * width, 0.25);
  transformer::rope_forward(b.device(), b.stream(), heads, pass, projected, angles, packed);
  std::vector<Doubles> all{b.get(packed, packed_rows * width)};
  pass.position = 0;
  pass.capacity = pass.length;
  auto const* const up = b.put(values(pass.rows() * width, 17));
  auto* const gradient = b.blank(pass.rows() * heads.projected());
  transformer::rope_backward(b.device(), b.stream(), heads, pass, up, angles, gradient);
  all.push_back(b.get(gradient, pass.rows() * heads.projected()));
  return all;
}

/// The result, its gradient, and the result again.
template <class B>
std::vector<Doubles> swiglu(B& b, std::int64_t rows, std::int64_t columns) {
  auto const n = rows * columns;
  auto *both = b.put(values(2 * n, 18)), *gradient = b.put(values(n, 19)), *y = b.blank(n);
  transformer::swiglu_forward(b.device(), b.stream(), both, y, rows, columns);
  transformer::swiglu_backward(b.device(), b.stream(), both, gradient, rows, columns);
  return {b.get(y, n), b.get(both, 2 * n), b.get(gradient, n)};
}

/// The gradients of both embeddings.
template <class B>
std::vector<Doubles> embedding_gradient(B& b, std::int64_t rows, std::int64_t columns) {
  using Real = typename B::Real;
  auto const n = rows * columns;
  auto const* const up = b.put(values(n, 13));
  Doubles tokens;
  for (std::int64_t row = 0; row < rows; ++row) tokens.push_back(static_cast<double>(row * 7 % 11));
  auto const* const ids = b.template put<std::int32_t>(tokens);
  Real *token = b.template blank<Real>(11 * columns), *position = b.template blank<Real>(rows * columns);
  transformer::embedding_backward(b.device(), b.stream(), ids, up, token, position, 1, rows, columns);
  return {b.get(token, 11 * columns), b.get(position, rows * columns)};
}

/// Largest difference of each array, by its largest value.
inline void compare(std::vector<Doubles> const& got, std::vector<Doubles> const& want, double bound) {
  REQUIRE(got.size() == want.size());
  for (std::size_t array = 0; array < got.size(); ++array) {
    CAPTURE(array);
    REQUIRE(got[array].size() == want[array].size());
    double difference = 0, largest = 0;
    for (std::size_t i = 0; i < got[array].size(); ++i) {
      double const apart = std::abs(got[array][i] - want[array][i]);
      difference = apart <= difference ? difference : apart;  // NaN gets through
      largest = std::max(largest, std::abs(want[array][i]));
    }
    CHECK(difference <= bound * largest);
  }
}

/// Sizes with more rows * columns are left out.
#if defined(FSDP_CUDA_STANDIN)
constexpr std::int64_t most_elements = 20000;  // model_row_kernels.cpp has the others
#else
constexpr std::int64_t most_elements = fsdp::testing::sanitized ? 5000 : INT64_MAX;
#endif

/// All kernels of a device with elements A, aligned and unaligned; twice, for the same bits (under a sanitizer once).
template <class A, class D>
void check_row_kernels(D const& device) {
  double const bound = sizeof(A) == 2 ? 0.01 : 2e-5;  // a few roundings of 2^-9; of 2^-24 in sums of 1000s
  auto const check = [&](auto const& kernels, std::int64_t rows, std::int64_t columns) {
    CAPTURE(rows, columns);
    Bench<kernel_test::LoopDevice, double> exact(kernel_test::LoopDevice{});
    auto const want = kernels(exact);
    for (std::size_t const skip : {0u, 1u}) {
      CAPTURE(skip);
      Bench<D, A> once(device, skip);
      auto const got = kernels(once);
      compare(got, want, bound);
      if (fsdp::testing::sanitized) continue;
      Bench<D, A> again(device, skip);
      CHECK(kernels(again) == got);
    }
  };
  using Size = std::pair<std::int64_t, std::int64_t>;
  for (auto const& size : {Size{1, 64}, {37, 65}, {37, 128}, {9, 520}, {1, 4104}, {37, 520}, {70, 768}, {33, 1600},
                           {5, 4104}, {3, 9000}}) {
    std::int64_t const rows = size.first, columns = size.second;  // clang 14 captures no structured binding
    if (rows * columns > most_elements) continue;
    check([&](auto& b) { return layer_norm(b, rows, columns); }, rows, columns);
    check([&](auto& b) { return layer_norm_gradient(b, rows, columns); }, rows, columns);
    check([&](auto& b) { return gelu(b, rows, columns); }, rows, columns);
    check([&](auto& b) { return embedding_gradient(b, rows, columns); }, rows, columns);
    check([&](auto& b) { return rms_norm(b, rows, columns); }, rows, columns);
    check([&](auto& b) { return swiglu(b, rows, columns); }, rows, columns);
  }
  for (auto const& heads : {transformer::GroupedHeads{1, 1, 2}, {6, 2, 10}, {9, 3, 64}, {8, 1, 16}, {4, 4, 128}}) {
    for (transformer::Pass const& pass : {transformer::Pass{.batch = 2, .length = 37, .position = 5, .capacity = 50},
                                          {.batch = 1, .length = 1, .position = 7, .capacity = 8}})
      check([&](auto& b) { return rope(b, heads, pass); }, heads.projected(), pass.rows());
  }
  for (std::int64_t const vocabulary : {65, 1000, 50257})
    if (!fsdp::testing::sanitized || vocabulary < 25000)
      check([&](auto& b) { return cross_entropy(b, 5, vocabulary); }, 5, vocabulary);
}

}  // namespace model_test
