// SPDX-License-Identifier: Apache-2.0
// Data sets: token files and their tokenizer.
#include "transformer/data/dataset.hpp"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/data/pickle.hpp"
#include "transformer/data/window_order.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/characters.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"

namespace transformer {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string_view as_text(std::span<std::byte const> bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

/// Whether `name` is that of a file beside meta.json, which cannot lead out of its folder.
bool is_plain_name(std::string const& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos;
}

constexpr std::int64_t most_tokens = 100'000'000;

/// @throws fsdp::ConfigError naming `what` and a symbol that stands there twice
std::shared_ptr<Tokenizer const> characters_of(std::vector<std::string> symbols, std::string_view what) {
  try {
    return std::make_shared<Characters>(std::move(symbols));
  } catch (fsdp::ConfigError const& twice) {
    fsdp::fail<fsdp::ConfigError>("{}: {}", what, twice.what());
  }
}

/// @param stoi  of a pickle; null: there is none
/// @throws fsdp::ConfigError unless it gives each symbol's place
void expect_inverse(PickleValue const* stoi, std::vector<std::string> const& symbols, std::string_view what) {
  if (stoi == nullptr) return;
  std::map<std::string_view, std::int64_t> ids;
  for (std::size_t i = 0; i + 1 < stoi->items.size(); i += 2)
    if (stoi->items[i].kind == PickleValue::Kind::text && stoi->items[i + 1].kind == PickleValue::Kind::number)
      ids.emplace(stoi->items[i].text, stoi->items[i + 1].number);
  bool same = ids.size() == symbols.size() && stoi->items.size() == 2 * symbols.size();
  for (std::size_t id = 0; same && id < symbols.size(); ++id) {
    auto const found = ids.find(symbols[id]);
    same = found != ids.end() && found->second == static_cast<std::int64_t>(id);
  }
  if (!same) fsdp::fail<fsdp::ConfigError>("{}: stoi: expected the inverse of itos", what);
}

/// The file beside token files that says what the tokens are.
/// @throws fsdp::ConfigError if there are two
Meta meta_in(fs::path const& folder) {
  std::error_code error;
  if (!fs::exists(folder / pickled_meta_name, error)) return read_meta(folder / meta_name);
  if (fs::exists(folder / meta_name, error))
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' has a {} and a {}: expected one of them; remove the one that does not belong to the token files",
        folder.empty() ? "." : folder.string(), meta_name, pickled_meta_name);
  return read_pickled_meta(folder / pickled_meta_name);
}

}  // namespace

Meta read_meta(fs::path const& path) {
  Meta meta;
  std::error_code error;
  if (!fs::exists(path, error)) return meta;
  MappedFile const file(path);
  auto const json = fsdp::checkpoint::parse_json<Json>(as_text(file.bytes()));
  auto const wrong = [&](std::string_view what) { fsdp::fail<fsdp::ConfigError>("'{}': {}", path.string(), what); };
  if (!json.is_object()) wrong("expected a JSON object");
  if (!json.contains("vocab_size") || !json["vocab_size"].is_number_integer())
    wrong("expected a whole number 'vocab_size'");
  meta.vocab_size = json["vocab_size"].get<std::int64_t>();
  if (meta.vocab_size < 1 || meta.vocab_size > most_tokens)
    wrong(fmt::format("vocab_size: expected 1 to {}, got {}", most_tokens, meta.vocab_size));
  Json const dtype = json.value("dtype", Json("uint16"));
  if (dtype != "uint16" && dtype != "uint32")
    wrong(fmt::format("dtype: expected \"uint16\" or \"uint32\", got {}", excerpt(dtype.dump())));
  meta.token_bytes = dtype == "uint16" ? 2 : 4;
  meta.path = path;
  if (json.contains("rows") && !json["rows"].is_boolean()) wrong("rows: expected true or false");
  meta.has_rows = json.value("rows", false);
  if (json.contains("itos")) {
    auto const& itos = json["itos"];
    if (!itos.is_array() || static_cast<std::int64_t>(itos.size()) != meta.vocab_size)
      wrong(fmt::format("expected 'itos' to be an array of {} strings (vocab_size)", meta.vocab_size));
    std::vector<std::string> symbols;
    for (auto const& symbol : itos) {
      if (!symbol.is_string()) wrong("expected strings in 'itos'");
      symbols.push_back(symbol.get<std::string>());
    }
    meta.characters = characters_of(std::move(symbols), fmt::format("'{}'", path.string()));
  }
  if (!json.contains("tokenizer") || json["tokenizer"] == "char") return meta;
  auto const add_file = [&](std::string_view key, Json const& value) {
    auto const name = value.is_string() ? value.get<std::string>() : std::string();
    if (!is_plain_name(name)) wrong(fmt::format("{}: expected the name of a file beside meta.json", key));
    if (!fs::is_regular_file(path.parent_path() / name, error))
      wrong(fmt::format("{}: '{}' is missing", key, (path.parent_path() / name).string()));
    meta.tokenizer_files.push_back(name);
  };
  meta.tokenizer_of_model = json["tokenizer"] == "model";
  if (!meta.tokenizer_of_model && json["tokenizer"] != "gpt2")
    wrong(
        fmt::format("tokenizer: expected \"char\", \"gpt2\" or \"model\", got {}", excerpt(json["tokenizer"].dump())));
  if (meta.tokenizer_of_model) {
    Json const files = json.value("tokenizer_files", Json());
    if (!files.is_array() || files.empty()) wrong("tokenizer_files: expected names of files beside meta.json");
    for (auto const& name : files) add_file("tokenizer_files", name);
  } else {
    for (auto const* const key : {"encoder_json", "vocab_bpe"}) add_file(key, json.value(key, Json()));
  }
  return meta;
}

