// SPDX-License-Identifier: Apache-2.0
// The class Program of llama: see [Note: What a program is].
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "llama/formats/adapter_files.hpp"
#include "llama/formats/config_json.hpp"
#include "llama/formats/start.hpp"
#include "llama/model.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/training/model_files.hpp"
#include "transformer/training/preparation.hpp"
#include "transformer/weights/engine_weights.hpp"

namespace llama {

/// Bytes of tensors in a file of weights: HuggingFace's limit.
inline constexpr std::int64_t largest_file = 5'000'000'000;

struct Program {
  using Config = LlamaConfig;
  using Opened = OpenedLlama;
  template <class E>
  using Model = Llama<E>;

  static LlamaConfig config(Settings const& settings, std::int64_t, std::optional<LlamaConfig> const& model) {
    return model ? *model : read_config(settings);
  }
  static LlamaConfig config(RunState const& run) { return model_config(run); }
  static std::string model_text(LlamaConfig const& config) { return llama::model_text(config); }
  static std::vector<std::pair<std::string, std::int64_t>> numbers(LlamaConfig const& model) {
    return {{"num_hidden_layers", model.num_hidden_layers},
            {"num_attention_heads", model.num_attention_heads},
            {"num_key_value_heads", model.num_key_value_heads},
            {"hidden_size", model.hidden_size},
            {"intermediate_size", model.intermediate_size},
            {"vocab_size", model.vocab_size},
            {"parameters", model.parameters()}};
  }
  static std::int64_t counted_parameters(LlamaConfig const& config) { return config.parameters(); }
  /// 2 FLOP a parameter of a matrix in forward; in backward 2 for each that backward comes to, and 2 for each that
  /// trains. Attention: 4 H Q T in forward, 8 H Q T in backward. Adapters are left out.
  static double flop_per_token(LlamaConfig const& config, Settings const& settings) {
    auto const tuning = tuning_of(settings);
    auto const layers = config.num_hidden_layers, matrices = config.layer_matrices();
    auto const passed = layers - tuning.layers_below(layers), head = config.table_parameters();
    auto const trained =
        (tuning.adapts() ? 0 : passed * matrices) + (tuning.trains_head(config.tie_word_embeddings) ? head : 0);
    auto const products = 2 * (head + layers * matrices) + 2 * (head + passed * matrices) + 2 * trained;
    auto const attention = config.heads().width() * settings.block_size * (4 * layers + 8 * passed);
    return static_cast<double>(products) + static_cast<double>(attention);
  }

  /// The prompt and the new tokens.
  static std::int64_t longest_text(Settings const& settings, LlamaConfig const& config, SampleText const& text) {
    return std::min(config.longest_sequence(), static_cast<std::int64_t>(text.start.size()) + settings.max_new_tokens);
  }

