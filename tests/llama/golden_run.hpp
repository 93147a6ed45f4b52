// SPDX-License-Identifier: Apache-2.0
// Small Llamas whose weights and tokens are formulas, as make_golden.py has them, and their training on ranks that are
// threads.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "llama/instances/layers_host.hpp"
#include "llama/llama_config.hpp"
#include "llama/model.hpp"
#include "tests/golden/formulas.hpp"

namespace llama_golden {

inline constexpr std::int64_t sequences = 4, length = 24;  ///< of a batch over all ranks
inline constexpr std::size_t steps = 20;
inline constexpr float rate = 1e-3f, beta1 = 0.9f, beta2 = 0.95f, decay = 0.1f, clip = 1.0f;
inline constexpr std::int64_t lora_rank = 8;
inline constexpr float lora_scale = 2.0f;
inline constexpr std::size_t prompt = 6, text_length = 20;

/// Losses of a kind of run: "full", "adapters", "some_adapters" (q_proj, v_proj, up_proj), "frozen" (the embedding and
/// the lowest layer) are of training; "untrained" and "bf16" are those of the same batches without it.
struct Losses {
  std::string_view shape, kind;
  std::array<double, steps> values{};
};
/// The gradient of a tensor in the first step.
struct Row {
  std::string_view shape, kind, tensor;
  golden::Fingerprint print;
};
/// Six tokens and their greedy continuation.
struct Text {
  std::string_view shape;
  std::array<std::int32_t, text_length> ids{};
};

inline constexpr std::string_view shapes[] = {"grouped",   "nine_three", "eight_one",
                                              "four_four", "wide_heads", "llama3"};

inline llama::LlamaConfig config_of(std::string_view shape) {
  llama::LlamaConfig c;
  c.num_hidden_layers = 2;
  c.max_position_embeddings = 64;
  c.rms_norm_eps = 1e-5;
  auto const set = [&](std::int64_t hidden, std::int64_t intermediate, std::int64_t heads, std::int64_t kv_heads,
                       std::int64_t size, std::int64_t vocabulary, double theta, bool tied) {
    c.hidden_size = hidden, c.intermediate_size = intermediate;
    c.num_attention_heads = heads, c.num_key_value_heads = kv_heads, c.head_dim = size;
    c.vocab_size = vocabulary, c.rope_theta = theta, c.tie_word_embeddings = tied;
  };
  if (shape == "grouped") set(64, 172, 8, 4, 8, 300, 1e4, true);
  if (shape == "nine_three") set(576, 384, 9, 3, 64, 131, 1e5, true);
  if (shape == "eight_one") set(512, 352, 8, 1, 64, 128, 1e4, false);
  if (shape == "four_four") set(512, 224, 4, 4, 128, 140, 1e6, false);
  if (shape == "wide_heads") set(96, 120, 6, 2, 32, 97, 5e5, false);
  if (shape == "llama3") {
    set(48, 130, 6, 2, 8, 200, 5e5, false);
    c.rope_scaling = {transformer::RopeScaling::Kind::llama3, 8.0, 1.0, 4.0, 16};
  }
  return c;
}

/// Elements first, first + 1, ... of a tensor.
inline void initial(std::string_view name, std::int64_t first, std::span<float> out, std::int64_t width) {
  golden::Hashes const hash(name);
  bool const norm = name.find("norm") != name.npos;
  float scale = norm || width < 128 ? 0x1p-3f : 0x1p-4f;
  if (name.find("lora_B") != name.npos) scale = 0x1p-5f;
  for (auto& value : out) {
    auto const centred = static_cast<std::int32_t>(hash(first++) >> 48) - 32768;
    value = static_cast<float>(centred) * 0x1p-15f * scale + (norm ? 1.0f : 0.0f);
  }
}
template <class E>
void begin(E& engine, std::int64_t width) {
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    initial(tensor.name, first, out, width);
    return true;
  });
}

/// The token at a place of a sequence. Those at odd places are half of the one before.
inline std::int32_t token(std::int64_t vocabulary, std::size_t step, std::int64_t sequence, std::int64_t place) {
  static golden::Hashes const hash("text");
  if (place % 2 == 1) return token(vocabulary, step, sequence, place - 1) / 2;
  auto const at = (static_cast<std::int64_t>(step) * sequences + sequence) * (length + 1) + place;
  return static_cast<std::int32_t>(hash(at) % static_cast<std::uint64_t>(vocabulary));
}

using Tensors = std::map<std::string, std::vector<float>>;
inline auto keep(Tensors& tensors) {
  return [&tensors](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    tensors[tensor.name] = {values.begin(), values.end()};
  };
}

