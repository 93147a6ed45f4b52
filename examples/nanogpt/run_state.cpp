// SPDX-License-Identifier: Apache-2.0
#include "run_state.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "fsdp/checkpoint/files.hpp"
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
            {"start", run.start},
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
  if (fields.has("start")) run.start = fields.text("start");
  run.model = model_from(fields.object("model"), what);
  if (fields.has("data_vocab_size")) run.data_vocab_size = fields.whole("data_vocab_size", 0, most);  // 0: not known
  if (fields.has("data")) run.data = run_data_from(fields.object("data"), what);
  if (fields.has("settings"))
    for (auto const& [name, value] : fields.object("settings").items())
      run.settings[name] = value.is_string() ? value.get<std::string>() : value.dump();
  return run;
}

float lora_scale_of(RunState const& run) {
  Settings settings;
  for (std::string const name : {"lora_rank", "lora_alpha"})
    if (auto const found = run.settings.find(name); found != run.settings.end())
      assign(settings, *find_setting(name), found->second, run.checkpoint.string());
  return tuning_of(settings).lora_scale;
}

void adopt_model(Settings& settings, RunState const& run) {
  adopt_shape(settings, run.model, fsdp::formatted("the checkpoint '{}'", run.checkpoint.string()));
}

void adopt_model(Settings& settings, GptWeights const& weights) {
  auto model = weights.config();
  if (settings.was_given("block_size")) model.block_size = std::min(model.block_size, settings.block_size);
  adopt_shape(settings, model, fsdp::formatted("the weights '{}'", weights.path().string()));
}

}  // namespace nanogpt
