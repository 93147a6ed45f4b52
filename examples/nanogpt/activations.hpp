// SPDX-License-Identifier: Apache-2.0
// All activations and scratch of a model: sizes known at construction, one allocation each, nothing freed before the
// end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "fsdp/host/device.hpp"
#include "fsdp/memory.hpp"
#include "gpt_config.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/kernels/row_kernels.hpp"
#include "transformer/math/gemm.hpp"

namespace nanogpt {

/// What a model must have room for.
struct ActivationPlan {
  std::int64_t batch = 1;      ///< B: sequences per micro-step
  std::int64_t sequence = 1;   ///< T: tokens per sequence
  bool training = true;        ///< false: only each layer's keys and values are kept (they are the decoding cache)
  std::int64_t recompute = 0;  ///< so many first layers are checkpointed: backward computes their activations again
  std::int64_t segment = 1;    ///< so many of them are recomputed together, from the input of the first
  std::int64_t unused = 0;     ///< so many first layers have no backward, and keep nothing for it
  std::int64_t first = 0;      ///< the first segment begins with this layer, at or below `unused`; `recompute`: none is
  float dropout = 0.0f;        ///< highest probability of dropping in training
  std::int64_t lora_rank = 0;  ///< of adapters; 0: none
  std::int64_t panel = 256;    ///< query rows of an attention panel
  std::int64_t lanes = 1;      ///< threads that work on attention at once, each in a scratch of its own
  std::int64_t attention_elements = 1 << 18;  ///< elements of a panel's scores that a thread works on at a time
  std::int64_t logits_elements = 32 << 20;    ///< elements of the logits that exist at a time

  std::int64_t rows() const { return batch * sequence; }
  /// So many first layers share the buffers of `slots()` layers. All others have their own.
  std::int64_t sharing() const { return std::max(recompute, unused); }
  std::int64_t slots() const { return std::clamp<std::int64_t>(std::min(segment, recompute - first), 1, segment); }
  /// The layer is in a segment. Segments are `first` to `first + segment - 1`, and so on; the last one may be shorter.
  bool in_segment(std::int64_t layer) const { return layer >= first && layer < recompute; }
  /// Its place in the segment; 0 for a layer outside of segments.
  std::int64_t slot(std::int64_t layer) const { return in_segment(layer) ? (layer - first) % segment : 0; }
  std::int64_t first_of_segment(std::int64_t layer) const { return layer - slot(layer); }
  std::int64_t last_of_segment(std::int64_t layer) const {
    return std::min(first_of_segment(layer) + segment, recompute) - 1;
  }
  /// Backward computes the layer's activations again. Those of the last segment are still there.
  bool recomputes(std::int64_t layer) const { return in_segment(layer) && last_of_segment(layer) + 1 < recompute; }
  /// The layer whose buffers the layer uses: itself, or a lower one.
  std::int64_t holder(std::int64_t layer) const {
    if (!training) return 0;
    if (layer >= sharing()) return layer;
    return slot(layer) > 0 ? first + slot(layer) : 0;
  }
  AttentionPlan attention(GptConfig const& config) const {
    return {{config.n_head, config.head_size()}, batch, sequence, training, panel, lanes, attention_elements};
  }
  /// Compute<T> elements that row reductions need as scratch.
  std::int64_t partial_elements(GptConfig const& config) const {
    if (!training) return 0;
    return std::max(layer_norm_partials(rows(), config.n_embd),
                    config.bias ? bias_partials(rows(), 4 * config.n_embd) : 0);
  }
  /// Rows of logits that exist at a time: equal parts of all rows, each within logits_elements.
  std::int64_t logits_rows(GptConfig const& config) const {
    std::int64_t const most = std::clamp<std::int64_t>(logits_elements / config.padded_vocab(), 1, rows());
    std::int64_t const parts = (rows() + most - 1) / most;
    return (rows() + parts - 1) / parts;
  }
};

/// Row statistics of a LayerNorm.
template <class Real>
struct NormStatistics {
  Real* mean = nullptr;   // (B T)
  Real* scale = nullptr;  // (B T): 1 / standard deviation
};

/// What a block keeps for its backward: 10 C values a token, because normalised rows and GELU are computed again.
template <class T>
struct BlockActivations {
  using Real = GemmScalar<T>;
  T* input = nullptr;         // (B T, C): residual stream before the block
  T* qkv = nullptr;           // (B T, 3C)
  T* mixed = nullptr;         // (B T, C): attention's result, before its projection
  T* middle = nullptr;        // (B T, C): residual stream between attention and MLP
  T* hidden = nullptr;        // (B T, 4C): before GELU; backward overwrites it
  T* output = nullptr;        // (B T, C): residual stream after the block; the next block's input
  float* log_sums = nullptr;  // FlashShape::statistics, where attention is flash attention
  NormStatistics<Real> norm_1, norm_2;
};

/// Scratch that all layers share. Blocks and head never use theirs at the same time, so `wide` and attention's scores
/// lie over `logits`.
template <class T>
struct Workspace {
  using Real = GemmScalar<T>;
  T* wide = nullptr;           // (B T, 4C)
  T* logits = nullptr;         // (logits rows, padded vocabulary): the head's
  T* narrow = nullptr;         // (B T, C)
  T* narrow_2 = nullptr;       // (B T, C): only with dropout
  T* low = nullptr;            // (B T, lora_rank): rows behind an adapter's A
  T* low_gradient = nullptr;   // (B T, lora_rank)
  Real* row_losses = nullptr;  // (B T)
  Real* partials = nullptr;    // (ActivationPlan::partial_elements): partial sums of row reductions
  AttentionScratch<T> attention;
};

/// Activations of a whole model, in memory of device D.
template <class D, class T>
class Activations {
 public:
  using Real = GemmScalar<T>;

