// SPDX-License-Identifier: Apache-2.0
// Sums of columns: gradients of biases and of weights that all rows share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transformer/kernels/common.hpp"
#include "transformer/kernels/packs.hpp"

namespace transformer {

namespace detail {

/// [Note: Column sums]
/// Gradients of weights and biases sum over rows. A first kernel leaves one partial row for each chunk of rows, a
/// second adds the partial rows of a strip of columns, in order. Chunks have the same size on every device, nothing is
/// atomic.
inline constexpr std::int64_t rows_per_chunk = 32;
inline constexpr std::int64_t columns_per_strip = 256;

constexpr std::int64_t row_chunks(std::int64_t rows) { return (rows + rows_per_chunk - 1) / rows_per_chunk; }

struct AddTo {
  template <class T>
  FSDP_HD void operator()(T& sum, T const& value) const {
    sum += value;
  }
  template <class T>
  FSDP_HD void operator()(T& sum, T const& a, T const& b, T const& c, T const& d) const {
    sum += (a + b) + (c + d);
  }
};

/// gradient (columns) += sum of the partial rows (chunks, stride), in place: the first partial row becomes the sum. A
/// fresh gradient is stored. For one lane: with narrower gradients the threads of a block would need a barrier.
struct AddPartials {
  template <class Block, class T, class G>
  FSDP_HD void operator()(Block const& block, std::int64_t strip, T* partials, std::int64_t chunks, std::int64_t stride,
                          std::int64_t columns, G* gradient, bool fresh) const {
    std::int64_t const begin = strip * columns_per_strip;
    std::int64_t const width = columns - begin < columns_per_strip ? columns - begin : columns_per_strip;
    T* const sum = partials + begin;
    std::int64_t chunk = 1;
    for (; chunk + 4 <= chunks; chunk += 4) {
      T const* const row = sum + chunk * stride;
      block.update(width, AddTo{}, sum, row, row + stride, row + 2 * stride, row + 3 * stride);
    }
    for (; chunk < chunks; ++chunk) block.update(width, AddTo{}, sum, static_cast<T const*>(sum + chunk * stride));
    if (fresh) {
      block.each(
          width, gradient + begin, [](T value) { return static_cast<Compute<G>>(value); }, static_cast<T const*>(sum));
    } else {
      block.update(
          width, [](Compute<G>& g, T value) { g += static_cast<Compute<G>>(value); }, gradient + begin,
          static_cast<T const*>(sum));
    }
  }
};

/// Partial sum (columns) of one chunk of rows.
struct BiasBackward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t chunk, A const* dy, std::int64_t rows, std::int64_t columns,
                          Compute<A>* partials) const {
    using T = Compute<A>;
    T* const sum = partials + chunk * columns;
    std::int64_t const begin = chunk * rows_per_chunk;
    std::int64_t const end = rows < begin + rows_per_chunk ? rows : begin + rows_per_chunk;
    block.each(
        columns, sum, [](T g) { return g; }, dy + begin * columns);
    std::int64_t row = begin + 1;
    for (; row + 4 <= end; row += 4) {
      A const* const g = dy + row * columns;
      block.update(columns, AddTo{}, sum, g, g + columns, g + 2 * columns, g + 3 * columns);
    }
    for (; row < end; ++row) block.update(columns, AddTo{}, sum, dy + row * columns);
  }
};

}  // namespace detail

namespace blocks {

/// Partial sums (chunks, columns) of the columns of dy (rows, columns), over chunks of rows.
/// @tparam Count  columns of a thread: the elements of a pack, or 1
template <int Count>
struct ColumnSums {
  static constexpr int threads = 128;

  static std::int64_t strips(std::int64_t columns) { return (columns + threads * Count - 1) / (threads * Count); }

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* dy, std::int64_t rows, std::int64_t columns,
                          std::int64_t strips, Compute<A>* partials) const {
    using T = Compute<A>;
    using Some = fsdp::cuda::detail::Pack<A, Count>;
    std::int64_t const chunk = index / strips;
    std::int64_t const column = (index % strips * threads + block.thread()) * Count;
    if (column >= columns) return;
    std::int64_t const begin = chunk * detail::rows_per_chunk;
    std::int64_t const end = rows < begin + detail::rows_per_chunk ? rows : begin + detail::rows_per_chunk;
    T sum[extent(Count)] = {};
    FSDP_UNROLL_BY_4
    for (std::int64_t row = begin; row < end; ++row) {
      auto const pack = *reinterpret_cast<Some const*>(dy + row * columns + column);
      FSDP_UNROLL
      for (int k = 0; k < Count; ++k) sum[k] += fsdp::widen(pack.element[k]);
    }
    FSDP_UNROLL
    for (int k = 0; k < Count; ++k) partials[chunk * columns + column + k] = sum[k];
  }
};

