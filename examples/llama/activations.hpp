// SPDX-License-Identifier: Apache-2.0
// All activations and scratch of a Llama.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/memory.hpp"
#include "llama/llama_config.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/arena.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/math/gemm.hpp"

namespace llama {

/// Attention reads keys and values that are repeated for the heads of their group.
inline AttentionShape attention_of(LlamaConfig const& config) { return {config.num_attention_heads, config.head_dim}; }

/// Activations that a block keeps for its backward: normalised rows and SwiGLU are computed again. C: hidden size, F:
/// intermediate size, A = H Q: width of the queries.
template <class T>
struct BlockActivations {
  using Real = GemmScalar<T>;
  T* input = nullptr;  // (B T, C): residual stream before the block
  T* qkv = nullptr;    // (B T, 3A): rotated, keys and values repeated for their group; backward overwrites it
  T* attention_output = nullptr;  // (B T, A): attention's result, before its projection
  T* residual = nullptr;          // (B T, C): residual stream between attention and MLP
  T* gate_up = nullptr;           // (B T, 2F): before SwiGLU; backward overwrites it
  T* output = nullptr;            // (B T, C): residual stream after the block; the next block's input
  float* log_sums = nullptr;      // FlashShape::statistics, where attention is flash attention
  Real* scale_1 = nullptr;        // (B T): of the norm before attention
  Real* scale_2 = nullptr;        // (B T): of the norm before the MLP
};

/// Scratch that all layers share. Blocks and head never use theirs at the same time, so `wide` and attention's scores
/// lie over the logits.
template <class T>
struct Workspace {
  T* wide = nullptr;                  // (B T, wide_elements)
  T* narrow = nullptr;                // (B T, C or A, whichever is more)
  float* rotations = nullptr;         // (T, Q): rope_table, written once
  GemmScalar<T>* partials = nullptr;  // partial sums of the norms' weight gradients
  AttentionScratch<T> attention;
  AdapterScratch<T> adapters;
  HeadScratch<T> head;
};

/// Activations of a whole model, in memory of device D.
template <class D, class T>
class Activations {
 public:
  using Real = GemmScalar<T>;

  Activations(D const& device, fsdp::MemoryAccount& account, LlamaConfig const& config, ActivationPlan const& plan)
      : memory_(device, account, [&](Arena& kept, Arena& work) { lay_out(config, plan, kept, work); }) {}

  BlockActivations<T> const& block(std::int64_t layer) const { return blocks_[static_cast<std::size_t>(layer)]; }
  T* embedded() const { return blocks_.front().input; }    // (B T, C): the first block's input
  T* final_rows() const { return blocks_.back().output; }  // (B T, C): the last block's output
  T* gradient() const { return gradient_; }                // (B T, C): gradient of the residual stream
  Real* final_norm() const { return final_scale_; }        // (B T)
  Workspace<T> const& workspace() const { return shared_; }

 private:
  /// Elements of a row of `wide`: SwiGLU's result, the projected queries, keys and values, the gradient of what
  /// attention reads, or that of normalised rows.
  static std::int64_t wide_elements(LlamaConfig const& config) {
    return std::max({config.intermediate_size, 3 * config.heads().width(), config.hidden_size});
  }

  void lay_out(LlamaConfig const& config, ActivationPlan const& plan, Arena& kept, Arena& work) {
    std::int64_t const rows = plan.rows(), width = config.hidden_size, queries = config.heads().width();
    auto const attention = plan.attention(attention_of(config));
    std::int64_t const statistics = flash_statistics<D, T>(attention);

    blocks_.assign(static_cast<std::size_t>(config.num_hidden_layers), {});
    auto const take_cache = [&](BlockActivations<T>& block) { block.qkv = kept.take<T>(rows * 3 * queries); };
    lay_out_layers<T>(plan, kept, blocks_, rows * width, take_cache, [&](BlockActivations<T>& block) {
      block.attention_output = kept.take<T>(rows * queries);
      block.residual = kept.take<T>(rows * width);
      block.gate_up = kept.take<T>(rows * 2 * config.intermediate_size);
      if (statistics > 0) block.log_sums = kept.take<float>(statistics);
      block.scale_1 = kept.take<Real>(rows);
      block.scale_2 = kept.take<Real>(rows);
    });
    final_scale_ = kept.take<Real>(rows);

    gradient_ = plan.training ? work.take<T>(rows * width) : nullptr;
    shared_ = {};
    shared_.narrow = work.take<T>(rows * std::max(width, queries));
    auto& low = shared_.adapters;
    if (plan.lora_rank > 0) low.low = work.take<T>(rows * plan.lora_rank);
    if (plan.lora_rank > 0 && plan.training) low.low_gradient = work.take<T>(rows * plan.lora_rank);
    shared_.rotations = work.take<float>(plan.sequence * config.head_dim);
    shared_.head.losses = work.take<Real>(rows);
    if (plan.training) shared_.partials = work.take<Real>(rms_norm_partials(rows, width));
    if (statistics > 0) shared_.attention.products = work.take<float>(statistics);

    Arena for_head = work;
    auto& own = shared_.attention;
    std::int64_t const scores = own.score_elements = score_elements<D, T>(attention);
    shared_.wide = work.take<T>(rows * wide_elements(config));
    Arena for_tiles = work;
    own.tile_bytes = attention_tile_bytes<D, T>(attention);
    own.tiles = for_tiles.take<std::byte>(plan.lanes * own.tile_bytes);
    own.scores = work.take<T>(plan.lanes * scores);
    if (plan.training) own.scores_gradient = work.take<T>(plan.lanes * scores);
    auto const padded = config.padded_vocab();
    shared_.head.logits = for_head.take<T>(plan.logits_rows(padded) * padded);
    work.join(for_head);
    work.join(for_tiles);
  }

  std::vector<BlockActivations<T>> blocks_;
  Real* final_scale_ = nullptr;
  T* gradient_ = nullptr;
  Workspace<T> shared_;
  ActivationMemory<D> memory_;
};

}  // namespace llama
