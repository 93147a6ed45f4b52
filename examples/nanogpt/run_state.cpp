// SPDX-License-Identifier: Apache-2.0
#include "run_state.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <system_error>
#include <vector>

#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "model_json.hpp"

namespace nanogpt {
namespace {

using fsdp::checkpoint::Json;

/// @param from  where the model comes from, for the message
void adopt_shape(Settings& settings, GptConfig const& model, std::string_view from) {
  auto const adopt = [&](std::string_view name, auto& setting, auto const& saved) {
    if (settings.was_given(name) && setting != saved)
      fsdp::fail<fsdp::ConfigError>("setting '{}': {} contradicts the model of {}, which has {}; leave the setting out",
                                    name, setting, from, saved);
    setting = saved;
  };
  adopt("n_layer", settings.n_layer, model.n_layer);
  adopt("n_head", settings.n_head, model.n_head);
  adopt("n_embd", settings.n_embd, model.n_embd);
  adopt("block_size", settings.block_size, model.block_size);
  adopt("bias", settings.bias, model.bias);
}

}  // namespace

nlohmann::ordered_json run_state_json(RunState const& run, Settings const& settings) {
  Json config;
  auto const usual = defaults(Command::train);
  for (auto const& setting : all_settings())
    if (setting.exists_in(Command::train))
      config[std::string(setting.name)] = setting.text_of(settings.was_chosen(setting.name) ? usual : settings);
  Json json{{"program", "nanogpt"},
            {"iteration", run.iteration},
            {"evaluated", run.evaluated},
            {"train_loss", number_json(run.train_loss)},
            {"val_loss", number_json(run.val_loss)},
            {"best_val_loss", number_json(run.best_val_loss)},
            {"dtype", run.dtype},
            {"data_vocab_size", run.data_vocab_size},
            {"vocabulary_xxh64", run.vocabulary},
            {"model", model_json(run.model)},
            {"settings", config}};
  if (run.data.train.tokens > 0) json["data"] = run_data_json(run.data);
  return json;
}

RunState read_run(std::filesystem::path const& checkpoint) {
  namespace ckpt = fsdp::checkpoint;
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  RunState run;
  run.checkpoint = checkpoint;
  auto const path = run.checkpoint / ckpt::manifest_name;
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const manifest = ckpt::parse_manifest(ckpt::read_text_file(path), what);
  ckpt::Fields const fields(manifest.extra, what);
  if (fields.text("program") != "nanogpt") fields.wrong("program", "\"nanogpt\"");
  run.iteration = fields.whole("iteration", 0, most);
  run.evaluated = fields.whole("evaluated", -1, most);
  run.train_loss = fields.number("train_loss");
  run.val_loss = fields.number("val_loss");
  run.best_val_loss = fields.number("best_val_loss");
  if (fields.has("dtype")) run.dtype = fields.text("dtype");
  if (!run.dtype.empty() && run.dtype != "float32" && run.dtype != "bfloat16")
    fields.wrong("dtype", "\"float32\" or \"bfloat16\"");
  if (fields.has("vocabulary_xxh64")) run.vocabulary = fields.text("vocabulary_xxh64");
  run.model = model_from(fields.object("model"), what);
  if (fields.has("data_vocab_size")) run.data_vocab_size = fields.whole("data_vocab_size", 0, most);  // 0: not known
  if (fields.has("data")) run.data = run_data_from(fields.object("data"), what);
  if (fields.has("settings"))
    for (auto const& [name, value] : fields.object("settings").items())
      run.settings[name] = value.is_string() ? value.get<std::string>() : value.dump();
  return run;
}

std::optional<RunState> find_run(std::filesystem::path const& out_dir) {
  auto const pointer = out_dir / "latest";
  if (auto const name = fsdp::checkpoint::read_pointer(pointer)) return read_run(out_dir / *name);
  std::error_code error;
  if (!std::filesystem::is_directory(out_dir, error)) return std::nullopt;
  std::vector<std::string> there;
  for (auto const& checkpoint : fsdp::checkpoint::CheckpointList(out_dir).checkpoints)
    there.push_back(checkpoint.text());
  if (there.empty()) return std::nullopt;
  // A run that is killed between its first checkpoint and the pointer to it leaves one, which is whole.
  if (there.size() == 1) return read_run(out_dir / there.front());
  fsdp::fail<fsdp::ConfigError>("'{}', which names the checkpoint to resume from, is missing", pointer.string());
}

std::string run_in(std::filesystem::path const& out_dir) {
  std::error_code error;
  if (!std::filesystem::is_directory(out_dir, error)) return {};
  auto const checkpoints = fsdp::checkpoint::CheckpointList(out_dir).checkpoints;
  if (!checkpoints.empty())
    return fsdp::formatted("{} checkpoint{}, the newest {}", checkpoints.size(), checkpoints.size() == 1 ? "" : "s",
                           checkpoints.back().text());
  return std::filesystem::exists(out_dir / weights_name, error) ? std::string(weights_name) : std::string();
}

void remove_run(std::filesystem::path const& out_dir) {
  namespace ckpt = fsdp::checkpoint;
  ckpt::FileLock const lock(out_dir / ".lock");
  for (auto const name : {std::string_view("latest"), std::string_view("best"), weights_name})
    ckpt::remove_folder(out_dir / name);
  ckpt::remove_folder(out_dir / "config.json");
  ckpt::sync_folder(out_dir);
  for (auto const& checkpoint : ckpt::CheckpointList(out_dir).checkpoints) {
    auto const hidden = out_dir / ("." + checkpoint.text() + ".old");  // never half of one under its name
    ckpt::rename_durably(out_dir / checkpoint.text(), hidden);
    ckpt::remove_folder(hidden);
  }
}

void adopt_model(Settings& settings, RunState const& run) {
  adopt_shape(settings, run.model, fsdp::formatted("the checkpoint '{}'", run.checkpoint.string()));
}

void adopt_model(Settings& settings, WeightsSource const& weights) {
  auto model = weights.config();
  if (settings.was_given("block_size")) model.block_size = std::min(model.block_size, settings.block_size);
  adopt_shape(settings, model, fsdp::formatted("the weights '{}'", weights.path().string()));
}

}  // namespace nanogpt
