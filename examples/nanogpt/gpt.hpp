// SPDX-License-Identifier: Apache-2.0
// A GPT on an engine: a training micro-step, evaluation, and decoding with a cache of keys and values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "activations.hpp"
#include "block.hpp"
#include "context.hpp"
#include "embedding.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/staging.hpp"
#include "gpt_config.hpp"
#include "head.hpp"
#include "transformer/data/token_feed.hpp"
#include "transformer/tuning/tuning.hpp"

namespace nanogpt {

struct GptOptions {
  bool training = true;                       ///< false: less memory, forward passes only
  std::int64_t recompute = 0;                 ///< so many first layers are computed again in backward
  std::int64_t segment = 1;                   ///< so many of them together; only the input of the first is kept
  std::int64_t unit_layers = 1;               ///< neighbouring layers that share a unit; 0: all, in the root
  std::uint64_t seed = 1337;                  ///< of the dropout masks
  std::int64_t panel = 256;                   ///< query rows of an attention panel
  std::int64_t attention_elements = 1 << 18;  ///< attention scores that a thread works on at a time
  std::int64_t logits_elements = 32 << 20;    ///< logits that exist at a time
  Tuning tuning{};
};

/// Options that suit a device. On a GPU, pieces that fill it: each part of the logits reads and writes all of wte's
/// gradient, and a panel's scores stay in the second-level cache on the host alone.
template <class D>
GptOptions gpt_options() {
  GptOptions options;
  if constexpr (fsdp::RunsThreadBlocks<D>) {
    options.logits_elements = std::int64_t{512} << 20;
    options.attention_elements = std::int64_t{64} << 20;
  }
  return options;
}

/// A GPT whose units are: the embeddings with the head (one root unit, wte is tied), and every block or, as the options
/// say, neighbouring blocks.
///
/// @tparam E  fsdp::Engine, which must outlive the model
/// @note Collective: every member function that computes is called by all ranks, with data of their own.
template <class E>
class Gpt {
 public:
  using Device = typename E::Device;
  using T = typename E::Precision::Param;

  /// @param batch   B: sequences of a micro-step
  /// @param length  T: tokens of a sequence; also the longest text that is decoded
  /// @throws fsdp::ConfigError if the shape is impossible or `length` exceeds the block size
  Gpt(E& engine, GptConfig const& config, std::int64_t batch, std::int64_t length, GptOptions options = {})
      : engine_(engine),
        plan_(make_plan(config, batch, length, options, lanes_of(engine.device()))),
        options_(options),
        gemm_(engine.device()),
        activations_(engine.device(), engine.account(), config, plan_),
        context_{engine.device(),
                 &gemm_,
                 config,
                 plan_,
                 activations_.workspace(),
                 options.tuning,
                 {engine.device(), &gemm_, plan_.attention(config), activations_.workspace().attention}},
        feed_(engine.device(), engine.account(), batch * length),
        scalars_(context_.device, engine.account(), fsdp::MemoryTag::scalars, 2 * sizeof(double)),
        sampled_(context_.device, engine.account(), fsdp::MemoryTag::workspace,
                 static_cast<std::size_t>(config.vocab_size) * sizeof(T)),
        taken_(context_.device, 1),
        root_(engine.add_unit("root")),
        embedding_(engine.shard(Embedding<Device, T>(context_), "transformer", root_)),
        blocks_(shard_blocks()),
        head_(engine.shard(Head<Device, T>(context_), "transformer", root_)) {
    for (auto layer = plan_.first; plan_.segment > 1 && plan_.recomputes(layer); layer += plan_.segment)
      engine_.recompute_segment(block(layer), block(plan_.last_of_segment(layer)));
    context_.device.zero_async(engine_.compute(), scalars_.data(), scalars_.bytes());
  }
  Gpt(Gpt const&) = delete;
  Gpt& operator=(Gpt const&) = delete;
  ~Gpt() {
    try {
      context_.device.synchronize(engine_.compute());  // nothing may use the activations any more
    } catch (...) {                                    // the stream's error has been reported to whoever used it
    }
  }

  GptConfig const& config() const { return context_.config; }
  ActivationPlan const& plan() const { return plan_; }

  /// One micro-step: adds the gradients of loss_weight * mean cross-entropy to the parameters' gradients, and that loss
  /// to what read_loss() gives.
  /// @param tokens, targets  (B, T), in host memory; free to change once the call returns
  /// @param loss_weight      1 / gradient accumulation steps
  /// @param gradient_scale   multiplies the gradients but not the loss
  /// @note Stream: only enqueues.
  void forward_backward(std::int32_t const* tokens, std::int32_t const* targets, double loss_weight = 1.0,
                        double gradient_scale = 1.0) {
    FSDP_EXPECTS(plan_.training, "a model made for forward passes alone cannot train");
    Pass pass = whole_pass();
    pass.mask = {context_.config.dropout, options_.seed, mask_step_++, 0};
    pass.sequence = mask_sequence_;
    auto const ids = begin(tokens, targets, pass);
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer)
      blocks_[layer].forward(pass, activations_.block(layer));
    head_.forward(pass, activations_.final_rows(), activations_.final_norm(), Normalise{});

