// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/state.hpp"

#include <cmath>
#include <limits>
#include <string>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {

using fsdp::checkpoint::Json;

nlohmann::ordered_json run_state_json(RunState const& run, Settings const& settings) {
  Json config;
  auto const usual = defaults(Command::train);
  for (auto const& setting : all_settings())
    if (setting.exists_in(Command::train))
      config[std::string(setting.name)] = setting.text_of(settings.was_chosen(setting.name) ? usual : settings);
  Json json{{"program", program_name},
            {"iteration", run.iteration},
            {"evaluated", run.evaluated},
            {"train_loss", number_json(run.train_loss)},
            {"val_loss", number_json(run.val_loss)},
            {"best_val_loss", number_json(run.best_val_loss)},
            {"dtype", run.dtype},
            {"data_vocab_size", run.data_vocab_size},
            {"vocabulary_xxh64", run.vocabulary},
            {"start", run.start},
            {"model", fsdp::checkpoint::parse_json(run.model)},
            {"settings", config}};
  if (!run.base.empty()) json["base"] = run.base;
  if (!run.origin.empty()) json["origin"] = run.origin;
  if (!run.lineage.empty()) json["run"] = run.lineage;
  if (run.data.train.tokens > 0) json["data"] = run_data_json(run.data);
  return json;
}

RunState read_run(std::filesystem::path const& checkpoint, std::string const& manifest_text) {
  namespace ckpt = fsdp::checkpoint;
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  RunState run;
  run.checkpoint = checkpoint;
  auto const path = run.checkpoint / ckpt::manifest_name;
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const manifest = ckpt::parse_manifest(manifest_text.empty() ? ckpt::read_text_file(path) : manifest_text, what);
  ckpt::Fields const fields(manifest.extra, what);
  if (fields.text("program") != program_name) fields.wrong("program", fsdp::formatted("\"{}\"", program_name));
  run.iteration = fields.whole("iteration", 0, most);
  run.evaluated = fields.whole("evaluated", -1, most);
  run.train_loss = fields.number("train_loss");
  run.val_loss = fields.number("val_loss");
  run.best_val_loss = fields.number("best_val_loss");
  if (fields.has("dtype")) run.dtype = fields.text("dtype");
  if (!run.dtype.empty() && run.dtype != "float32" && run.dtype != "bfloat16")
    fields.wrong("dtype", "\"float32\" or \"bfloat16\"");
  if (fields.has("vocabulary_xxh64")) run.vocabulary = fields.text("vocabulary_xxh64");
  if (fields.has("base")) run.base = fields.text("base");
  if (fields.has("origin")) run.origin = fields.text("origin");
  if (fields.has("run")) run.lineage = fields.text("run");
  if (fields.has("start")) run.start = fields.text("start");
  run.model = checked_model(fields.object("model"), what);
  if (fields.has("data_vocab_size")) run.data_vocab_size = fields.whole("data_vocab_size", 0, most);  // 0: not known
  if (fields.has("data")) run.data = run_data_from(fields.object("data"), what);
  if (fields.has("settings"))
    for (auto const& [name, value] : fields.object("settings").items()) {
      auto const text = value.is_string() ? value.get<std::string>() : value.dump();
      auto const found = find_named(name);  // checkpoints that older versions wrote have former names
      if (found.by_former_name)
        run.settings.emplace(found.setting->name, found.current(text));
      else
        run.settings[name] = text;
    }
  return run;
}

float lora_scale_of(RunState const& run) {
  Settings settings;
  for (Setting::Member const member : {Setting::Member(&Settings::lora_rank), Setting::Member(&Settings::lora_alpha)}) {
    std::string const name(name_of(member));
    if (auto const found = run.settings.find(name); found != run.settings.end())
      assign(settings, *find_setting(name), found->second, run.checkpoint.string());
  }
  return tuning_of(settings).lora_scale;
}

nlohmann::ordered_json number_json(double value) {
  if (std::isfinite(value)) return value;
  return nullptr;
}

}  // namespace transformer