inline transformer::Tuning adapters(std::vector<std::string> targets = {}) {
  transformer::Tuning tuning;
  tuning.lora_rank = lora_rank;
  tuning.lora_scale = lora_scale;
  tuning.lora_targets = std::move(targets);
  return tuning;
}
inline transformer::Tuning frozen(std::int64_t layers) {
  transformer::Tuning tuning;
  tuning.frozen_layers = layers;
  return tuning;
}

struct Run {
  std::string_view shape;
  fsdp::ShardingStrategy strategy = fsdp::FullShard{};
  int ranks = 1;

  std::int64_t recompute = 0, segment = 1, unit_layers = 1;
  transformer::Tuning tuning{};
  std::size_t steps = llama_golden::steps;
};

/// On rank 0: mean losses of the steps, and whole tensors.
struct Outcome {
  std::vector<double> losses;
  Tensors gradients;         ///< of the first step
  Tensors initial, weights;  ///< before the first step, and after the last
  bool operator==(Outcome const&) const = default;
};

/// A rank's engine, model and part of every batch.
template <class P>
class Model {
 public:
  using Comm = fsdp::local::Communicator<fsdp::host::Device>;
  using Engine = fsdp::Engine<Comm, P>;

  Model(Comm comm, Run const& run)
      : config_(config_of(run.shape)),
        mesh_(std::move(comm)),
        engine_(mesh_, run.strategy),
        batch_(sequences / engine_.world_size()),
        model_(engine_, config_, batch_, length, options(run)),
        tokens_(static_cast<std::size_t>(batch_ * length)),
        targets_(tokens_) {
    begin(engine_, config_.hidden_size);
  }
  Engine& engine() { return engine_; }
  llama::Llama<Engine>& model() { return model_; }
  std::int32_t const* tokens() const { return tokens_.data(); }

  void forward_backward(std::size_t step) {
    fill(step);
    model_.forward_backward(tokens_.data(), targets_.data());
  }
  /// The mean over the ranks.
  double read_loss() { return engine_.mean_over_ranks({model_.read_loss()})[0]; }
  double evaluate(std::size_t step) {
    fill(step);
    model_.evaluate(tokens_.data(), targets_.data());
    return engine_.mean_over_ranks({model_.read_evaluation()})[0];
  }
  void fill(std::size_t step) {
    for (std::int64_t i = 0; i < batch_ * length; ++i) {
      auto const sequence = engine_.rank() * batch_ + i / length, place = i % length;
      tokens_[static_cast<std::size_t>(i)] = token(config_.vocab_size, step, sequence, place);
      targets_[static_cast<std::size_t>(i)] = token(config_.vocab_size, step, sequence, place + 1);
    }
  }

 private:
  llama::DecoderOptions options(Run const& run) const {
    llama::DecoderOptions options;
    options.recompute = run.recompute;
    options.segment = run.segment;
    options.unit_layers = run.unit_layers;
    options.tuning = run.tuning;
    options.panel = 8;
    options.logits_elements = 12 * config_.padded_vocab();  // several parts
    return options;
  }

  llama::LlamaConfig config_;
  fsdp::Mesh<Comm> mesh_;
  Engine engine_;
  std::int64_t batch_;
  llama::Llama<Engine> model_;
  std::vector<std::int32_t> tokens_, targets_;
};

inline constexpr fsdp::AdamWOptions adamw_options{.lr = rate, .beta1 = beta1, .beta2 = beta2, .weight_decay = decay};

template <class P = fsdp::Fp32>
Outcome train(Run const& run) {
  Outcome outcome;
  fsdp::local::run(run.ranks, fsdp::host::Device{}, [&](typename Model<P>::Comm comm) {
    Model<P> model(std::move(comm), run);
    auto& engine = model.engine();
    Outcome mine;
    model.forward_backward(0);
    model.read_loss();
    fsdp::export_gradients(engine, keep(mine.gradients));
    engine.discard_gradients();
    fsdp::AdamW adamw(engine, adamw_options);
    fsdp::export_full(engine, keep(mine.initial));
    for (std::size_t step = 0; step < run.steps; ++step) {
      model.forward_backward(step);
      adamw.step(fsdp::clip_grad_norm(engine, clip));
      mine.losses.push_back(model.read_loss());
    }
    fsdp::export_full(engine, keep(mine.weights));
    if (engine.rank() == 0) outcome = std::move(mine);
  });
  return outcome;
}

}  // namespace llama_golden
