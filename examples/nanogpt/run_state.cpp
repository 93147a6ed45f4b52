// SPDX-License-Identifier: Apache-2.0
#include "run_state.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "gpt2/tensor_names.hpp"

namespace nanogpt {
namespace {

using fsdp::checkpoint::Json;

/// JSON has no infinities.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }
double number_from(fsdp::checkpoint::Fields const& fields, char const* name) {
  auto const& value = fields.at(name);
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) fields.wrong(name, "a number");
  return value.get<double>();
}
bool flag_from(fsdp::checkpoint::Fields const& fields, char const* name) {
  if (!fields.at(name).is_boolean()) fields.wrong(name, "true or false");
  return fields.at(name).get<bool>();
}

/// Fields that checkpoints of earlier versions do not have.
bool fields_have(Json const& object, char const* name) { return object.is_object() && object.contains(name); }

/// @param from  where the model comes from, for the message
void adopt_shape(Settings& settings, GptConfig const& model, std::string_view from) {
  auto const adopt = [&](std::string_view name, auto& setting, auto const& saved) {
    if (settings.was_given(name) && setting != saved)
      fsdp::fail<fsdp::ConfigError>("setting '{}': {} contradicts {}, whose model has {}", name, setting, from, saved);
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
  for (auto const& setting : all_settings())
    if (setting.exists_in(Command::train)) config[std::string(setting.name)] = setting.text_of(settings);
  return {{"program", "nanogpt"},
          {"iteration", run.iteration},
          {"evaluated", run.evaluated},
          {"train_loss", number(run.train_loss)},
          {"val_loss", number(run.val_loss)},
          {"best_val_loss", number(run.best_val_loss)},
          {"data_vocab_size", run.data_vocab_size},
          {"model",
           {{"n_layer", run.model.n_layer},
            {"n_head", run.model.n_head},
            {"n_embd", run.model.n_embd},
            {"block_size", run.model.block_size},
            {"vocab_size", run.model.vocab_size},
            {"bias", run.model.bias},
            {"activation", name(run.model.activation)}}},
          {"settings", config}};
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
  run.train_loss = number_from(fields, "train_loss");
  run.val_loss = number_from(fields, "val_loss");
  run.best_val_loss = number_from(fields, "best_val_loss");
  ckpt::Fields const model(fields.object("model"), what);
  run.model.n_layer = model.whole("n_layer", 1, most);
  run.model.n_head = model.whole("n_head", 1, most);
  run.model.n_embd = model.whole("n_embd", 1, most);
  run.model.block_size = model.whole("block_size", 1, most);
  run.model.vocab_size = model.whole("vocab_size", 1, most);
  run.model.bias = flag_from(model, "bias");
  if (fields_have(manifest.extra, "data_vocab_size")) run.data_vocab_size = fields.whole("data_vocab_size", 0, most);
  if (fields_have(manifest.extra["model"], "activation"))
    run.model.activation = activation_named(model.text("activation"), path.string());
  expect_possible(run.model, what);
  return run;
}

std::optional<RunState> find_run(std::filesystem::path const& out_dir) {
  auto const name = fsdp::checkpoint::read_pointer(out_dir / "latest");
  return name ? std::optional(read_run(out_dir / *name)) : std::nullopt;
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
