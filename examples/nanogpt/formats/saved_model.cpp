// SPDX-License-Identifier: Apache-2.0
// The folder of a trained model.
#include "nanogpt/formats/saved_model.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <system_error>
#include <utility>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "nanogpt/formats/model_json.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
using fsdp::checkpoint::Json;

struct AsJson {
  Settings const& settings;
  Json operator()(bool Settings::*member) const { return settings.*member; }
  Json operator()(std::int64_t Settings::*member) const { return settings.*member; }
  Json operator()(double Settings::*member) const { return settings.*member; }
  Json operator()(std::string Settings::*member) const { return settings.*member; }
};

/// The shape, from `json`, which `what` names.
GptConfig config_from(Json const& json, std::string const& what) {
  fsdp::checkpoint::Fields const fields(json, what);
  if (!fields.has("model_args")) fsdp::fail<fsdp::ConfigError>("{}: expected a JSON object with 'model_args'", what);
  auto const& arguments = fields.object("model_args");
  auto config = model_from(arguments, what);
  config.dropout = static_cast<float>(fsdp::checkpoint::Fields(arguments, what).number("dropout"));
  config.validate();
  return config;
}

}  // namespace

void save_model_config(fs::path const& folder, GptConfig const& config, ModelState const& state,
                       Settings const* settings, Meta const& meta) {
  auto arguments = model_json(config);
  arguments["dropout"] = settings != nullptr ? settings->dropout : static_cast<double>(config.dropout);
  Json json{{"model_args", std::move(arguments)},
            {"iter_num", state.iteration},
            {"train_loss", number_json(state.train_loss)},
            {"val_loss", number_json(state.val_loss)},
            {"best_val_loss", number_json(state.best_val_loss)},
            {"meta", nullptr}};
  for (auto const& setting : all_settings())
    if (settings != nullptr && setting.exists_in(Command::train))
      json["config"][std::string(setting.name)] = std::visit(AsJson{*settings}, setting.member);
  save_vocabulary(folder, meta);
  if (!meta.path.empty()) json["meta"] = meta_name;
  fsdp::checkpoint::replace_text_file(folder / "config.json", json.dump(1) + "\n");
}

GptConfig read_saved_config(fs::path const& config_json) {
  auto const what = fsdp::formatted("'{}'", config_json.string());
  return config_from(fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(config_json), what), what);
}

SavedModel open_saved_model(fs::path const& folder) {
  auto const path = folder / "config.json";
  SavedModel model;
  model.weights = folder / weights_name;
  std::error_code error;
  for (auto const& needed : {path, model.weights})
    if (!fs::is_regular_file(needed, error))
      fsdp::fail<fsdp::ConfigError>(
          "setting 'out_dir': '{}' has no trained model: '{}' is missing; train one with: nanogpt train --out_dir={}",
          folder.string(), needed.string(), folder.string());
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const json = fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(path), what);
  fsdp::checkpoint::Fields const fields(json, what);
  model.config = config_from(json, what);
  model.state.iteration = fields.whole("iter_num", 0, std::numeric_limits<std::int64_t>::max());
  if (json.contains("meta") && json["meta"].is_string()) {
    auto const vocabulary = folder / json["meta"].get<std::string>();
    if (!fs::is_regular_file(vocabulary, error))
      fsdp::fail<fsdp::ConfigError>("'{}': the vocabulary '{}' is missing", path.string(), vocabulary.string());
    model.meta = read_vocabulary(vocabulary, model.config.vocab_size, path);
  }
  return model;
}

}  // namespace nanogpt