    T* const gradient = activations_.gradient();
    head_.backward(pass, activations_.final_rows(), activations_.final_norm(), Evaluate{ids.targets, train_loss()},
                   loss_weight, gradient_scale, gradient);
    for (auto layer = context_.config.n_layer; layer-- > 0;) {
      if (plan_.segment > 1 && plan_.recomputes(layer) && layer == plan_.last_of_segment(layer)) recompute(pass, layer);
      block(layer).backward(pass, activations_.block(static_cast<std::size_t>(layer)), gradient);
    }
    embedding_.backward(pass, ids.tokens, gradient);
    feed_.release(engine_.compute());
  }

  /// Chooses the dropout masks of the next micro-step; each one after it takes the next step. A sequence's mask depends
  /// on the seed, the step and its number alone, whoever computes it.
  /// @param step  below 2^40
  /// @param sequence  number of the batch's first sequence; no two of a step should share one
  void set_masks(std::uint64_t step, std::int64_t sequence = 0) {
    mask_step_ = step;
    mask_sequence_ = sequence;
  }

  /// The loss that micro-steps have added up since the last call; then starts again from 0.
  /// @note Stream: waits for compute.
  double read_loss() { return take(train_loss()); }

  /// Forgets that loss.
  /// @note Stream: only enqueues.
  void discard_loss() { context_.device.zero_async(engine_.compute(), train_loss(), sizeof(double)); }

