// SPDX-License-Identifier: Apache-2.0
// The class Program of nanogpt: see [Note: What a program is].
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/engine.hpp"
#include "nanogpt/deploy/work.hpp"
#include "nanogpt/formats/saved_model.hpp"
#include "nanogpt/formats/start.hpp"
#include "nanogpt/gpt_config.hpp"
#include "nanogpt/model.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/weights/engine_weights.hpp"

namespace nanogpt {

struct Program {
  using Config = GptConfig;
  using Opened = OpenedModel;
  template <class E>
  using Model = Gpt<E>;

  /// The vocabulary and the GELU are those of the model that training begins with.
  static GptConfig config(Settings const& settings, std::int64_t vocab_size, std::optional<GptConfig> const& model) {
    auto config = model_config(settings, vocab_size);
    if (model) config.vocab_size = model->vocab_size, config.activation = model->activation;
    return config;
  }
  static GptConfig config(RunState const& run) { return model_config(run); }
  static std::string model_text(GptConfig const& config) { return nanogpt::model_text(config); }
  static std::vector<std::pair<std::string, std::int64_t>> numbers(GptConfig const& model) {
    return {{"n_layer", model.n_layer},       {"n_head", model.n_head},         {"n_embd", model.n_embd},
            {"block_size", model.block_size}, {"vocab_size", model.vocab_size}, {"parameters", model.parameters()}};
  }
  static std::int64_t counted_parameters(GptConfig const& config) { return config.parameters_without_positions(); }
  static double flop_per_token(GptConfig const& config, Settings const& settings) {
    return config.flop_per_token(tuning_of(settings));
  }
  static std::vector<fsdp::plan::Work> work(GptConfig const& config, ActivationPlan const& plan,
                                            std::size_t element_bytes) {
    return work_of(config, plan, element_bytes);
  }

  static std::int64_t longest_text(Settings const&, GptConfig const& config, SampleText const&) {
    return config.block_size;
  }

  static OpenedModel open(Settings const& settings) { return open_pretrained(settings); }
  /// A run's checkpoints have all of its weights.
  static std::optional<OpenedModel> open_base(Settings const&, RunState const&) { return std::nullopt; }
  static std::string origin(OpenedModel const& model) {
    return model.original.empty() ? std::string()
                                  : std::filesystem::absolute(model.original).lexically_normal().string();
  }
  /// Kept while the folder is not there.
  static std::string origin(RunState const& run) {
    return run.origin.empty() ? original_folder(run).string() : run.origin;
  }
  static bool leaves_frozen_weights(Settings const&) { return false; }
  static void expect_data(Preparation<Program>&) {}
  static std::string_view saved_name(Settings const&) { return weights_name; }
  static void adopt(Settings&) {}
  static void adopt(Settings& settings, RunState const& run) { adopt_model(settings, run); }
  static void adopt(Settings& settings, OpenedModel const& model) { adopt_model(settings, model); }
  static std::string fingerprint(OpenedModel const& model) { return nanogpt::fingerprint(model); }
  static std::shared_ptr<Tokenizer const> tokenizer(OpenedModel const& model, Settings const& settings) {
    return open_tokenizer(model, settings);
  }
  static SampleRequest<OpenedModel> sample_request(Settings const& settings, std::int64_t ranks) {
    return read_sample_request(settings, ranks);
  }
  static std::string described(GptConfig const& config, OpenedModel const& from) {
    return fmt::format("n_layer {}, n_head {}, n_embd {}, vocab_size {}, {} of {} positions, {}", config.n_layer,
                       config.n_head, config.n_embd, config.vocab_size, config.block_size, from.config.block_size,
                       name(config.activation));
  }

  template <class E>
  static void load_weights(E& engine, OpenedModel const& model) {
    transformer::load_weights(engine, *model.weights);
  }
  template <class E>
  static void save_model(E& engine, std::filesystem::path const& folder, Settings const& settings,
                         Preparation<Program> const& ready, RunState const& run) {
    auto const tuning = tuning_of(settings);
    save_weights(engine, {folder / weights_name}, tuning);
    if (tuning.adapts()) save_weights(engine, {folder / adapters_name}, tuning, {.which = Weights::adapters});
    fsdp::checkpoint::agreed(engine.world(), "config.json", [&] {
      ModelState const state{run.iteration, run.train_loss, run.val_loss, run.best_val_loss};
      if (engine.rank() == 0) save_model_config(folder, ready.config, state, &settings, ready.dataset->meta);
      return "";
    });
  }
  /// Token files without a vocabulary are GPT-2's: the model keeps the tokenizer that it came with.
  static void save_tokenizer(std::filesystem::path const& folder, Preparation<Program> const& ready) {
    if (ready.dataset->meta.path.empty() && ready.pretrained && !ready.pretrained->tokenizer.none())
      copy_tokenizer(ready.pretrained->tokenizer, folder);
  }
};

}  // namespace nanogpt
