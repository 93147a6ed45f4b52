// SPDX-License-Identifier: Apache-2.0
#include "llama/adapter_files.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/safetensors_file.hpp"
#include "fsdp/error.hpp"
#include "llama/linear_layers.hpp"
#include "transformer/run/choices.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::Json;

constexpr std::string_view peft_prefix = "base_model.model.";

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

AdapterFolder read_adapter_config(fs::path const& folder) {
  auto const what = fsdp::formatted("'{}'", (folder / adapter_config_name).string());
  auto const json =
      fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(folder / adapter_config_name), what);
  fsdp::checkpoint::Fields const fields(json, what);
  auto const is_set = [&](char const* name) { return fields.has(name) && !json[name].is_null(); };
  if (fields.text("peft_type") != "LORA") fields.wrong("peft_type", "\"LORA\"");
  for (auto const* const flag : {"use_dora", "use_rslora", "fan_in_fan_out"})
    if (is_set(flag) && fields.flag(flag)) fields.wrong(flag, "false");
  if (is_set("bias") && fields.text("bias") != "none") fields.wrong("bias", "\"none\"");
  for (auto const* const pattern : {"rank_pattern", "alpha_pattern"})
    if (is_set(pattern) && !fields.object(pattern).empty()) fields.wrong(pattern, "an empty object");
  if (is_set("modules_to_save") && !fields.array("modules_to_save").empty()) fields.wrong("modules_to_save", "null");
  AdapterFolder read;
  read.rank = fields.whole("r", 1, 65536);
  read.alpha = fields.number("lora_alpha");
  if (!std::isfinite(read.alpha)) fields.wrong("lora_alpha", "a number");
  read.base = fields.text("base_model_name_or_path");
  std::error_code error;
  if (read.base.is_relative() && !fs::is_directory(read.base, error) && fs::is_directory(folder / read.base, error))
    read.base = folder / read.base;
  return read;
}

HostAdapters read_adapters(fs::path const& folder, LlamaConfig const& config) {
  auto const described = read_adapter_config(folder);
  auto const path = folder / adapter_weights_name;
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
  return adapters;
}

}  // namespace llama
