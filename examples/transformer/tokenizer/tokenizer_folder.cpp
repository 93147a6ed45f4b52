// SPDX-License-Identifier: Apache-2.0
// The tokenizer in the folder of a model.
#include "transformer/tokenizer/tokenizer_folder.hpp"

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/error.hpp"
#include "transformer/tokenizer/json_field.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/tokenizer_json.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t longest_config = 16 << 20;  // bytes: lists of added tokens

bool is_regular(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// A token of tokenizer_config.json: its text, or an object that has it.
std::optional<std::string> token_of(JsonField const& field) {
  if (field.none()) return std::nullopt;
  return field.value().is_object() ? field["content"].text() : field.text();
}

TextEnds read_text_ends(fs::path const& path) {
  if (!is_regular(path)) return {};
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const json = parse_json_object(fsdp::checkpoint::read_text_file(path, longest_config), what);
  JsonField const config(json, what);
  TextEnds ends{token_of(config["bos_token"]), token_of(config["eos_token"]), {}};
  if (!config["add_bos_token"].none()) ends.adds_begin = config["add_bos_token"].flag(false);
  return ends;
}

std::unique_ptr<Tokenizer> open_model(fs::path const& path, TextEnds const& ends) {
  auto const what = fsdp::formatted("'{}'", path.string());
  auto model = read_sentence_piece_model(fsdp::checkpoint::read_text_file(path), what);
  auto const named = [&](std::string const& marker) {
    auto const found = std::find_if(model.special_tokens.begin(), model.special_tokens.end(),
                                    [&](SpecialToken const& token) { return token.marker == marker; });
    if (found == model.special_tokens.end())
      fsdp::fail<fsdp::ConfigError>("{}: expected a control piece '{}', which tokenizer_config.json names; got none",
                                    what, marker);
    return found->id;
  };
  if (ends.begin) model.begin_of_text = named(*ends.begin);
  if (ends.end) model.end_of_text = named(*ends.end);
  if (!ends.adds_begin.value_or(true)) model.begin_of_text.reset();
  return std::make_unique<SentencePiece>(std::move(model));
}

}  // namespace

bool has_tokenizer(fs::path const& folder) {
  return is_regular(folder / "tokenizer.json") || is_regular(folder / "tokenizer.model");
}

std::vector<fs::path> tokenizer_files(fs::path const& folder) {
  std::vector<fs::path> files;
  for (auto const* const name : {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"})
    if (is_regular(folder / name) && (files.empty() || name != std::string_view("tokenizer.model")))
      files.push_back(folder / name);
  return files;
}

std::unique_ptr<Tokenizer> open_tokenizer_folder(fs::path const& folder, std::int64_t vocab_size) {
  if (!has_tokenizer(folder))
    fsdp::fail<fsdp::ConfigError>("'{}': expected tokenizer.json or tokenizer.model, got neither", folder.string());
  auto const ends = read_text_ends(folder / "tokenizer_config.json");
  auto path = folder / "tokenizer.json";
  std::unique_ptr<Tokenizer> tokenizer;
  if (is_regular(path)) {
    tokenizer =
        read_tokenizer_json(fsdp::checkpoint::read_text_file(path), fsdp::formatted("'{}'", path.string()), ends);
  } else {
    path = folder / "tokenizer.model";
    tokenizer = open_model(path, ends);
  }
  if (tokenizer->size() > vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}': expected at most {} tokens, the model's vocab_size, got {}", path.string(),
                                  vocab_size, tokenizer->size());
  return tokenizer;
}

}  // namespace transformer
