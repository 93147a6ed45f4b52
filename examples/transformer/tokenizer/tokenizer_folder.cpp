// SPDX-License-Identifier: Apache-2.0
// The tokenizer in the folder of a model.
#include "transformer/tokenizer/tokenizer_folder.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/sentence_piece.hpp"
#include "transformer/tokenizer/tokenizer_config.hpp"
#include "transformer/tokenizer/tokenizer_json.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

constexpr std::array names_of_files = std::to_array<std::string_view>(
    {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"});

bool is_regular(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// Adds the tokens that other files describe.
void add_tokens(SentencePieceModel& model, TokenizerConfig const& config, std::string_view what) {
  std::unordered_map<std::string, std::int64_t> ids;
  for (auto const& piece : model.pieces) ids.emplace(piece.text, static_cast<std::int64_t>(ids.size()));
  auto const id_of = [&](std::string const& text) {
    auto const found = ids.find(text);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  };
  auto const add_marker = [&](std::string const& text, std::int64_t id) {
    auto const is_known = [&](SpecialToken const& token) { return token.id == id; };
    auto const kind = model.pieces[static_cast<std::size_t>(id)].kind;
    if (kind == PieceKind::unknown || std::any_of(model.special_tokens.begin(), model.special_tokens.end(), is_known))
      return;
    model.special_tokens.push_back({text, id});
  };
  for (auto const& token : config.added) {
    auto const known = id_of(token.text);
    auto const id = known.value_or(static_cast<std::int64_t>(model.pieces.size()));
    if (token.id != id || count_characters(token.text) < 2)
      fsdp::fail<fsdp::ConfigError>(
          "{}: token '{}': expected two characters or more, and id {}, {}, got {}", token.where, excerpt(token.text),
          id, known ? fsdp::formatted("as {} has it", what) : "the first that no token has", token.id);
    if (!known) model.pieces.push_back({token.text, 0, token.special ? PieceKind::control : PieceKind::added});
    ids.emplace(token.text, id);
    add_marker(token.text, id);
  }
  auto named = config.named;
  for (auto const& token : {config.begin, config.end})
    if (token) named.push_back(*token);
  for (auto const& token : named) {
    auto const id = id_of(token.text);
    if (!id)
      fsdp::fail<fsdp::ConfigError>(
          "{}: expected a token of {}, or one whose id added_tokens_decoder or added_tokens.json has, got '{}'",
          token.where, what, excerpt(token.text));
    if (count_characters(token.text) > 1) add_marker(token.text, *id);
  }
  if (config.begin) model.begin_of_text = id_of(config.begin->text);
  if (config.end) model.end_of_text = id_of(config.end->text);
}

std::unique_ptr<Tokenizer> open_model(fs::path const& path, TokenizerConfig const& config) {
  auto const what = fsdp::formatted("'{}'", path.string());
  auto model = read_sentence_piece_model(fsdp::checkpoint::read_text_file(path), what);
  add_tokens(model, config, what);
  model.blank_behind_markers = config.legacy;
  if (config.adds_blank.value_or(true) != (model.blank_before != BlankBefore::never) && config.adds_blank)
    fsdp::fail<fsdp::ConfigError>("{}: add_prefix_space: expected {}, as {} has it", config.where, !*config.adds_blank,
                                  what);
  if (config.adds_begin.value_or(true) && model.begin_of_text) model.around_text.before = {*model.begin_of_text};
  if (config.adds_end.value_or(false) && model.end_of_text) model.around_text.after = {*model.end_of_text};
  return std::make_unique<SentencePiece>(std::move(model));
}

}  // namespace

bool has_tokenizer(fs::path const& folder) {
  return is_regular(folder / "tokenizer.json") || is_regular(folder / "tokenizer.model");
}

std::span<std::string_view const> names_of_tokenizer_files() { return names_of_files; }

std::vector<fs::path> tokenizer_files(fs::path const& folder) {
  std::vector<fs::path> files;
  for (auto const name : names_of_files)
    if (is_regular(folder / name) && (files.empty() || name != "tokenizer.model")) files.push_back(folder / name);
  return files;
}

std::unique_ptr<Tokenizer> open_tokenizer_folder(fs::path const& folder, std::int64_t vocab_size) {
  if (!has_tokenizer(folder))
    fsdp::fail<fsdp::ConfigError>("'{}': expected tokenizer.json or tokenizer.model, got neither", folder.string());
  auto path = folder / "tokenizer.json";
  bool const with_json = is_regular(path);
  auto const config = read_tokenizer_config(folder, with_json);
  std::unique_ptr<Tokenizer> tokenizer;
  if (with_json) {
    tokenizer =
        read_tokenizer_json(fsdp::checkpoint::read_text_file(path), fsdp::formatted("'{}'", path.string()), config);
  } else {
    path = folder / "tokenizer.model";
    tokenizer = open_model(path, config);
  }
  if (tokenizer->size() > vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}': expected at most {} tokens, the model's vocab_size, got {}", path.string(),
                                  vocab_size, tokenizer->size());
  return tokenizer;
}

}  // namespace transformer
