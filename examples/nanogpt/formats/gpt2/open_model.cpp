// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/gpt2/open_model.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "nanogpt/formats/gpt2/config_json.hpp"
#include "nanogpt/formats/gpt2/llm_c.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"
#include "nanogpt/formats/saved_model.hpp"
#include "nanogpt/formats/start.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/training/checkpoint_weights.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/whole_checkpoints.hpp"
#include "transformer/weights/weights_folder.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
namespace ckpt = fsdp::checkpoint;

constexpr std::array<std::string_view, 4> published{"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"};
constexpr std::string_view config_name = "config.json";

bool is_file(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

std::optional<fs::path> variable(char const* name) {
  char const* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return fs::path(text);
}

/// Where huggingface_hub keeps what it has downloaded: the first that the environment names.
fs::path hub_cache() {
  if (auto const cache = variable("HF_HUB_CACHE")) return *cache;
  if (auto const home = variable("HF_HOME")) return *home / "hub";
  if (auto const cache = variable("XDG_CACHE_HOME")) return *cache / "huggingface" / "hub";
  return variable("HOME").value_or("/") / ".cache" / "huggingface" / "hub";
}

/// The snapshot of a repository in that cache that its main branch names. @return empty if there is none
fs::path main_snapshot(fs::path const& repository) {
  auto const ref = repository / "refs" / "main";
  if (!is_file(ref)) return {};
  auto revision = ckpt::read_text_file(ref, 4096);
  while (!revision.empty() && (revision.back() == '\n' || revision.back() == '\r')) revision.pop_back();
  if (revision.empty() || revision.find_first_not_of("0123456789abcdef") != std::string::npos) return {};
  return repository / "snapshots" / revision;
}

/// @throws fsdp::ConfigError naming all places that were looked at
fs::path find_published(std::string const& name, Settings const& settings) {
  std::vector<fs::path> places;
  if (!settings.model_dir.empty()) places.push_back(fs::path(settings.model_dir) / name);
  auto const cache = hub_cache();
  for (auto const* const owner : {"", "openai-community--"}) {
    auto const repository = cache / fsdp::formatted("models--{}{}", owner, name);
    auto const snapshot = main_snapshot(repository);
    places.push_back(snapshot.empty() ? repository : snapshot);
  }
  std::vector<std::string> texts;
  for (auto const& place : places) {
    if (is_file(place / config_name)) return place;
    texts.push_back(place.string());
  }
  fsdp::fail<fsdp::ConfigError>(
      "setting 'init_from': the weights of {} were not found in any of {}; download them with `hf download "
      "openai-community/{}` (pip install huggingface_hub), or put config.json, model.safetensors, vocab.json and "
      "merges.txt into {}/{} (--model_dir)",
      name, fsdp::listed(texts), name, settings.model_dir.empty() ? "DIR" : settings.model_dir, name);
}

TokenizerFiles find_tokenizer(fs::path const& folder) {
  for (auto const& [encoder, merges] : {std::pair("vocab.json", "merges.txt"), std::pair("encoder.json", "vocab.bpe")})
    if (is_file(folder / encoder) && is_file(folder / merges)) return {folder / encoder, folder / merges};
  if (is_file(folder / "tokenizer.json")) return {{}, {}, folder};
  return {};
}

OpenedModel open_weights(fs::path const& folder, GptConfig const& config, Orientation orientation) {
  auto weights = std::make_shared<WeightsFolder>(folder, gpt_tensor_list(config, orientation));
  return {config, std::move(weights), {}, find_tokenizer(folder), 0};
}

OpenedModel open_folder(fs::path const& folder) {
  if (!is_file(folder / config_name))
    fsdp::fail<fsdp::ConfigError>("setting 'init_from': '{}' has no {}, which describes the model", folder.string(),
                                  config_name);
  if (kind_of_config(folder / config_name) == ConfigKind::nanogpt) return open_saved(folder);
  auto const config = read_huggingface_config(folder / config_name);
  auto model = open_weights(folder, config, Orientation::in_out);
  model.original = folder;
  return model;
}

bool is_huggingface_folder(fs::path const& folder) {
  try {
    return is_file(folder / config_name) && kind_of_config(folder / config_name) == ConfigKind::huggingface;
  } catch (fsdp::ConfigError const&) {  // it is damaged, or another program's
    return false;
  }
}

std::string_view as_text(MappedFile const& file) {
  return {reinterpret_cast<char const*>(file.bytes().data()), file.bytes().size()};
}

/// @param model  the model's weights, for the message
std::shared_ptr<Tokenizer const> open_files(TokenizerFiles const& files, GptConfig const& config,
                                            fs::path const& model) {
  if (!files.folder.empty()) return open_tokenizer_folder(files.folder, config.vocab_size);
  MappedFile const encoder(files.encoder_json), merges(files.vocab_bpe);
  auto const encoder_name = files.encoder_json.string(), merges_name = files.vocab_bpe.string();
  auto tokenizer =
      std::make_shared<BytePair>(BytePairFiles{as_text(encoder), as_text(merges), encoder_name, merges_name});
  if (tokenizer->size() > config.vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}' has {} tokens, but the model in '{}' has a vocabulary of {}", encoder_name,
                                  tokenizer->size(), model.string(), config.vocab_size);
  return tokenizer;
}

}  // namespace