Json meta_of_characters(std::vector<std::string> const& symbols) {
  Json meta{{"tokenizer", "char"}, {"itos", symbols}, {"stoi", Json::object()}};
  for (std::size_t id = 0; id < symbols.size(); ++id) meta["stoi"][symbols[id]] = id;
  return meta;
}

Meta read_pickled_meta(fs::path const& path) {
  using Kind = PickleValue::Kind;
  constexpr std::uint64_t largest = 16 << 20;  // bytes
  auto const what = fmt::format("'{}'", path.string());
  MappedFile const file(path);
  if (file.bytes().size() > largest)
    fsdp::fail<fsdp::ConfigError>("{}: expected at most {} bytes, got {}", what, largest, file.bytes().size());
  auto const pickle = read_pickle(as_text(file.bytes()), what);
  auto const wrong = [&](std::string_view fault) { fsdp::fail<fsdp::ConfigError>("{}: {}", what, fault); };
  auto const* const size = pickle.find("vocab_size");
  if (size == nullptr || size->kind != Kind::number || size->number < 1 || size->number > most_tokens)
    wrong(fmt::format("vocab_size: expected a whole number from 1 to {}", most_tokens));
  Meta meta;
  meta.path = path;
  meta.vocab_size = size->number;
  Json json = Json::object();
  if (auto const* const itos = pickle.find("itos"); itos != nullptr) {
    auto const count = static_cast<std::int64_t>(itos->items.size() / 2);
    if (itos->kind != Kind::dictionary || count != size->number)
      wrong(fmt::format("itos: expected a dictionary with {} entries (vocab_size)", size->number));
    std::vector<std::string> symbols(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < itos->items.size(); i += 2) {
      auto const &id = itos->items[i], &symbol = itos->items[i + 1];
      if (id.kind != Kind::number || id.number < 0 || id.number >= count || symbol.kind != Kind::text)
        wrong(fmt::format("itos: expected ids from 0 to {} and their strings", count - 1));
      symbols[static_cast<std::size_t>(id.number)] = symbol.text;
    }
    meta.characters = characters_of(symbols, what);
    expect_inverse(pickle.find("stoi"), symbols, what);
    json = meta_of_characters(symbols);
  }
  json["vocab_size"] = meta.vocab_size;
  json["dtype"] = "uint16";
  meta.json = json.dump(1) + "\n";
  return meta;
}

std::shared_ptr<Tokenizer const> open_tokenizer(Meta const& meta) {
  if (meta.tokenizer_files.empty()) return meta.characters;
  if (meta.tokenizer_of_model) return open_tokenizer_folder(meta.path.parent_path(), meta.vocab_size);
  auto const encoder_path = meta.path.parent_path() / meta.tokenizer_files.at(0);
  auto const merges_path = meta.path.parent_path() / meta.tokenizer_files.at(1);
  MappedFile const encoder(encoder_path), merges(merges_path);
  auto const encoder_name = encoder_path.string(), merges_name = merges_path.string();
  auto const tokenizer = std::make_shared<BytePair>(
      BytePairFiles{as_text(encoder.bytes()), as_text(merges.bytes()), encoder_name, merges_name});
  if (tokenizer->size() != meta.vocab_size)
    fsdp::fail<fsdp::ConfigError>("'{}' has {} tokens, but '{}' says vocab_size {}", encoder_name, tokenizer->size(),
                                  meta.path.string(), meta.vocab_size);
  return tokenizer;
}

Dataset open_dataset(DataNames const& names, bool with_val) {
  auto const folder_of_name = fs::path("data") / names.dataset;
  std::error_code error;
  if (names.train_data.empty() && !fs::is_directory(folder_of_name, error))
    fsdp::fail<fsdp::ConfigError>(
        "data: there is no folder '{}' for dataset '{}'; make it with: {} prepare --dataset={} --data=FILE",
        folder_of_name.string(), names.dataset, program_name, names.dataset);
  auto const train =
      find_token_files(names.train_data.empty() ? folder_of_name.string() : names.train_data, Split::train);
  auto const folder = train.front().parent_path();
  std::vector<fs::path> val;
  if (with_val)
    val = find_token_files(!names.val_data.empty() ? names.val_data
                           : folder.empty()        ? "."
                                                   : folder.string(),
                           Split::val);
  if (fs::exists(folder / half_prepared_name, error))
    fsdp::fail<fsdp::ConfigError>(
        "data: '{}' may have files of two data sets, because {} prepare was killed while it replaced them; run "
        "{} prepare again",
        folder.empty() ? "." : folder.string(), program_name, program_name);
  auto meta = meta_in(folder);
  auto const token_bytes = meta.token_bytes;
  Dataset dataset{std::move(meta), TokenShards(train, token_bytes), TokenShards(val, token_bytes)};
  if (dataset.meta.has_rows) {
    dataset.train_rows.emplace(dataset.train);
    if (with_val) dataset.val_rows.emplace(dataset.val);
  }
  return dataset;
}

std::int64_t draw_offset(std::uint64_t seed, Draw draw, std::uint64_t batch, std::uint64_t sequence,
                         std::int64_t choices) {
  auto const word = mix(mix(mix(mix(seed) ^ static_cast<std::uint64_t>(draw)) ^ batch) ^ sequence);
  return static_cast<std::int64_t>(word % static_cast<std::uint64_t>(choices));  // bias below choices / 2^64
}

}  // namespace transformer