  /// Adds the mean cross-entropy of a batch, without dropout, to what read_evaluation() gives. Ends a decoded text.
  /// @param tokens, targets  (B, T), in host memory
  /// @note Stream: only enqueues.
  void evaluate(std::int32_t const* tokens, std::int32_t const* targets) {
    auto const scope = engine_.evaluation();
    Pass const pass = whole_pass();
    auto const ids = begin(tokens, targets, pass);
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer)
      blocks_[layer].forward(pass, activations_.block(layer));
    head_.forward(pass, activations_.final_rows(), activations_.final_norm(), Evaluate{ids.targets, evaluation_loss()});
    feed_.release(engine_.compute());
    ++evaluations_;
  }

  /// Mean over the batches evaluated since the last call; 0 without any.
  /// @note Stream: waits for compute.
  double read_evaluation() {
    double const sum = take(evaluation_loss());
    auto const count = std::exchange(evaluations_, 0);
    return count == 0 ? 0.0 : sum / static_cast<double>(count);
  }

  /// Longest text that extend() can hold: T.
  std::int64_t capacity() const { return plan_.sequence; }
  /// Tokens of the text so far.
  std::int64_t cached() const { return cached_; }
  /// Begins another text.
  void restart() { cached_ = 0; }

  /// Appends `count` tokens to the text and returns the logits (V) of what follows. Only the new tokens are computed;
  /// keys and values of the others are kept in the layers' qkv buffers. Training and evaluation end the text.
  /// @throws fsdp::UsageError if count < 1 or the text would exceed capacity(), or if it goes on in a model of which
  /// several layers share a buffer (see ActivationPlan::slots): a text is then given whole, by logits()
  /// @note Stream: waits for compute.
  std::vector<float> extend(std::int32_t const* tokens, std::int64_t count) {
    FSDP_EXPECTS(cached_ == 0 || plan_.sharing() <= plan_.slots(),
                 "a text goes on after {} tokens, but {} layers that share buffers keep no keys of their own", cached_,
                 plan_.sharing());
    FSDP_EXPECTS(count >= 1 && cached_ + count <= capacity(), "{} tokens after {} do not fit a text of {}", count,
                 cached_, capacity());
    auto const scope = engine_.evaluation();
    Pass pass;
    pass.length = count;
    pass.position = cached_;
    pass.capacity = capacity();
    T* const logits = sampled_.template as<T>();
    begin(tokens, nullptr, pass);
    for (std::size_t layer = 0; layer < blocks_.size(); ++layer)
      blocks_[layer].forward(pass, activations_.block(layer));
    head_.forward(pass, activations_.final_rows(), activations_.final_norm(), Sample<T>{logits});
    feed_.release(engine_.compute());
    cached_ = pass.position + count;

    std::vector<T> copy(static_cast<std::size_t>(context_.config.vocab_size));
    context_.device.copy_async(engine_.compute(), copy.data(), logits, copy.size() * sizeof(T));
    context_.device.synchronize(engine_.compute());
    std::vector<float> values(copy.size());
    for (std::size_t i = 0; i < copy.size(); ++i) values[i] = static_cast<float>(copy[i]);
    return values;
  }

  /// The logits (V) that follow a text of `count` tokens.
  std::vector<float> logits(std::int32_t const* tokens, std::int64_t count) {
    restart();
    return extend(tokens, count);
  }

 private:
  static ActivationPlan make_plan(GptConfig const& config, std::int64_t batch, std::int64_t length,
                                  GptOptions const& options, std::int64_t lanes) {
    config.validate();
    if (batch < 1 || length < 1 || length > config.block_size) {
      fsdp::fail<fsdp::ConfigError>(
          "model: expected at least one sequence of 1 to {} tokens (block_size), got {} of {} tokens",
          config.block_size, batch, length);
    }
    if (options.panel < 1)
      fsdp::fail<fsdp::ConfigError>("model: expected attention panels of at least one row, got {}", options.panel);
    ActivationPlan plan;
    plan.batch = batch;
    plan.sequence = length;
    plan.training = options.training;
    plan.recompute = options.training ? std::min(options.recompute, config.n_layer) : 0;
    plan.dropout = config.dropout;
    plan.lora_rank = options.tuning.lora_rank;
    if (options.training && options.tuning.last_layers > 0) plan.unused = config.n_layer - options.tuning.last_layers;
    plan.segment = std::max<std::int64_t>(1, std::min(options.segment, plan.recompute));
    // Below, nothing is recomputed. A segment has whole units.
    plan.first = std::min(plan.unused - plan.unused % std::max<std::int64_t>(1, options.unit_layers), plan.recompute);
    if (plan.recompute <= plan.unused) plan.first = plan.recompute;
    if (options.segment < 1)
      fsdp::fail<fsdp::ConfigError>("model: expected segments of at least one layer, got {}", options.segment);
    if (plan.segment > 1 && plan.recomputes(plan.first) &&
        (options.unit_layers == 0 || plan.segment % options.unit_layers != 0))
      fsdp::fail<fsdp::ConfigError>(
          "model: segments of {} layers are recomputed, but units have {}: expected a multiple", plan.segment,
          options.unit_layers == 0 ? std::string("all layers, the embeddings and the head")
                                   : fsdp::formatted("{} layers", options.unit_layers));
    plan.panel = options.panel;
    plan.lanes = lanes;
    plan.attention_elements = options.attention_elements;
    plan.logits_elements = options.logits_elements;
    return plan;
  }
  std::vector<typename E::template Sharded<Block<Device, T>>> shard_blocks() {
    std::vector<typename E::template Sharded<Block<Device, T>>> blocks;
    auto const layers = context_.config.n_layer, together = options_.unit_layers;
    auto unit = root_;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      auto const name = fsdp::formatted("transformer.h.{}", layer);
      if (together > 0 && layer % together == 0) {
        auto const last = std::min(layer + together, layers) - 1;
        auto const& tuning = options_.tuning;
        unit = engine_.add_unit(last == layer ? name : fsdp::formatted("{}-{}", name, last),
                                {.frozen = !tuning.adapts() && !tuning.trains(last, layers)});
      }
      blocks.push_back(engine_.shard(Block<Device, T>(context_, layer), name, unit));
    }
    return blocks;
  }

  auto& block(std::int64_t layer) { return blocks_[static_cast<std::size_t>(layer)]; }
  /// Computes the activations of a segment again. @param last  its last layer, whose output nothing needs any more
  void recompute(Pass const& pass, std::int64_t last) {
    for (auto layer = plan_.first_of_segment(last); layer <= last; ++layer)
      block(layer).recompute(pass, activations_.block(static_cast<std::size_t>(layer)),
                             layer == last ? Forward::without_output : Forward::all);
  }

  double* train_loss() const { return scalars_.template as<double>(); }
  double* evaluation_loss() const { return scalars_.template as<double>() + 1; }

  Pass whole_pass() const {
    Pass pass;
    pass.batch = plan_.batch;
    pass.length = pass.capacity = plan_.sequence;
    return pass;
  }
  typename TokenFeed<Device>::Batch begin(std::int32_t const* tokens, std::int32_t const* targets, Pass const& pass) {
    cached_ = 0;  // the qkv buffers are about to change
    auto const ids = feed_.upload(engine_.compute(), tokens, targets, pass.rows());
    embedding_.forward(pass, ids.tokens, activations_.embedded());
    return ids;
  }
  double take(double* sum) {
    context_.device.copy_async(engine_.compute(), taken_.data(), sum, sizeof(double));
    context_.device.zero_async(engine_.compute(), sum, sizeof(double));
    context_.device.synchronize(engine_.compute());
    return *taken_.data();
  }

  E& engine_;
  ActivationPlan plan_;
  GptOptions options_;
  Gemm<Device> gemm_;
  Activations<Device, T> activations_;
  Context<Device, T> context_;
  TokenFeed<Device> feed_;
  fsdp::AccountedMemory<Device const> scalars_;  // training loss, evaluation loss
  fsdp::AccountedMemory<Device const> sampled_;  // (V)
  fsdp::Staging<Device, double> taken_;
  fsdp::UnitId root_;
  typename E::template Sharded<Embedding<Device, T>> embedding_;
  std::vector<typename E::template Sharded<Block<Device, T>>> blocks_;
  typename E::template Sharded<Head<Device, T>> head_;
  std::uint64_t mask_step_ = 0;
  std::int64_t mask_sequence_ = 0;
  std::int64_t evaluations_ = 0;
  std::int64_t cached_ = 0;
};

}  // namespace nanogpt