  /// @note `account` must outlive this object; everything is entered under activations and workspace.
  Activations(D const& device, fsdp::MemoryAccount& account, GptConfig const& config, ActivationPlan const& plan)
      : device_(device) {
    lay_out(config, plan, nullptr, nullptr);  // first for the sizes, then for the addresses
    activations_ = {device_, account, fsdp::MemoryTag::activations, kept_bytes_};
    workspace_ = {device_, account, fsdp::MemoryTag::workspace, work_bytes_};
    account_ = &account;
    account_->lease(fsdp::MemoryTag::activations, static_cast<std::int64_t>(kept_bytes_));
    account_->lease(fsdp::MemoryTag::workspace, static_cast<std::int64_t>(work_bytes_));
    lay_out(config, plan, activations_.data(), workspace_.data());
  }
  Activations(Activations const&) = delete;
  Activations& operator=(Activations const&) = delete;
  ~Activations() {
    account_->lease(fsdp::MemoryTag::activations, -static_cast<std::int64_t>(kept_bytes_));
    account_->lease(fsdp::MemoryTag::workspace, -static_cast<std::int64_t>(work_bytes_));
  }

  BlockActivations<T> const& block(std::size_t layer) const { return blocks_[layer]; }
  T* embedded() const { return blocks_.front().input; }    // (B T, C): the first block's input
  T* final_rows() const { return blocks_.back().output; }  // (B T, C): the last block's output
  T* gradient() const { return gradient_; }                // (B T, C): gradient of the residual stream
  NormStatistics<Real> const& final_norm() const { return final_norm_; }
  Workspace<T> const& workspace() const { return shared_; }
  std::size_t activation_bytes() const { return kept_bytes_; }
  std::size_t workspace_bytes() const { return work_bytes_; }

 private:
  /// Hands out aligned pieces, one after another, of memory that may not be there yet.
  struct Cursor {
    std::byte* base;
    std::size_t used = 0;
    template <class E>
    E* take(std::int64_t count) {
      auto const begin = used;
      used += (static_cast<std::size_t>(count) * sizeof(E) + 255) / 256 * 256;
      return base == nullptr ? nullptr : reinterpret_cast<E*>(base + begin);
    }
    NormStatistics<Real> statistics(std::int64_t rows) {
      auto* const mean = take<Real>(rows);
      return {mean, take<Real>(rows)};
    }
  };