OpenedModel open_pretrained(Settings const& settings) {
  auto const name = first_start(settings);
  if (std::find(published.begin(), published.end(), name) != published.end())
    return open_folder(find_published(name, settings));
  std::error_code error;
  if (fs::is_directory(name, error)) return open_folder(name);
  if (is_llm_c(name)) {
    auto file = std::make_shared<LlmcFile>(name);
    return {file->config(), std::move(file), {}, find_tokenizer(ckpt::folder_of(name)), 0};
  }
  fsdp::fail<fsdp::ConfigError>(
      "setting 'init_from': expected scratch, resume, auto, {}, a folder with weights, or llm.c's model file (or "
      "auto:WEIGHTS); got "
      "'{}', which {}",
      fsdp::listed(published), name, fs::exists(name, error) ? "is none of these" : "does not exist");
}

fs::path original_folder(RunState const& run) {
  fs::path folder(run.origin);
  if (auto const start = run.settings.find("init_from"); folder.empty() && start != run.settings.end()) {
    Settings settings;  // of a checkpoint that older versions wrote
    settings.init_from = start->second;
    folder = first_start(settings);
  }
  return is_huggingface_folder(folder) ? folder : fs::path();
}

OpenedModel open_saved(fs::path const& folder) {
  auto const saved = open_saved_model(folder);
  auto config = saved.config;
  config.dropout = 0;
  auto model = open_weights(folder, config, Orientation::out_in);
  model.meta = saved.meta;
  model.iteration = saved.state.iteration;
  try {
    if (auto const run = find_run(folder)) model.original = original_folder(*run);
  } catch (fsdp::ConfigError const&) {  // the weights do not need the run's checkpoints
  }
  return model;
}

OpenedModel open_checkpoint(fs::path const& out_dir, std::string const& name) {
  auto const folder = with_others(out_dir / name, [&] { return named_checkpoint(out_dir, name); });
  auto const beside = fs::absolute(folder / "..").lexically_normal();  // the run's out_dir
  RunState run;
  auto model = with_others(folder, [&] {
    run = read_run(folder);
    auto const config = model_config(run);
    auto weights = std::make_shared<CheckpointWeights>(folder, gpt_tensors(config), nullptr, lora_scale_of(run));
    return OpenedModel{config, std::move(weights), {}, find_tokenizer(beside), run.iteration, original_folder(run)};
  });
  if (auto const path = beside / meta_name; is_file(path)) {
    model.meta = read_vocabulary(path, model.config.vocab_size, folder);
    if (auto const found = vocabulary_checksum(model.meta); !run.vocabulary.empty() && found != run.vocabulary)
      fsdp::fail<fsdp::ConfigError>(
          "'{}' has another vocabulary than the model in '{}' was trained with; restore the file that this run wrote",
          path.string(), folder.string());
  }
  return model;
}

OpenedRun open_run(Settings const& settings) {
  fs::path const out_dir(settings.out_dir), whole = out_dir / weights_name;
  expect_folder(out_dir, "out_dir");
  if (!settings.checkpoint.empty()) return {open_checkpoint(out_dir, settings.checkpoint), {}};
  bool const described = is_file(out_dir / config_name);  // last: a save that is killed leaves weights without it
  std::error_code error;
  if ((described && is_file(whole)) || !fs::exists(out_dir / "latest", error)) {
    try {
      return {open_saved(out_dir), {}};
    } catch (fsdp::ConfigError const& fault) {
      bool const has_checkpoints =
          fs::is_directory(out_dir, error) && !ckpt::CheckpointList(out_dir).checkpoints.empty();
      fsdp::fail<fsdp::ConfigError>("{}{}{}", fault.what(), has_checkpoints ? other_checkpoints(out_dir, "", "") : "",
                                    note_on_replaced_run(out_dir));
    }
  }
  auto model = open_checkpoint(out_dir, "latest");
  auto note = fsdp::formatted("'{}' does not exist; using the latest checkpoint, '{}'",
                              (described ? whole : out_dir / config_name).string(), model.weights->path().string());
  return {std::move(model), std::move(note)};
}

std::shared_ptr<Tokenizer const> open_tokenizer(OpenedModel const& model, Settings const& settings) {
  TokenizerFiles files{settings.encoder_json, settings.vocab_bpe};
  if (files.none() && !model.meta.path.empty())
    if (auto found = open_tokenizer(model.meta)) return found;
  if (files.none()) files = model.tokenizer;
  if (files.none()) return nullptr;
  return open_files(files, model.config, model.path());
}

std::shared_ptr<Tokenizer const> open_tokenizer_in(fs::path const& folder, GptConfig const& config) {
  if (folder.empty()) return nullptr;
  auto const files = find_tokenizer(folder);
  if (files.none()) return nullptr;
  try {
    return open_files(files, config, folder);
  } catch (fsdp::ConfigError const&) {
    return nullptr;
  }
}

void copy_tokenizer(TokenizerFiles const& files, fs::path const& folder) {
  auto const copy = [&](fs::path const& from, fs::path const& name) {
    MappedFile const file(from);
    ckpt::replace_text_file(folder / name, as_text(file));
  };
  if (files.folder.empty()) {
    copy(files.encoder_json, "vocab.json");
    copy(files.vocab_bpe, "merges.txt");
  } else {
    for (auto const& from : tokenizer_files(files.folder)) copy(from, from.filename());
  }
}

std::string fingerprint(OpenedModel const& model) {
  auto const& config = model.config;
  return fingerprint(fsdp::formatted("{} {} {} {} {}", config.n_layer, config.n_head, config.n_embd, config.block_size,
                                     config.vocab_size),
                     gpt_tensors(config), *model.weights);
}

}  // namespace nanogpt
