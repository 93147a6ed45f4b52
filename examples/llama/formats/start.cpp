// SPDX-License-Identifier: Apache-2.0
#include "llama/formats/start.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "llama/formats/adapter_files.hpp"
#include "llama/formats/config_json.hpp"
#include "llama/formats/generation_config.hpp"
#include "llama/llama_config.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/training/checkpoint_weights.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::checkpoint;

bool is_file(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool is_adapters_alone(fs::path const& folder) { return is_adapter_folder(folder) && !is_file(folder / "config.json"); }

/// @param what  names the folder, for the message
/// @throws fsdp::ConfigError unless the folder has a config.json
void expect_model_folder(fs::path const& folder, std::string_view what,
                         std::string_view expected = "the folder of a model") {
  if (is_file(folder / "config.json")) return;
  std::error_code error;
  fsdp::fail<fsdp::ConfigError>("{}: expected {}, got '{}', which {}", what, expected, folder.string(),
                                fs::is_directory(folder, error) ? "has no config.json" : "is no folder");
}

/// The model that adapters belong to. @throws fsdp::ConfigError if it is not there
fs::path base_of_adapters(fs::path const& folder) {
  auto base = read_adapter_config(folder).base;
  expect_model_folder(base, fsdp::formatted("'{}': 'base_model_name_or_path'", (folder / adapter_config_name).string()),
                      "the folder of a model (of a model that lies elsewhere: export, and sample, with --out_dir for "
                      "the adapters and --model for their model)");
  return base;
}

/// @param base  the model of adapters, unless their folder names it; may be empty
OpenedLlama open_model_folder(fs::path const& folder, fs::path const& base_folder = {}) {
  if (!is_adapters_alone(folder)) return open_folder(folder);
  auto model = open_folder(base_folder.empty() ? base_of_adapters(folder) : base_folder);
  model.weights =
      std::make_shared<AdaptedWeights>(folder, std::move(model.weights), read_adapters(folder, model.config));
  if (has_tokenizer(folder)) model.tokenizer = folder;
  return model;
}

std::string model_setting(RunState const& run) {
  auto const found = run.settings.find("model");
  return found == run.settings.end() ? std::string() : found->second;
}

/// The folder of the model that a run began with; that of adapters is the folder of their model.
/// @param model  the setting; may be empty
/// @return empty if it is not there any more
fs::path original_folder(fs::path const& model) {
  if (model.empty()) return {};
  if (is_file(model / "config.json")) return model;
  if (!is_adapter_folder(model)) return {};
  auto const base = read_adapter_config(model).base;
  return is_file(base / "config.json") ? base : fs::path();
}

/// @param folder  the model to begin with
OpenedLlama open_base_in(fs::path const& folder, RunState const& run) {
  if (!is_adapters_alone(folder))
    expect_model_folder(folder, "setting 'model'",
                        fsdp::formatted("the folder of the model that the run in '{}' began with (--model=FOLDER)",
                                        run.checkpoint.string()));
  auto base = open_model_folder(folder);
  if (auto const found = fingerprint(base); found != run.base)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'model': the run in '{}' was trained on other weights than those in '{}'; name the folder of its "
        "model with --model=FOLDER",
        run.checkpoint.string(), folder.string());
  return base;
}

OpenedLlama open_checkpoint(fs::path const& out_dir, std::string const& name, Settings const& settings) {
  auto const folder = with_others(out_dir / name, [&] { return named_checkpoint(out_dir, name); });
  auto const beside = fs::absolute(folder / "..").lexically_normal();  // the run's out_dir
  auto const run = with_others(folder, [&] { return read_run(folder); });
  auto const model = settings.model.empty() ? model_setting(run) : settings.model;
  std::shared_ptr<WeightsSource const> base;
  if (!run.base.empty()) base = open_base_in(model, run).weights;
  return with_others(folder, [&] {
    auto const config = model_config(run);
    auto weights =
        std::make_shared<CheckpointWeights>(folder, llama_tensors(config), std::move(base), lora_scale_of(run));
    return OpenedLlama{config, std::move(weights), has_tokenizer(beside) ? beside : fs::path(model), run.iteration,
                       original_folder(model)};
  });
}

/// @throws fsdp::ConfigError unless the setting names a model, or adapters
fs::path model_folder(Settings const& settings) {
  fs::path const folder(settings.model);
  if (folder.empty())
    fsdp::fail<fsdp::ConfigError>("setting 'model': expected the folder of a model (--model=FOLDER), got nothing");
  if (!is_adapters_alone(folder)) expect_model_folder(folder, "setting 'model'");
  return folder;
}

/// The folder of the model that the run in `out_dir` began with. @return empty if nothing says which, or it is not
/// there
fs::path original_of_run(fs::path const& out_dir, Settings const& settings) {
  if (!settings.model.empty()) return original_folder(settings.model);
  try {
    auto const run = find_run(out_dir);
    return run ? original_folder(model_setting(*run)) : fs::path();
  } catch (fsdp::ConfigError const&) {  // its weights are there all the same
    return {};
  }
}

/// The weights in a run's out_dir. The model of adapters must be the one that the run began with.
OpenedLlama open_trained_folder(fs::path const& out_dir, Settings const& settings) {
  if (!is_adapters_alone(out_dir)) {
    auto model = open_model_folder(out_dir);
    if (auto const original = original_of_run(out_dir, settings); !original.empty()) model.original = original;
    return model;
  }
  auto base = settings.model;
  if (auto const run = find_run(out_dir); run && !run->base.empty()) {
    if (base.empty()) base = model_setting(*run);
    static_cast<void>(open_base_in(base, *run));
  }
  return open_model_folder(out_dir, base);
}

