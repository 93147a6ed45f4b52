// SPDX-License-Identifier: Apache-2.0
// The products themselves: operands are widened into panels, summed in fp32 (doubles in fp64), and rounded once.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/tensor.hpp"
#include "problem.hpp"

namespace standin::cublas {

namespace {

/// Results that are summed at once, in registers: rows are the vectors' direction.
constexpr std::int64_t tile_rows = 16, tile_columns = 4;

constexpr std::int64_t tiles(std::int64_t extent, std::int64_t tile) { return (extent + tile - 1) / tile; }

/// An operand, element by element: (row, column) of op(matrix).
template <class T>
struct Operand {
  T const* data;
  std::int64_t down, right;  // distances, in elements
  auto at(std::int64_t row, std::int64_t column) const { return fsdp::widen(data[row * down + column * right]); }
};
template <class T>
Operand<T> operand(void const* data, Layout const& layout, std::int32_t transpose, std::int64_t batch) {
  auto const* const first = static_cast<T const*>(data) + batch * layout.stride;
  return transpose == CUBLAS_OP_N ? Operand<T>{first, 1, layout.leading} : Operand<T>{first, layout.leading, 1};
}

/// Sums of one tile over `depth` elements of k. @param left  (depth, tile_rows) @param right  (depth, tile_columns)
template <class Sum>
void multiply_tile(std::int64_t depth, Sum const* left, Sum const* right, Sum (&sums)[tile_columns][tile_rows]) {
  for (auto& column : sums)
    for (auto& sum : column) sum = 0;
  for (std::int64_t p = 0; p < depth; ++p) {
    for (std::int64_t j = 0; j < tile_columns; ++j) {
      Sum const factor = right[p * tile_columns + j];
      for (std::int64_t i = 0; i < tile_rows; ++i) sums[j][i] += left[p * tile_rows + i] * factor;
    }
  }
}

/// sums (m, n by columns) = a b over k from `begin` to `end`.
template <class T, class Sum>
void multiply(std::int64_t m, std::int64_t n, std::int64_t begin, std::int64_t end, Operand<T> a, Operand<T> b,
              Sum* sums) {
  std::int64_t const depth = end - begin;
  auto const floats = [&](std::int64_t count) { return std::vector<Sum>(static_cast<std::size_t>(count * depth)); };
  auto left = floats(tile_rows), right = floats(tiles(n, tile_columns) * tile_columns);  // zeros beyond the matrix
  for (std::int64_t j = 0; j < n; ++j) {
    Sum* const panel = right.data() + j / tile_columns * tile_columns * depth + j % tile_columns;
    for (std::int64_t p = 0; p < depth; ++p) panel[p * tile_columns] = b.at(begin + p, j);
  }
  for (std::int64_t row = 0; row < m; row += tile_rows) {
    std::int64_t const height = std::min(tile_rows, m - row);
    for (std::int64_t i = 0; i < height; ++i)
      for (std::int64_t p = 0; p < depth; ++p)
        left[static_cast<std::size_t>(p * tile_rows + i)] = a.at(row + i, begin + p);
    for (std::int64_t column = 0; column < n; column += tile_columns) {
      Sum tile[tile_columns][tile_rows];
      multiply_tile(depth, left.data(), right.data() + column * depth, tile);
      for (std::int64_t j = 0; j < std::min(tile_columns, n - column); ++j)
        std::copy_n(&tile[j][0], height, sums + (column + j) * m + row);
    }
  }
}

/// D of one matrix of the batch, from the sums: the only place where results are rounded.
template <class Out, class Sum>
void finish(Problem const& problem, std::int64_t batch, Sum const* sums) {
  auto const alpha = static_cast<Sum>(problem.alpha), beta = static_cast<Sum>(problem.beta);
  auto const& op = problem.operation;
  auto const* const bias = op.adds_bias() ? static_cast<Out const*>(op.bias) + batch * op.bias_stride : nullptr;
  for (std::int64_t j = 0; j < problem.n(); ++j) {
    auto* const to = static_cast<Out*>(problem.data_d) + batch * problem.d.stride + j * problem.d.leading;
    for (std::int64_t i = 0; i < problem.m(); ++i) {
      Sum value = alpha * sums[j * problem.m() + i];
      if (beta != 0) {  // else C is not read: it may be NaN
        auto const* const c = static_cast<Out const*>(problem.data_c) + batch * problem.c.stride;
        value += beta * static_cast<Sum>(fsdp::widen(c[j * problem.c.leading + i]));
      }
      if (bias != nullptr) value += static_cast<Sum>(fsdp::widen(bias[i]));
      to[i] = fsdp::narrow<Out>(value);
    }
  }
}

/// A sum after rounding to the result's type.
template <class Out, class Sum>
Sum rounded(Sum value) {
  return static_cast<Sum>(fsdp::widen(fsdp::narrow<Out>(value)));
}

template <class T, class Out>
void run(Problem const& problem, Algorithm const& algorithm, void* workspace) {
  using Sum = fsdp::Compute<T>;
  auto const m = problem.m(), n = problem.n(), k = problem.k(), splits = std::int64_t{algorithm.splits};
  auto const results = static_cast<std::size_t>(m * n);
  std::vector<Sum> total(results), part;
  for (std::int64_t batch = 0; batch < problem.d.batch; ++batch) {
    auto const a = operand<T>(problem.data_a, problem.a, problem.operation.transpose_a, batch);
    auto const b = operand<T>(problem.data_b, problem.b, problem.operation.transpose_b, batch);
    if (splits == 1) multiply(m, n, 0, k, a, b, total.data());
    if (algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) {
      auto* const parts = static_cast<Sum*>(workspace);
      for (std::int64_t s = 0; s < splits; ++s)
        multiply(m, n, k * s / splits, k * (s + 1) / splits, a, b, parts + s * m * n);
      std::copy_n(parts, results, total.begin());
      for (std::int64_t i = m * n; i < splits * m * n; ++i) total[static_cast<std::size_t>(i % (m * n))] += parts[i];
    } else if (splits > 1) {  // parts in the result's type: in place they are added up in it too
      bool const in_place = algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE;
      part.resize(results);
      std::fill(total.begin(), total.end(), Sum(0));
      for (std::int64_t s = 0; s < splits; ++s) {
        multiply(m, n, k * s / splits, k * (s + 1) / splits, a, b, part.data());
        for (std::size_t i = 0; i < results; ++i) {
          Sum const sum = total[i] + rounded<Out>(part[i]);
          total[i] = in_place ? rounded<Out>(sum) : sum;
        }
      }
    }
    finish<Out>(problem, batch, total.data());
  }
  // Whoever else has put something into the workspace loses it.
  if (algorithm.workspace_bytes > 0) std::memset(workspace, 0xff, algorithm.workspace_bytes);
}

template <class T>
void run_narrow(Problem const& problem, Algorithm const& algorithm, void* workspace) {
  if (problem.d.type == CUDA_R_32F) return run<T, float>(problem, algorithm, workspace);
  run<T, T>(problem, algorithm, workspace);
}

}  // namespace

void compute(Problem const& problem, Algorithm const& algorithm, void* workspace) {
  switch (problem.a.type) {
    case CUDA_R_64F: return run<double, double>(problem, algorithm, workspace);
    case CUDA_R_32F: return run<float, float>(problem, algorithm, workspace);
    case CUDA_R_16BF: return run_narrow<fsdp::bf16>(problem, algorithm, workspace);
    default: return run_narrow<fsdp::fp16>(problem, algorithm, workspace);
  }
}

}  // namespace standin::cublas
