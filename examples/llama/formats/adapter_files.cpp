// SPDX-License-Identifier: Apache-2.0
#include "llama/formats/adapter_files.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "fsdp/safetensors.hpp"
#include "llama/llama_config.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/weights/config_fields.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::Json;

constexpr std::string_view peft_prefix = "base_model.model.", pickle_name = "adapter_model.bin";

// Keys of adapter_config.json that are read, or must have a value without effect.
constexpr std::array keys_of_adapters = std::to_array<std::string_view>({
    // clang-format off
    "peft_type", "task_type", "r", "lora_alpha", "base_model_name_or_path", "target_modules", "layers_to_transform",
    "layers_pattern", "init_lora_weights", "bias", "lora_bias", "use_dora", "use_rslora", "use_qalora",
    "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layer_replication",
    "target_parameters", "trainable_token_indices", "alora_invocation_tokens"
    // clang-format on
});
// Keys without effect: names and versions, dropout of a training that is over, and details of features that
// keys_of_adapters refuses or that only begin a training. Others, such as arrow_config, kasa_config and velora_config,
// change what an adapter computes.
constexpr std::array adapter_keys_without_effect = std::to_array<std::string_view>(
    {"auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config",
     "lora_dropout", "lora_ga_config", "megatron_core", "merge_weights", "peft_version", "qalora_group_size",
     "revision"});

/// Reads which layers have adapters.
void read_targets(ConfigFields const& json, AdapterFolder& read) {
  auto const& targets = json.fields().at("target_modules");
  read.all_linear_layers = targets == "all-linear";
  if (!read.all_linear_layers && !targets.is_array())
    json.wrong("target_modules", "a list of names, or \"all-linear\": patterns are not supported");
  if (targets.is_array())
    for (auto const& target : targets) {
      if (!target.is_string()) json.wrong("target_modules", "a list of names");
      read.targets.push_back(target.get<std::string>());
    }
  if (!json.has("layers_to_transform")) return;
  auto const& layers = json.json()["layers_to_transform"];
  for (auto const& layer : layers.is_array() ? layers : Json::array({layers})) {
    if (!layer.is_number_integer()) json.wrong("layers_to_transform", "numbers of layers");
    read.layers.push_back(layer.get<std::int64_t>());
  }
  if (!json.has("layers_pattern")) return;
  auto const& pattern = json.json()["layers_pattern"];
  if (pattern != "layers" && pattern != Json::array({"layers"}) && pattern != "" && pattern != Json::array())
    json.wrong("layers_pattern", "\"layers\"");
}

}  // namespace

std::string peft_name(std::string_view tensor) { return std::string(peft_prefix) + std::string(tensor); }

std::string adapter_config_text(Settings const& settings, fs::path const& base) {
  auto const tuning = tuning_of(settings);
  Json targets = Json::array();
  for (auto const layer : linear_layers)
    if (tuning.adapts(layer)) targets.push_back(layer.substr(layer.find('.') + 1));
  Json const json{{"peft_type", "LORA"},
                  {"task_type", "CAUSAL_LM"},
                  {"base_model_name_or_path", base.string()},
                  {"r", settings.lora_rank},
                  {"lora_alpha", settings.lora_alpha},
                  {"lora_dropout", 0.0},
                  {"target_modules", targets},
                  {"bias", "none"},
                  {"fan_in_fan_out", false},
                  {"inference_mode", true}};
  return json.dump(2) + "\n";
}

bool is_adapter_folder(fs::path const& folder) {
  std::error_code error;
  return fs::is_regular_file(folder / adapter_config_name, error);
}

bool AdapterFolder::adapts(std::string_view matrix) const {
  matrix.remove_suffix(std::string_view(".weight").size());
  if (all_linear_layers)
    return std::any_of(linear_layers.begin(), linear_layers.end(),
                       [&](auto const& layer) { return Tuning::names(layer, matrix); });
  if (std::find(targets.begin(), targets.end(), matrix) != targets.end()) return true;
  if (std::none_of(targets.begin(), targets.end(), [&](auto const& target) { return Tuning::names(target, matrix); }))
    return false;
  if (layers.empty()) return true;
  constexpr std::string_view before_layer = "model.layers.";
  std::int64_t layer = -1;
  if (matrix.starts_with(before_layer))
    std::from_chars(matrix.data() + before_layer.size(), matrix.data() + matrix.size(), layer);
  return std::find(layers.begin(), layers.end(), layer) != layers.end();
}

