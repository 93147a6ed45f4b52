// SPDX-License-Identifier: Apache-2.0
// A decoder-only transformer on an engine: a training micro-step, evaluation, and decoding with a cache of keys and
// values. What its layers compute is the model's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/options.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/data/token_feed.hpp"
#include "transformer/layers/activation_plan.hpp"
#include "transformer/layers/classifier.hpp"
#include "transformer/layers/options.hpp"
#include "transformer/layers/pass.hpp"
#include "transformer/layers/shape.hpp"
#include "transformer/math/gemm.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

/// The units are: every block or, as the options say, neighbouring blocks; the embedding and the head, together in the
/// root unit if they share a matrix, else each by itself. If all blocks share a unit, it is the root with everything.
///
/// @tparam E  fsdp::Engine, which must outlive the model
/// @tparam M  a model's layers and their names:
/// @code
///   using Config = ...;                          // config.validate() throws fsdp::ConfigError
///   template <class D, class T> using Embedding, Block, Head, Activations;
///   template <class D, class T> using Context;   // a LayerContext
///   static DecoderShape shape(Config const&);
///   static constexpr std::string_view embedding, blocks, head;  // prefixes of tensor names; a block's: "blocks.3"
///   static void forward(Decoder&, Pass const&, std::int32_t const* tokens, End const&);  // calls the layers in order
///   static void backward(Decoder&, Pass const&, std::int32_t const* tokens, LossTarget const&, double gradient_scale);
/// @endcode
/// @note Collective: every member function that computes is called by all ranks, with data of their own.
template <class E, class M>
class Decoder {
 public:
  using Device = typename E::Device;
  using T = typename E::Precision::Param;
  using Config = typename M::Config;

  /// @param batch   B: sequences of a micro-step
  /// @param length  T: tokens of a sequence; also the longest text that is decoded, for whose keys there is room
  /// @throws fsdp::ConfigError if the shape is impossible or `length` exceeds its positions
  Decoder(E& engine, Config const& config, std::int64_t batch, std::int64_t length, DecoderOptions options = {})
      : engine_(engine),
        shape_(checked_shape(config, options.tuning)),
        plan_(plan_activations(shape_, batch, length, options, lanes_of(engine.device()))),
        options_(std::move(options)),
        gemm_(engine.device()),
        activations_(engine.device(), engine.account(), config, plan_),
        context_(engine.device(), &gemm_, config, shape_, plan_, activations_.workspace(), options_.tuning),
        feed_(engine.device(), engine.account(), batch * length),
        scalars_(context_.device, engine.account(), fsdp::MemoryTag::scalars, 2 * sizeof(double)),
        sampled_(context_.device, engine.account(), fsdp::MemoryTag::workspace,
                 static_cast<std::size_t>(shape_.vocabulary) * sizeof(T)),
        taken_(context_.device, 1),
        root_(has_root() ? engine.add_unit("root") : fsdp::UnitId{}),
        embedding_(
            engine.shard(Embedding(context_), M::embedding, end_unit("embedding", tuning().trains_embeddings()))),
        blocks_(shard_blocks()),
        head_(engine.shard(Head(context_), M::head, end_unit("head", !tuning().adapts()))) {
    for (auto layer = plan_.first; plan_.segment > 1 && plan_.recomputes(layer); layer += plan_.segment)
      engine_.recompute_segment(block(layer), block(plan_.last_of_segment(layer)));
    context_.device.zero_async(engine_.compute(), scalars_.data(), scalars_.bytes());
  }
  Decoder(Decoder const&) = delete;
  Decoder& operator=(Decoder const&) = delete;
  ~Decoder() {
    try {
      context_.device.synchronize(engine_.compute());  // nothing may use the activations any more
    } catch (...) {                                    // the stream's error has been reported to whoever used it
    }
  }

  Config const& config() const { return context_.config; }
  ActivationPlan const& plan() const { return plan_; }
  Tuning const& tuning() const { return options_.tuning; }

