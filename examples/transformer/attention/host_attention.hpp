// SPDX-License-Identifier: Apache-2.0
// Causal attention on the host by kernels of our own, where the processor has AVX-512: without a T x T buffer, without
// the masked half, forward and backward.
#pragma once

#include <cstddef>
#include <cstdint>

#include <type_traits>

#include "fsdp/host.hpp"
#include "fsdp/kernels.hpp"
#include "fsdp/tensor.hpp"

namespace transformer {

/// Attention of `batch` sequences with `heads` heads each.
struct HostAttention {
  std::int64_t batch = 1, heads = 1, head_size = 64;
  std::int64_t length = 1;    ///< query rows of a sequence
  std::int64_t position = 0;  ///< of the first of them: it sees so many keys before its own
  std::int64_t capacity = 1;  ///< rows of qkv from one sequence to the next, at least position + length

  std::int64_t width() const { return heads * head_size; }
};

/// Whether there are kernels for elements of type T (float, bf16) and this head size on this processor.
template <class T>
bool host_attention_serves(std::int64_t head_size);
template <>
bool host_attention_serves<float>(std::int64_t head_size);
template <>
bool host_attention_serves<fsdp::bf16>(std::int64_t head_size);

/// Bytes that a thread works in, for up to `keys` keys.
std::int64_t host_attention_scratch(std::int64_t keys, std::int64_t head_size, std::size_t element_bytes,
                                    bool training);

/// One head of one sequence, numbers `part` of batch * heads: mixed (batch, length, C) = softmax(q k^T / sqrt(head
/// size)) v, over all keys up to each query's own.
///
/// A head is one thread's work from begin to end, so results do not depend on how many threads share the heads. Scores,
/// probabilities' sums and the gradients of keys and values are fp32; of bf16 rows, probabilities and the gradients of
/// scores are rounded to bf16 where they are multiplied.
/// @param qkv      (batch, capacity, 3C): queries, keys and values, heads side by side in each
/// @param scratch  host_attention_scratch bytes, aligned to 64, of the calling thread
void host_attention_forward(HostAttention const& shape, std::int64_t part, float const* qkv, float* mixed,
                            std::byte* scratch);
void host_attention_forward(HostAttention const& shape, std::int64_t part, fsdp::bf16 const* qkv, fsdp::bf16* mixed,
                            std::byte* scratch);

/// qkv_gradient (batch, length, 3C) = gradient of forward at qkv, given that of its result, (batch, length, C).
/// @pre shape.position == 0
void host_attention_backward(HostAttention const& shape, std::int64_t part, float const* qkv,
                             float const* mixed_gradient, float* qkv_gradient, std::byte* scratch);
void host_attention_backward(HostAttention const& shape, std::int64_t part, fsdp::bf16 const* qkv,
                             fsdp::bf16 const* mixed_gradient, fsdp::bf16* qkv_gradient, std::byte* scratch);

/// Whether device D may compute attention of elements T by the functions above.
template <class D, class T>
inline constexpr bool has_host_attention = std::is_base_of_v<fsdp::host::Device, D> && !fsdp::RunsThreadBlocks<D> &&
                                           (std::is_same_v<T, float> || std::is_same_v<T, fsdp::bf16>);

/// The scratch of a stream's threads, one behind the other.
struct LaneScratch {
  std::byte* first;
  std::int64_t bytes;  ///< of each
};

/// All heads of all sequences, shared by the stream's threads.
/// @note Stream: only enqueues.
template <class T>
void host_attention_forward(fsdp::host::Device const&, fsdp::host::Stream& stream, HostAttention const& shape,
                            T const* qkv, T* mixed, LaneScratch scratch) {
  stream.enqueue_parts(shape.batch * shape.heads, [=](std::int64_t part, int lane) {
    host_attention_forward(shape, part, qkv, mixed, scratch.first + lane * scratch.bytes);
  });
}
template <class T>
void host_attention_backward(fsdp::host::Device const&, fsdp::host::Stream& stream, HostAttention const& shape,
                             T const* qkv, T const* mixed_gradient, T* qkv_gradient, LaneScratch scratch) {
  stream.enqueue_parts(shape.batch * shape.heads, [=](std::int64_t part, int lane) {
    host_attention_backward(shape, part, qkv, mixed_gradient, qkv_gradient, scratch.first + lane * scratch.bytes);
  });
}

}  // namespace transformer
