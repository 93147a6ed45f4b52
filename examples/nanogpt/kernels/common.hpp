// SPDX-License-Identifier: Apache-2.0
// What the row kernels share: partial sums of columns over chunks of rows.
#pragma once

#include <cstdint>

#include "fsdp/concepts.hpp"
#include "fsdp/elementwise.hpp"
#include "fsdp/kernels.hpp"
#include "sync_sites.hpp"

namespace nanogpt {

using fsdp::Compute;

namespace detail {

using fsdp::kernels::chunk_elements;
using fsdp::kernels::detail::blocks_for;
using fsdp::kernels::detail::chunk_length;

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

/// gradient (columns) += sum of the partial rows (chunks, stride), in place: the first partial row becomes the sum.
struct AddPartials {
  template <class Block, class T, class G>
  FSDP_HD void operator()(Block const& block, std::int64_t strip, T* partials, std::int64_t chunks, std::int64_t stride,
                          std::int64_t columns, G* gradient) const {
    std::int64_t const begin = strip * columns_per_strip;
    std::int64_t const width = columns - begin < columns_per_strip ? columns - begin : columns_per_strip;
    T* const sum = partials + begin;
    std::int64_t chunk = 1;
    for (; chunk + 4 <= chunks; chunk += 4) {
      T const* const row = sum + chunk * stride;
      block.update(width, AddTo{}, sum, row, row + stride, row + 2 * stride, row + 3 * stride);
    }
    for (; chunk < chunks; ++chunk) block.update(width, AddTo{}, sum, static_cast<T const*>(sum + chunk * stride));
    if constexpr (sizeof(G) < sizeof(T)) block.sync(site::partials_added);  // smaller elements: other threads' columns
    block.update(
        width, [](Compute<G>& g, T value) { g += static_cast<Compute<G>>(value); }, gradient + begin,
        static_cast<T const*>(sum));
  }
};

template <fsdp::Device D, class T, class G>
void add_partials(D const& device, typename D::Stream& stream, T* partials, std::int64_t chunks, std::int64_t stride,
                  std::int64_t columns, G* gradient) {
  std::int64_t const strips = (columns + columns_per_strip - 1) / columns_per_strip;
  device.launch(stream, strips, AddPartials{}, partials, chunks, stride, columns, gradient);
}

}  // namespace detail
}  // namespace nanogpt
