// SPDX-License-Identifier: Apache-2.0
// Buffer sizes of causal attention, and the kernels that a device has for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/host.hpp"
#include "transformer/attention/flash_attention.hpp"
#include "transformer/attention/host_attention.hpp"
#include "transformer/attention/shape.hpp"
#include "transformer/math/gemm.hpp"

namespace transformer {

/// The largest attention that fits the buffers, and the sizes of its panels.
struct AttentionPlan {
  AttentionShape shape{};
  std::int64_t batch = 1;           ///< B: sequences
  std::int64_t sequence = 1;        ///< T: longest sequence
  bool training = true;             ///< false: there is no backward
  std::int64_t panel = 256;         ///< query rows of a panel
  std::int64_t lanes = 1;           ///< threads that work at once, each in a scratch of its own
  std::int64_t elements = 1 << 18;  ///< of a panel's scores that a thread works on at a time
};

/// Scratch, which layers share. Only one of tiles and scores is used in a pass; they may lie over each other.
template <class T>
struct AttentionScratch {
  T* scores = nullptr;              // (lanes, score_elements): (heads, rows, keys) of some heads' panel
  T* scores_gradient = nullptr;     // (lanes, score_elements): only in training
  std::byte* tiles = nullptr;       // (lanes, tile_bytes): attention in tiles
  float* products = nullptr;        // flash_statistics: flash attention's backward
  std::int64_t score_elements = 0;  // of a lane
  std::int64_t tile_bytes = 0;      // of a lane
};

/// Whether attention's groups are parts of a task that a stream's threads share: on the host itself, not on a device
/// that looks on at what one host thread launches there.
template <class D>
inline constexpr bool splits_tasks = std::is_same_v<D, fsdp::host::Device>;
/// Threads of a compute stream.
template <class D>
std::int64_t lanes_of(D const& device) {
  if constexpr (requires { device.threads; }) return device.threads;
  return 1;
}

/// Whether attention runs without scores in memory.
template <class D, class T>
bool uses_flash_attention(AttentionShape const& shape) {
  return has_flash_attention<D, T> && flash_attention_serves(shape.size);
}
/// Flash attention of whole sequences.
inline FlashShape flash_shape(AttentionPlan const& plan) {
  FlashShape shape;
  shape.batch = plan.batch;
  shape.heads = plan.shape.heads;
  shape.length = shape.capacity = plan.sequence;
  shape.width = plan.shape.width();
  shape.scale = 1 / std::sqrt(static_cast<float>(plan.shape.size));
  return shape;
}
/// Row statistics that a layer keeps for its backward, and that backward has as scratch; 0 without flash attention.
template <class D, class T>
std::int64_t flash_statistics(AttentionPlan const& plan) {
  return plan.training && uses_flash_attention<D, T>(plan.shape) ? flash_shape(plan).statistics() : 0;
}
/// A thread's room for scores: at least one head's largest panel, at most all heads'; 0 with flash attention.
template <class D, class T>
std::int64_t score_elements(AttentionPlan const& plan) {
  if (uses_flash_attention<D, T>(plan.shape)) return 0;
  std::int64_t const largest = std::min(plan.panel, plan.sequence) * plan.sequence;
  return std::clamp(plan.elements, largest, largest * plan.shape.heads);
}
/// Bytes that each thread of the host has for attention in tiles; 0 where attention goes by panels alone: on other
/// devices, and where products have matrix units.
template <class D, class T>
std::int64_t attention_tile_bytes(AttentionPlan const& plan) {
  if constexpr (has_host_attention<D, T>) {
    if (host_attention_serves<T>(plan.shape.size) && !Gemm<D>::template has_matrix_units<T>())
      return host_attention_scratch(plan.sequence, plan.shape.size, sizeof(T), plan.training);
  }
  return 0;
}

}  // namespace transformer