  void lay_out(GptConfig const& config, ActivationPlan const& plan, std::byte* kept_base, std::byte* work_base) {
    std::int64_t const rows = plan.rows(), width = config.n_embd;
    auto const attention = plan.attention(config);
    std::int64_t const statistics = flash_statistics<D, T>(attention);
    Cursor kept{kept_base}, work{work_base};
    auto const layers = static_cast<std::size_t>(config.n_layer);

    blocks_.assign(layers, {});
    T* stream = kept.template take<T>(rows * width);
    for (std::size_t layer = 0; layer < layers; ++layer) {
      auto& block = blocks_[layer];
      auto const holder = static_cast<std::size_t>(plan.holder(static_cast<std::int64_t>(layer)));
      bool const own = holder == layer;
      if (!own) block = blocks_[holder];
      if (own || !plan.training) block.qkv = kept.template take<T>(rows * 3 * width);
      block.input = stream;
      if (own) {
        block.mixed = kept.template take<T>(rows * width);
        block.middle = kept.template take<T>(rows * width);
        block.hidden = kept.template take<T>(rows * 4 * width);
        if (statistics > 0) block.log_sums = kept.template take<float>(statistics);
        block.norm_1 = kept.statistics(rows);
        block.norm_2 = kept.statistics(rows);
      }
      // Inside a segment, the output lies where that of its holder does. Without backward, the stream is updated in
      // place.
      auto const next = static_cast<std::int64_t>(layer) + 1;
      if (plan.training && !(plan.slot(next) > 0 && plan.holder(next) < next))
        stream = kept.template take<T>(rows * width);
      else if (plan.training)
        stream = blocks_[static_cast<std::size_t>(plan.holder(next))].input;
      block.output = stream;
    }
    final_norm_ = kept.statistics(rows);
    kept_bytes_ = kept.used;

    gradient_ = plan.training ? work.template take<T>(rows * width) : nullptr;
    shared_ = {};
    shared_.narrow = work.template take<T>(rows * width);
    if (plan.training && plan.dropout > 0) shared_.narrow_2 = work.template take<T>(rows * width);
    if (plan.lora_rank > 0) shared_.low = work.template take<T>(rows * plan.lora_rank);
    if (plan.lora_rank > 0 && plan.training) shared_.low_gradient = work.template take<T>(rows * plan.lora_rank);
    shared_.row_losses = work.template take<Real>(rows);
    shared_.partials = work.template take<Real>(plan.partial_elements(config));
    if (statistics > 0) shared_.attention.products = work.template take<float>(statistics);

    Cursor for_head = work;
    auto& own = shared_.attention;
    std::int64_t const scores = own.score_elements = score_elements<D, T>(attention);
    shared_.wide = work.template take<T>(rows * 4 * width);
    Cursor for_tiles = work;
    own.tile_bytes = attention_tile_bytes<D, T>(attention);
    own.tiles = for_tiles.template take<std::byte>(plan.lanes * own.tile_bytes);
    own.scores = work.template take<T>(plan.lanes * scores);
    if (plan.training) own.scores_gradient = work.template take<T>(plan.lanes * scores);
    shared_.logits = for_head.template take<T>(plan.logits_rows(config) * config.padded_vocab());
    work_bytes_ = std::max({work.used, for_head.used, for_tiles.used});
  }

  D device_;
  fsdp::MemoryAccount* account_ = nullptr;
  std::vector<BlockActivations<T>> blocks_;
  NormStatistics<Real> final_norm_;
  T* gradient_ = nullptr;
  Workspace<T> shared_;
  std::size_t kept_bytes_ = 0, work_bytes_ = 0;
  fsdp::AccountedMemory<D const> activations_, workspace_;
};

}  // namespace nanogpt