void expect_at_most(std::string_view setting, std::int64_t value, std::string_view what, std::int64_t most) {
  if (value > most)
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected at most {} {}, got {}", setting, what, most, value);
}

}  // namespace

LlamaConfig read_config(Settings const& settings) {
  auto folder = model_folder(settings);
  if (is_adapters_alone(folder)) folder = base_of_adapters(folder);
  return read_huggingface_config(folder / "config.json");
}

OpenedLlama open_model(Settings const& settings) {
  auto const folder = model_folder(settings);
  if (settings.lora_rank > 0 && is_adapters_alone(folder))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'model': '{}' has adapters, and new adapters need a whole model; merge them first: llama export "
        "--out_dir={} --to=FOLDER",
        folder.string(), folder.string());
  return open_model_folder(folder);
}

OpenedLlama open_base(Settings const& settings, RunState const& run) {
  // The next checkpoint would be without a layer that is frozen only now, whose trained values would be lost.
  auto const saved = run.settings.find("freeze_layers");
  if (auto const now = std::to_string(settings.freeze_layers); saved != run.settings.end() && saved->second != now)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'freeze_layers': expected {}, as the run in '{}' has it, whose checkpoints are without the frozen "
        "layers; got {}. To freeze others, begin a new run with --model={} and another out_dir",
        saved->second, run.checkpoint.string(), now, settings.out_dir);
  return open_base_in(settings.model.empty() ? model_setting(run) : settings.model, run);
}

OpenedLlama open_run(Settings const& settings, std::string& note) {
  fs::path const out_dir(settings.out_dir);
  expect_folder(out_dir, "out_dir");
  if (!settings.checkpoint.empty()) return open_checkpoint(out_dir, settings.checkpoint, settings);
  bool const whole = is_file(out_dir / "config.json") || is_file(out_dir / adapter_config_name);
  std::error_code error;
  if (whole || !fs::exists(out_dir / "latest", error)) {
    if (!whole)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'out_dir': '{}' has no trained model: neither config.json nor {} is there; train one with: llama "
          "train --out_dir={}, or name a model with --model=FOLDER",
          out_dir.string(), adapter_config_name, out_dir.string());
    return open_trained_folder(out_dir, settings);
  }
  auto model = open_checkpoint(out_dir, "latest", settings);
  note = fsdp::formatted("'{}' has no weights yet; using the latest checkpoint, '{}'", out_dir.string(),
                         model.path().string());
  return model;
}

std::string fingerprint(OpenedLlama const& model) {
  return fingerprint(model_text(model.config), llama_tensors(model.config), *model.weights);
}

std::shared_ptr<Tokenizer const> open_tokenizer(OpenedLlama const& model) {
  return open_tokenizer_folder(model.tokenizer, model.config.vocab_size);
}

std::string model_text(LlamaConfig const& config) {
  return fsdp::checkpoint::parse_json(huggingface_config_text(config, std::nullopt, std::nullopt, "float32")).dump();
}

LlamaConfig model_config(RunState const& run) {
  return parse_huggingface_config(run.model, fsdp::formatted("'{}'", run.checkpoint.string()));
}

void adopt_model(Settings& settings, LlamaConfig const& config) {
  settings.n_layer = config.num_hidden_layers;
  settings.n_head = config.num_attention_heads;
  settings.n_embd = config.hidden_size;
  expect_at_most("block_size", settings.block_size, config.longest_sequence_name(), config.longest_sequence());
  expect_tuning(settings);
  if (settings.was_given("lora_targets") && settings.lora_rank == 0)
    fsdp::fail<fsdp::ConfigError>("setting 'lora_targets': only adapters use it; expected --lora_rank too");
  auto const tuning = tuning_of(settings);
  if (!tuning.adapts()) return;
  expect_targets(tuning, linear_layers, "setting 'lora_targets'");
  for (auto const& tensor : llama_tensors(config)) {
    auto const layer = std::string_view(tensor.name).substr(0, tensor.name.size() - std::string_view(".weight").size());
    bool const is_target = std::any_of(linear_layers.begin(), linear_layers.end(),
                                       [&](auto const& name) { return layer.ends_with(name) && tuning.adapts(name); });
    if (auto const side = *std::min_element(tensor.shape.begin(), tensor.shape.end());
        is_target && tuning.lora_rank > side)
      fsdp::fail<fsdp::ConfigError>("setting 'lora_rank': expected at most {}, the smaller side of '{}', got {}", side,
                                    tensor.name, tuning.lora_rank);
  }
}

SampleRequest<OpenedLlama> read_sample_request(Settings const& settings, std::int64_t ranks) {
  check_together(settings, Command::sample, ranks);
  SampleRequest<OpenedLlama> request;
  bool const of_run = settings.model.empty() || settings.was_given("out_dir") || !settings.checkpoint.empty();
  request.model = of_run ? open_run(settings, request.note) : open_model(settings);
  request.text = read_sample_text(settings, open_tokenizer(request.model));
  request.text.ends = ids_that_end_texts(request.model);
  auto const& config = request.model.config;
  if (auto const tokens = static_cast<std::int64_t>(request.text.start.size()); tokens > config.longest_sequence())
    fsdp::fail<fsdp::ConfigError>("setting 'start': expected at most {} tokens ({}), got {}", config.longest_sequence(),
                                  config.longest_sequence_name(), tokens);
  return request;
}

}  // namespace llama

// Functions that examples/transformer declares and each program defines.
namespace transformer {

std::string checked_model(nlohmann::ordered_json const& model, std::string_view what) {
  return llama::model_text(llama::parse_huggingface_config(model.dump(), what));
}

/// A folder with config.json alone may be anyone's: a run of ours has its log too.
bool is_own_config(std::filesystem::path const&) { return false; }

}  // namespace transformer
