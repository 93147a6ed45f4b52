// SPDX-License-Identifier: Apache-2.0
// All activations and scratch of a GPT.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/memory.hpp"
#include "nanogpt/gpt_config.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/layers/adapters.hpp"
#include "transformer/layers/arena.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/math/gemm.hpp"

namespace nanogpt {

/// Row statistics of a LayerNorm.
template <class Real>
struct NormStatistics {
  Real* mean = nullptr;   // (B T)
  Real* scale = nullptr;  // (B T): 1 / standard deviation
};

/// Activations that a block keeps for its backward: 10 C values a token, because normalised rows and GELU are computed
/// again.
template <class T>
struct BlockActivations {
  using Real = GemmScalar<T>;
  T* input = nullptr;             // (B T, C): residual stream before the block
  T* qkv = nullptr;               // (B T, 3C)
  T* attention_output = nullptr;  // (B T, C): attention's result, before its projection
  T* residual = nullptr;          // (B T, C): residual stream between attention and MLP
  T* hidden = nullptr;            // (B T, 4C): before GELU; backward overwrites it
  T* output = nullptr;            // (B T, C): residual stream after the block; the next block's input
  float* log_sums = nullptr;      // FlashShape::statistics, where attention is flash attention
  NormStatistics<Real> ln_1_statistics, ln_2_statistics;
};

/// Compute<T> elements that row reductions need as scratch.
inline std::int64_t partial_elements(GptConfig const& config, ActivationPlan const& plan) {
  if (!plan.training) return 0;
  return std::max(layer_norm_partials(plan.rows(), config.n_embd),
                  config.bias ? bias_partials(plan.rows(), 4 * config.n_embd) : 0);
}

/// Scratch that all layers share. Blocks and head never use theirs at the same time, so `wide` and attention's scores
/// lie over the logits.
template <class T>
struct Workspace {
  using Real = GemmScalar<T>;
  T* wide = nullptr;         // (B T, 4C)
  T* narrow = nullptr;       // (B T, C)
  T* narrow_2 = nullptr;     // (B T, C): only with dropout
  Real* partials = nullptr;  // (partial_elements): partial sums of row reductions
  AttentionScratch<T> attention;
  AdapterScratch<T> adapters;
  HeadScratch<T> head;
};

/// Activations of a whole model, in memory of device D.
template <class D, class T>
class Activations {
 public:
  using Real = GemmScalar<T>;

  Activations(D const& device, fsdp::MemoryAccount& account, GptConfig const& config, ActivationPlan const& plan)
      : memory_(device, account, [&](Arena& kept, Arena& work) { lay_out(config, plan, kept, work); }) {}

  BlockActivations<T> const& block(std::int64_t layer) const { return blocks_[static_cast<std::size_t>(layer)]; }
  T* embedded() const { return blocks_.front().input; }    // (B T, C): the first block's input
  T* final_rows() const { return blocks_.back().output; }  // (B T, C): the last block's output
  T* gradient() const { return gradient_; }                // (B T, C): gradient of the residual stream
  NormStatistics<Real> const& final_norm() const { return final_norm_; }
  Workspace<T> const& workspace() const { return shared_; }

 private:
  static NormStatistics<Real> take_statistics(Arena& arena, std::int64_t rows) {
    auto* const mean = arena.take<Real>(rows);
    return {mean, arena.take<Real>(rows)};
  }

  void lay_out(GptConfig const& config, ActivationPlan const& plan, Arena& kept, Arena& work) {
    std::int64_t const rows = plan.rows(), width = config.n_embd;
    auto const attention = plan.attention(config.attention());
    std::int64_t const statistics = flash_statistics<D, T>(attention);

    blocks_.assign(static_cast<std::size_t>(config.n_layer), {});
    auto const take_cache = [&](BlockActivations<T>& block) { block.qkv = kept.take<T>(rows * 3 * width); };
    lay_out_layers<T>(plan, kept, blocks_, rows * width, take_cache, [&](BlockActivations<T>& block) {
      block.attention_output = kept.take<T>(rows * width);
      block.residual = kept.take<T>(rows * width);
      block.hidden = kept.take<T>(rows * 4 * width);
      if (statistics > 0) block.log_sums = kept.take<float>(statistics);
      block.ln_1_statistics = take_statistics(kept, rows);
      block.ln_2_statistics = take_statistics(kept, rows);
    });
    final_norm_ = take_statistics(kept, rows);

    gradient_ = plan.training ? work.take<T>(rows * width) : nullptr;
    shared_ = {};
    shared_.narrow = work.take<T>(rows * width);
    if (plan.training && plan.dropout > 0) shared_.narrow_2 = work.take<T>(rows * width);
    auto& low = shared_.adapters;
    if (plan.lora_rank > 0) low.low = work.take<T>(rows * plan.lora_rank);
    if (plan.lora_rank > 0 && plan.training) low.low_gradient = work.take<T>(rows * plan.lora_rank);
    shared_.head.losses = work.take<Real>(rows);
    shared_.partials = work.take<Real>(partial_elements(config, plan));
    if (statistics > 0) shared_.attention.products = work.take<float>(statistics);

    Arena for_head = work;
    auto& own = shared_.attention;
    std::int64_t const scores = own.score_elements = score_elements<D, T>(attention);
    shared_.wide = work.take<T>(rows * 4 * width);
    Arena for_tiles = work;
    own.tile_bytes = attention_tile_bytes<D, T>(attention);
    own.tiles = for_tiles.take<std::byte>(plan.lanes * own.tile_bytes);
    own.scores = work.take<T>(plan.lanes * scores);
    if (plan.training) own.scores_gradient = work.take<T>(plan.lanes * scores);
    shared_.head.logits = for_head.take<T>(plan.logits_rows(config.padded_vocab()) * config.padded_vocab());
    work.join(for_head);
    work.join(for_tiles);
  }

  std::vector<BlockActivations<T>> blocks_;
  NormStatistics<Real> final_norm_;
  T* gradient_ = nullptr;
  Workspace<T> shared_;
  ActivationMemory<D> memory_;
};

}  // namespace nanogpt