  static OpenedLlama open(Settings const& settings) { return open_model(settings); }
  static std::optional<OpenedLlama> open_base(Settings const& settings, RunState const& run) {
    return llama::open_base(settings, run);
  }
  /// The setting `model` names the folder.
  static std::string origin(OpenedLlama const&) { return {}; }
  static std::string origin(RunState const&) { return {}; }
  static bool leaves_frozen_weights(Settings const& settings) {
    return settings.lora_rank > 0 || settings.freeze_layers != 0;
  }
  static void adopt(Settings& settings) { adopt_model(settings, read_config(settings)); }
  static void adopt(Settings& settings, RunState const& run) { adopt_model(settings, model_config(run)); }
  static void adopt(Settings& settings, OpenedLlama const& model) { adopt_model(settings, model.config); }
  static std::string fingerprint(OpenedLlama const& model) { return llama::fingerprint(model); }
  static std::shared_ptr<Tokenizer const> tokenizer(OpenedLlama const& model, Settings const&) {
    return open_tokenizer(model);
  }
  static SampleRequest<OpenedLlama> sample_request(Settings const& settings, std::int64_t ranks) {
    return read_sample_request(settings, ranks);
  }
  /// The data's tokens must be those of the model's tokenizer.
  static void expect_data(Preparation<Program>& ready) {
    auto const& meta = ready.dataset->meta;
    ready.tokenizer = transformer::open_tokenizer(meta);
    if (ready.tokenizer == nullptr)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'dataset': the data have no meta.json that names a tokenizer, so their vocabulary is not known; "
          "write them with: llama prepare --model=FOLDER --dataset={} --data=FILE",
          ready.settings.dataset);
    if (!ready.pretrained || !has_tokenizer(ready.pretrained->tokenizer)) return;
    auto const of_model = open_tokenizer(*ready.pretrained);
    if (vocabulary_checksum(*of_model) != ready.vocabulary ||
        of_model->text_template() != ready.tokenizer->text_template() ||
        of_model->end_of_text() != ready.tokenizer->end_of_text())
      fsdp::fail<fsdp::ConfigError>(
          "setting 'dataset': '{}' was prepared with another tokenizer than that in '{}'; run llama prepare again with "
          "--model={}",
          ready.settings.dataset, ready.pretrained->tokenizer.string(), ready.settings.model);
  }
  static std::string described(LlamaConfig const& config, OpenedLlama const&) {
    return fmt::format("{} layers, {} heads of {}, {} of them for keys and values, hidden size {}, vocabulary {}",
                       config.num_hidden_layers, config.num_attention_heads, config.head_dim,
                       config.num_key_value_heads, config.hidden_size, config.vocab_size);
  }

  template <class E>
  static void load_weights(E& engine, OpenedLlama const& model) {
    transformer::load_weights(engine, *model.weights);
  }
  static std::string_view saved_name(Settings const& settings) {
    return settings.lora_rank > 0 ? adapter_weights_name : weights_name;
  }
  /// The folder becomes one of HuggingFace's: the model, or its adapters alone as peft has them.
  template <class E>
  static void save_model(E& engine, std::filesystem::path const& folder, Settings const& settings,
                         Preparation<Program> const& ready, RunState const& run) {
    auto const tuning = tuning_of(settings);
    bool const bf16 = run.dtype == "bfloat16";
    if (tuning.adapts())
      save_weights(engine, {folder / adapter_weights_name}, tuning, {Weights::adapters, bf16, peft_name});
    else
      save_weights(engine, {folder / weights_name, largest_file}, tuning, {Weights::merged, bf16, {}});
    fsdp::checkpoint::agreed(engine.world(), "the model's description", [&] {
      if (engine.rank() != 0) return "";
      if (tuning.adapts()) {
        fsdp::checkpoint::replace_text_file(folder / adapter_config_name,
                                            adapter_config_text(settings, ready.settings.model));
      } else {
        // A run that is resumed has the config.json that its first start has written.
        auto const original = ready.pretrained ? ready.pretrained->original : std::filesystem::path();
        auto text = changed_config_text({original, folder}, ready.config, run.dtype);
        if (text.empty())
          text = huggingface_config_text(ready.config, std::nullopt, ready.tokenizer->end_of_text(), run.dtype);
        fsdp::checkpoint::replace_text_file(folder / "config.json", text);
      }
      return "";
    });
  }
  /// save_vocabulary has copied the tokenizer's files.
  static void save_tokenizer(std::filesystem::path const& folder, Preparation<Program> const& ready) {
    if (!ready.pretrained) return;
    auto files = files_of_use_in(ready.pretrained->original);
    std::erase_if(files, [](auto const& file) {  // a folder of templates would not be set aside with the run
      auto const names = names_of_tokenizer_files();
      return file.has_parent_path() || std::find(names.begin(), names.end(), file.string()) != names.end();
    });
    copy_files(ready.pretrained->original, files, folder);
  }
};

}  // namespace llama
