// SPDX-License-Identifier: Apache-2.0
// Causal attention on tensor cores, without a T x T buffer: bf16 rows, sums in fp32, head sizes 64 and 128.
#pragma once

#include <cstdint>
#include <type_traits>

#include "transformer/attention/flash_backward.hpp"
#include "transformer/attention/flash_common.hpp"
#include "transformer/attention/flash_forward.hpp"

namespace transformer {

/// Whether there are kernels for device D and elements T.
template <class D, class T>
inline constexpr bool has_flash_attention = fsdp::RunsThreadBlocks<D>&& std::is_same_v<T, fsdp::bf16>;

constexpr bool flash_attention_serves(std::int64_t head_size) { return head_size == 64 || head_size == 128; }

namespace detail {
/// Calls f with a kernel family's parameters as types.
template <template <int, bool> class Kernel, class F>
void with_flash_kernel(std::int64_t head_size, bool dropped, F const& f) {
  if (head_size == 64) {
    dropped ? f(Kernel<64, true>{}) : f(Kernel<64, false>{});
  } else {
    dropped ? f(Kernel<128, true>{}) : f(Kernel<128, false>{});
  }
}
}  // namespace detail

/// mixed (B, n, C) = softmax of the scaled products with the visible keys, dropped out, times the values.
/// @param qkv       (B, capacity, 3C): the keys and values of all rows up to this pass's are there; 16-byte aligned
/// @param log_sums  shape.statistics() floats for backward, or null; 16-byte aligned
/// @pre flash_attention_serves(shape.width / shape.heads)
/// @note Stream: only enqueues. Repeats bitwise.
template <class D>
void flash_attention_forward(D const& device, typename D::Stream& stream, FlashShape const& shape,
                             DropoutMask const& mask, fsdp::bf16 const* qkv, fsdp::bf16* mixed, float* log_sums) {
  if (shape.batch * shape.length == 0) return;
  detail::with_flash_kernel<flash::Forward>(shape.width / shape.heads, mask.probability > 0.0f, [&](auto kernel) {
    device.launch(stream, kernel.blocks(shape), kernel, shape, mask, qkv, mixed, log_sums);
  });
}

/// args.qkv_gradient = gradient of forward at args.qkv; every element is written.
/// @pre shape.position == 0, shape.capacity == shape.length, and `args.log_sums` of a forward with the same mask
/// @note Stream: only enqueues. Repeats bitwise.
template <class D>
void flash_attention_backward(D const& device, typename D::Stream& stream, FlashShape const& shape,
                              DropoutMask const& mask, flash::BackwardArgs const& args) {
  if (shape.batch * shape.length == 0) return;
  std::int64_t const head_size = shape.width / shape.heads;
  bool const dropped = mask.probability > 0.0f;
  auto const run = [&](auto kernel) { device.launch(stream, kernel.blocks(shape), kernel, shape, mask, args); };
  detail::with_flash_kernel<flash::BackwardQueries>(head_size, dropped, run);
  detail::with_flash_kernel<flash::BackwardKeys>(head_size, dropped, run);  // reads the products
}

}  // namespace transformer
