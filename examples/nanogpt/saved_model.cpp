// SPDX-License-Identifier: Apache-2.0
// The folder of a trained model.
#include "saved_model.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/error.hpp"
#include "gpt2/tensor_names.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct AsJson {
  Settings const& settings;
  Json operator()(bool Settings::*member) const { return settings.*member; }
  Json operator()(std::int64_t Settings::*member) const { return settings.*member; }
  Json operator()(double Settings::*member) const { return settings.*member; }
  Json operator()(std::string Settings::*member) const { return settings.*member; }
};

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

/// Reads fields of an object, and says which one is wrong.
class Fields {
 public:
  Fields(fs::path const& path, Json const& object) : path_(path), object_(object) {}

  std::int64_t whole(char const* name) const {
    if (!object_.contains(name) || !object_[name].is_number_integer()) wrong(name, "a whole number");
    return object_[name].get<std::int64_t>();
  }
  double number(char const* name) const {
    if (!object_.contains(name) || !object_[name].is_number()) wrong(name, "a number");
    return object_[name].get<double>();
  }
  std::string text_or(char const* name, std::string_view otherwise) const {
    if (!object_.contains(name)) return std::string(otherwise);
    if (!object_[name].is_string()) wrong(name, "a text");
    return object_[name].get<std::string>();
  }
  bool flag(char const* name) const {
    if (!object_.contains(name) || !object_[name].is_boolean()) wrong(name, "true or false");
    return object_[name].get<bool>();
  }

 private:
  [[noreturn]] void wrong(std::string_view name, std::string_view expected) const {
    fsdp::fail<fsdp::ConfigError>("'{}': '{}': expected {}", path_.string(), name, expected);
  }
  fs::path const& path_;
  Json const& object_;
};

}  // namespace

void prepare_out_dir(fs::path const& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': '{}' cannot be made: {}", folder.string(), error.message());
  auto const probe = folder / fmt::format(".probe.{}", ::getpid());
  errno = 0;
  std::ofstream stream(probe);
  stream << "probe\n" << std::flush;
  bool const written = stream.good();
  int const why = errno;
  stream.close();
  fs::remove(probe, error);
  if (!written)
    fsdp::fail<fsdp::ConfigError>("setting 'out_dir': no file can be written to '{}': {}", folder.string(),
                                  std::generic_category().message(why));
}

void save_vocabulary(fs::path const& folder, Meta const& meta) {
  if (meta.path.empty()) {
    fs::remove(folder / meta_name);  // of a run on other data
    return;
  }
  auto const copy = [&](fs::path const& from, fs::path const& name) {
    MappedFile const file(from);
    fsdp::checkpoint::replace_text_file(folder / name,
                                        {reinterpret_cast<char const*>(file.bytes().data()), file.bytes().size()});
  };
  for (auto const& name : meta.tokenizer_files) copy(meta.path.parent_path() / name, name);
  copy(meta.path, meta_name);
}

Meta read_vocabulary(fs::path const& path, GptConfig const& config, fs::path const& model) {
  auto meta = read_meta(path);
  if (meta.vocab_size > config.vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}' has a vocabulary of {}, the model in '{}' one of {}", path.string(),
                                  meta.vocab_size, model.string(), config.vocab_size);
  return meta;
}

void save_model_config(fs::path const& folder, GptConfig const& config, ModelState const& state,
                       Settings const* settings, Meta const& meta) {
  Json json{{"model_args",
             {{"n_layer", config.n_layer},
              {"n_head", config.n_head},
              {"n_embd", config.n_embd},
              {"block_size", config.block_size},
              {"vocab_size", config.vocab_size},
              {"dropout", settings != nullptr ? settings->dropout : static_cast<double>(config.dropout)},
              {"bias", config.bias},
              {"activation", name(config.activation)}}},
            {"iter_num", state.iteration},
            {"train_loss", number(state.train_loss)},
            {"val_loss", number(state.val_loss)},
            {"best_val_loss", number(state.best_val_loss)},
            {"meta", nullptr}};
  for (auto const& setting : all_settings())
    if (settings != nullptr && setting.exists_in(Command::train))
      json["config"][std::string(setting.name)] = std::visit(AsJson{*settings}, setting.member);
  save_vocabulary(folder, meta);
  if (!meta.path.empty()) json["meta"] = meta_name;
  fsdp::checkpoint::replace_text_file(folder / "config.json", json.dump(1) + "\n");
}

SavedModel open_saved_model(fs::path const& folder) {
  auto const path = folder / "config.json";
  SavedModel model;
  model.weights = folder / weights_name;
  std::error_code error;
  for (auto const& needed : {path, model.weights})
    if (!fs::is_regular_file(needed, error))
      fsdp::fail<fsdp::ConfigError>(
          "setting 'out_dir': '{}' holds no trained model: '{}' is missing (nanogpt train --out_dir={})",
          folder.string(), needed.string(), folder.string());
  std::ifstream stream(path, std::ios::binary);
  auto const json = Json::parse(std::string(std::istreambuf_iterator<char>(stream), {}), nullptr, false);
  if (!json.is_object() || !json.contains("model_args") || !json["model_args"].is_object())
    fsdp::fail<fsdp::ConfigError>("'{}': expected a JSON object with 'model_args'", path.string());
  Fields const arguments(path, json["model_args"]);
  model.config.n_layer = arguments.whole("n_layer");
  model.config.n_head = arguments.whole("n_head");
  model.config.n_embd = arguments.whole("n_embd");
  model.config.block_size = arguments.whole("block_size");
  model.config.vocab_size = arguments.whole("vocab_size");
  model.config.dropout = static_cast<float>(arguments.number("dropout"));
  model.config.bias = arguments.flag("bias");
  model.config.activation = activation_named(arguments.text_or("activation", "gelu"), path.string());
  expect_possible(model.config, fsdp::formatted("'{}'", path.string()));
  model.config.validate();
  model.state.iteration = Fields(path, json).whole("iter_num");
  if (json.contains("meta") && json["meta"].is_string()) {
    auto const vocabulary = folder / json["meta"].get<std::string>();
    if (!fs::is_regular_file(vocabulary, error))
      fsdp::fail<fsdp::ConfigError>("'{}': the vocabulary '{}' is missing", path.string(), vocabulary.string());
    model.meta = read_vocabulary(vocabulary, model.config, path);
  }
  return model;
}

}  // namespace nanogpt