/// gradient (columns) += sum of the partial rows (chunks, stride), or = if it is fresh. A block has 32 columns; its
/// warps share the chunks.
struct AddPartialRows {
  static constexpr int threads = 256;
  static constexpr int warps = threads / 32;
  static constexpr std::int64_t columns_per_block = 32;
  static constexpr std::size_t shared_bytes = threads * sizeof(double);

  template <class Block, class T, class G>
  FSDP_HD void operator()(Block const& block, std::int64_t strip, T const* partials, std::int64_t chunks,
                          std::int64_t stride, std::int64_t columns, G* gradient, bool fresh) const {
    int const lane = block.thread() % 32, warp = block.thread() / 32;
    std::int64_t const column = strip * columns_per_block + lane;
    auto* const sums = reinterpret_cast<T*>(block.shared());
    T sum = 0;
    if (column < columns) {
      FSDP_UNROLL_BY_4
      for (std::int64_t chunk = warp; chunk < chunks; chunk += warps) sum += partials[chunk * stride + column];
    }
    sums[block.thread()] = sum;
    block.sync();  // every warp's part of a sum is in its slot
    if (warp != 0 || column >= columns) return;
    T total = 0;
    FSDP_UNROLL
    for (int i = 0; i < warps; ++i) total += sums[32 * i + lane];
    auto const before = fresh ? Compute<G>(0) : fsdp::widen(gradient[column]);
    gradient[column] = fsdp::narrow<G>(before + static_cast<Compute<G>>(total));
  }
};

}  // namespace blocks

namespace detail {

/// gradient (columns) += sum of the partial rows (chunks, stride), which are scratch afterwards; = if it is fresh.
template <fsdp::Device D, class T, class G>
void add_partials(D const& device, typename D::Stream& stream, T* partials, std::int64_t chunks, std::int64_t stride,
                  std::int64_t columns, G* gradient, bool fresh) {
  if constexpr (fsdp::RunsThreadBlocks<D>) {
    constexpr std::int64_t strip = blocks::AddPartialRows::columns_per_block;
    device.launch(stream, (columns + strip - 1) / strip, blocks::AddPartialRows{}, static_cast<T const*>(partials),
                  chunks, stride, columns, gradient, fresh);
  } else {
    std::int64_t const strips = (columns + columns_per_strip - 1) / columns_per_strip;
    device.launch(stream, strips, AddPartials{}, partials, chunks, stride, columns, gradient, fresh);
  }
}

}  // namespace detail

/// Elements of Compute<A> that bias_backward needs as scratch.
constexpr std::int64_t bias_partials(std::int64_t rows, std::int64_t columns) {
  return detail::row_chunks(rows) * columns;
}

/// bias_gradient (columns) += column sums of dy (rows, columns). A null gradient: nothing.
/// @param partials  bias_partials(rows, columns) elements of scratch
/// @param fresh     the gradient is undefined: =, not +=
template <fsdp::Device D, class A, class G>
void bias_backward(D const& device, typename D::Stream& stream, A const* dy, std::int64_t rows, std::int64_t columns,
                   G* bias_gradient, Compute<A>* partials, bool fresh = false) {
  if (rows == 0 || bias_gradient == nullptr) return;
  auto const chunks = detail::row_chunks(rows);
  if constexpr (fsdp::RunsThreadBlocks<D>) {
    auto const run = [&](auto kernel) {
      auto const strips = kernel.strips(columns);
      device.launch(stream, chunks * strips, kernel, dy, rows, columns, strips, partials);
    };
    if (blocks::in_packs<A>(columns, dy)) {
      run(blocks::ColumnSums<blocks::pack_elements<A>>{});
    } else {
      run(blocks::ColumnSums<1>{});
    }
  } else {
    device.launch(stream, chunks, detail::BiasBackward{}, dy, rows, columns, partials);
  }
  detail::add_partials(device, stream, partials, chunks, columns, columns, bias_gradient, fresh);
}

}  // namespace transformer