AdapterFolder read_adapter_config(fs::path const& folder) {
  auto const what = fsdp::formatted("'{}'", (folder / adapter_config_name).string());
  auto const object =
      fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(folder / adapter_config_name), what);
  ConfigFields const json(object, what);
  auto const& fields = json.fields();
  if (fields.text("peft_type") != "LORA") json.wrong("peft_type", "\"LORA\"");
  json.expect("task_type", "CAUSAL_LM");
  for (auto const* const flag : {"use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias"})
    if (json.flag(flag, false)) json.wrong(flag, "false");
  json.expect("bias", "none");
  for (auto const* const name :
       {"rank_pattern", "alpha_pattern", "modules_to_save", "exclude_modules", "layer_replication", "target_parameters",
        "trainable_token_indices", "alora_invocation_tokens"})
    json.expect_none(name);
  // Initial values that peft computes again when it loads adapters, and subtracts from the model's weights.
  if (json.has("init_lora_weights")) {
    auto const& values = object["init_lora_weights"];
    constexpr std::array plain{"gaussian", "eva", "orthogonal", "mica"};
    if (!values.is_boolean() && std::find(plain.begin(), plain.end(), values) == plain.end())
      json.wrong("init_lora_weights",
                 "true, false, \"gaussian\", \"eva\", \"orthogonal\" or \"mica\": others change the model's weights "
                 "(save such adapters with path_initial_model_for_weight_conversion)");
  }
  AdapterFolder read;
  read_targets(json, read);
  json.expect_known({keys_of_adapters, adapter_keys_without_effect});
  read.rank = fields.whole("r", 1, 65536);
  read.alpha = json.number("lora_alpha");
  if (json.has("base_model_name_or_path")) read.base = fields.text("base_model_name_or_path");
  std::error_code error;
  if (read.base.is_relative() && !fs::is_directory(read.base, error) && fs::is_directory(folder / read.base, error))
    read.base = folder / read.base;
  return read;
}

HostAdapters read_adapters(fs::path const& folder, LlamaConfig const& config) {
  auto const described = read_adapter_config(folder);
  auto const path = folder / adapter_weights_name;
  std::error_code error;
  if (!fs::exists(path, error) && fs::exists(folder / pickle_name, error))
    fsdp::fail<fsdp::ConfigError>(
        "'{}' has no {} ({} is a pickle and is not read; load it with peft and write safetensors with "
        "save_pretrained(...))",
        folder.string(), adapter_weights_name, pickle_name);
  fsdp::checkpoint::SafetensorsFile const file(path);
  HostAdapters adapters;
  adapters.scale = static_cast<float>(described.alpha / static_cast<double>(described.rank));
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const matrices = llama_tensors(config);
  for (auto const& entry : file.entries()) {
    auto const ours = entry.name.starts_with(peft_prefix) ? entry.name.substr(peft_prefix.size()) : entry.name;
    if (!is_adapter(ours))
      fsdp::fail<fsdp::ConfigError>("{}: expected tensors of adapters (lora_A, lora_B), got '{}'", what, entry.name);
    auto const name = adapted_weight(ours);
    auto const matrix =
        std::find_if(matrices.begin(), matrices.end(), [&](auto const& tensor) { return tensor.name == name; });
    if (matrix == matrices.end() || matrix->shape.size() != 2)
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}': the model has no matrix '{}'", what, entry.name, name);
    if (!described.adapts(name))
      fsdp::fail<fsdp::ConfigError>(
          "{}: tensor '{}': expected adapters of the layers that {} names in target_modules and layers_to_transform, "
          "got another one",
          what, entry.name, adapter_config_name);
    bool const is_a = ours.ends_with(lora_a);
    std::vector<std::int64_t> const shape =
        is_a ? std::vector{described.rank, matrix->shape[1]} : std::vector{matrix->shape[0], described.rank};
    auto& adapter = adapters.of[name];
    adapter.rank = described.rank, adapter.in = matrix->shape[1];
    auto& values = is_a ? adapter.a : adapter.b;
    values.resize(static_cast<std::size_t>(shape[0] * shape[1]));
    file.read(entry.name, shape, 0, values);
  }
  for (auto const& [name, adapter] : adapters.of)
    if (!adapter.is_whole())
      fsdp::fail<fsdp::ConfigError>("{}: the adapter of '{}' has only one of lora_A and lora_B", what, name);
  for (auto const& matrix : matrices)
    if (matrix.shape.size() == 2 && described.adapts(matrix.name) && !adapters.of.contains(matrix.name))
      fsdp::fail<fsdp::ConfigError>("{}: the adapter of '{}' is missing, though {} names the layer in target_modules",
                                    what, matrix.name, adapter_config_name);
  return adapters;
}

}  // namespace llama