  // The layers, for M::forward and M::backward.
  std::int64_t layers() const { return shape_.layers; }
  auto& embedding() { return embedding_; }
  auto& block(std::int64_t layer) { return blocks_[static_cast<std::size_t>(layer)]; }
  auto& head() { return head_; }
  typename M::template Activations<Device, T> const& activations() const { return activations_; }
  /// Before the backward of a segment's last layer: computes the segment's activations again, but the last output,
  /// which nothing needs any more. Does nothing before other layers.
  void recompute_segment(Pass const& pass, std::int64_t layer) {
    if (plan_.segment == 1 || !plan_.recomputes(layer) || layer != plan_.last_of_segment(layer)) return;
    for (auto below = plan_.first_of_segment(layer); below <= layer; ++below)
      block(below).recompute(pass, activations_.block(below), below == layer ? Forward::without_output : Forward::all);
  }

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
    pass.mask = {plan_.dropout, options_.seed, mask_step_++, 0};
    pass.sequence = mask_sequence_;
    auto const ids = upload(tokens, targets, pass);
    M::forward(*this, pass, ids.tokens, Normalise{});
    M::backward(*this, pass, ids.tokens, LossTarget{ids.targets, train_loss(), loss_weight}, gradient_scale);
    feed_.release(engine_.compute());
  }

  /// Chooses the dropout masks of the next micro-step; each one after it takes the next step. A sequence's mask depends
  /// on the seed, the step and its number alone, whoever computes it.
  /// @param step  below 2^40
  /// @param sequence  number of the batch's first sequence; no two of a step should share one
  void set_dropout_masks(std::uint64_t step, std::int64_t sequence = 0) {
    mask_step_ = step;
    mask_sequence_ = sequence;
  }

  /// The loss that micro-steps have added up since the last call; then starts again from 0.
  /// @note Stream: waits for compute.
  double read_loss() { return take(train_loss()); }

  /// Forgets that loss.
  /// @note Stream: only enqueues.
  void discard_loss() { context_.device.zero_async(engine_.compute(), train_loss(), sizeof(double)); }

  /// Adds weight * mean cross-entropy of a batch, without dropout, to what read_evaluation() gives. Ends a decoded
  /// text.
  /// @param tokens, targets  (B, T), in host memory
  /// @note Stream: only enqueues.
  void evaluate(std::int32_t const* tokens, std::int32_t const* targets, double weight = 1.0) {
    auto const scope = engine_.evaluation();
    Pass const pass = whole_pass();
    auto const ids = upload(tokens, targets, pass);
    M::forward(*this, pass, ids.tokens, LossTarget{ids.targets, evaluation_loss(), weight});
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
    M::forward(*this, pass, upload(tokens, nullptr, pass).tokens, Sample<T>{logits});
    feed_.release(engine_.compute());
    cached_ = pass.position + count;

    std::vector<T> copy(static_cast<std::size_t>(shape_.vocabulary));
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

 protected:
  using Embedding = typename M::template Embedding<Device, T>;
  using Block = typename M::template Block<Device, T>;
  using Head = typename M::template Head<Device, T>;

  E& engine() { return engine_; }

 private:
  static DecoderShape checked_shape(Config const& config, Tuning const& tuning) {
    config.validate();
    expect_targets(tuning, Block::linear_layers);
    return M::shape(config);
  }
  /// Some modules share the unit "root".
  bool has_root() const { return shape_.tied || options_.unit_layers == 0; }
  /// The unit of the embedding or of the head.
  fsdp::UnitId end_unit(std::string_view name, bool trains) {
    return has_root() ? root_ : engine_.add_unit(name, {.frozen = !trains});
  }
  std::vector<typename E::template Sharded<Block>> shard_blocks() {
    std::vector<typename E::template Sharded<Block>> blocks;
    auto const layers = shape_.layers, together = options_.unit_layers;
    auto unit = root_;
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      auto const name = fsdp::formatted("{}.{}", M::blocks, layer);
      if (together > 0 && layer % together == 0) {
        auto const last = std::min(layer + together, layers) - 1;
        unit = engine_.add_unit(last == layer ? name : fsdp::formatted("{}-{}", name, last),
                                {.frozen = !tuning().adapts() && !tuning().trains(last, layers)});
      }
      blocks.push_back(engine_.shard(Block(context_, layer), name, unit));
    }
    return blocks;
  }

  double* train_loss() const { return scalars_.template as<double>(); }
  double* evaluation_loss() const { return scalars_.template as<double>() + 1; }

  Pass whole_pass() const {
    Pass pass;
    pass.batch = plan_.batch;
    pass.length = pass.capacity = plan_.sequence;
    return pass;
  }
  using Ids = typename TokenFeed<Device>::Batch;
  /// Begins a pass: puts its tokens on the device.
  Ids upload(std::int32_t const* tokens, std::int32_t const* targets, Pass const& pass) {
    cached_ = 0;  // the qkv buffers are about to change
    return feed_.upload(engine_.compute(), tokens, targets, pass.rows());
  }
  double take(double* sum) {
    context_.device.copy_async(engine_.compute(), taken_.data(), sum, sizeof(double));
    context_.device.zero_async(engine_.compute(), sum, sizeof(double));
    context_.device.synchronize(engine_.compute());
    return *taken_.data();
  }

  E& engine_;
  DecoderShape shape_;
  ActivationPlan plan_;
  DecoderOptions options_;
  Gemm<Device> gemm_;
  typename M::template Activations<Device, T> activations_;
  typename M::template Context<Device, T> context_;
  TokenFeed<Device> feed_;
  fsdp::AccountedMemory<Device const> scalars_;  // training loss, evaluation loss
  fsdp::AccountedMemory<Device const> sampled_;  // (V)
  fsdp::PinnedArray<Device, double> taken_;
  fsdp::UnitId root_;
  typename E::template Sharded<Embedding> embedding_;
  std::vector<typename E::template Sharded<Block>> blocks_;
  typename E::template Sharded<Head> head_;
  std::uint64_t mask_step_ = 0;
  std::int64_t mask_sequence_ = 0;
  std::int64_t evaluations_ = 0;
  std::int64_t cached_ = 0;
};

}  // namespace transformer
