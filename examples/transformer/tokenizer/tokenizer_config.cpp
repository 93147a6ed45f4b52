// SPDX-License-Identifier: Apache-2.0
#include "transformer/tokenizer/tokenizer_config.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <system_error>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/tokenizer/json_field.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t longest_tokenizer_config = 16 << 20;  // bytes: lists of added tokens

// Keys of tokenizer_config.json that are read, beside those of special tokens.
constexpr std::array tokenizer_keys = std::to_array<std::string_view>(
    {"add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "auto_map", "do_lower_case",
     "legacy", "sp_model_kwargs", "split_special_tokens", "tokenizer_class"});
// Keys without effect on the ids of a text: chats, padding and truncation, which only a caller asks for, how decoded
// text is cleaned up, names, and CodeLlama's infilling.
constexpr std::array tokenizer_keys_without_effect = std::to_array<std::string_view>({
    // clang-format off
    "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "fill_token", "from_slow", "is_local",
    "local_files_only", "max_length", "model_input_names", "model_max_length", "name_or_path", "pad_to_multiple_of",
    "pad_token_type_id", "padding_side", "processor_class", "return_token_type_ids", "spaces_between_special_tokens",
    "special_tokens_map_file", "stride", "suffix_first", "tokenizer_file", "truncation_side", "truncation_strategy",
    "trust_remote_code", "use_default_system_prompt", "use_fast"
    // clang-format on
});

// Classes of transformers that turn a tokenizer.json of byte pairs into the ids that the file describes.
constexpr std::array generic_classes = std::to_array<std::string_view>(
    {"GPT2Tokenizer", "GPT2TokenizerFast", "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"});
constexpr std::array llama_classes = std::to_array<std::string_view>(
    {"CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast"});

template <class Names>
bool is_listed(Names const& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_file_there(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

/// A file of JSON, and its name for messages.
struct JsonFile {
  std::string what;
  nlohmann::json json;

  explicit JsonFile(fs::path const& path)
      : what(fsdp::formatted("'{}'", path.string())),
        json(parse_json_object(fsdp::checkpoint::read_text_file(path, longest_tokenizer_config), what)) {}
};

class ConfigReader {
 public:
  explicit ConfigReader(fs::path const& folder) : folder_(folder) {}

  TokenizerConfig read(bool with_json) {
    bool has_decoder = false;
    auto const path = folder_ / "tokenizer_config.json", map = folder_ / "special_tokens_map.json";
    config_.where = fsdp::formatted("'{}'", path.string());
    if (is_file_there(path)) {
      JsonFile const file(path);
      JsonField const json(file.json, file.what);
      read_keys(json, with_json);
      read_special_tokens(json);
      has_decoder = !json["added_tokens_decoder"].none();
      if (has_decoder) read_decoder(json["added_tokens_decoder"]);
    }
    if (!has_decoder && is_file_there(map)) {
      JsonFile const file(map);
      JsonField const json(file.json, file.what);
      for (auto const& item : file.json.items())
        if (!is_special_key(item.key(), item.value())) refuse_key(json[item.key()]);
      read_special_tokens(json);
    }
    if (auto const added = folder_ / "added_tokens.json"; !has_decoder && is_file_there(added)) read_added(added);
    std::sort(config_.added.begin(), config_.added.end(),
              [](AddedToken const& a, AddedToken const& b) { return a.id < b.id; });
    return std::move(config_);
  }

 private:
  static void refuse_key(JsonField const& field) {
    if (!field.none()) field.wrong("supported keys only (remove this one if the model does not need it)");
  }
  static std::string place(JsonField const& field) { return fsdp::formatted("{}: {}", field.file(), field.path()); }

  /// Keys of special tokens end in "_token"; flags do so too.
  static bool is_special_key(std::string const& key, nlohmann::json const& value) {
    if (key == "additional_special_tokens" || key == "extra_special_tokens" || key == "model_specific_special_tokens")
      return true;
    return key.ends_with("_token") && !value.is_boolean() && !is_listed(tokenizer_keys_without_effect, key);
  }
  static std::string text_of(JsonField const& token) {
    return token.value().is_object() ? token["content"].text() : token.text();
  }

  void read_keys(JsonField const& json, bool with_json) {
    for (auto const& item : json.value().items())
      if (!is_listed(tokenizer_keys, item.key()) && !is_listed(tokenizer_keys_without_effect, item.key()) &&
          !is_special_key(item.key(), item.value()))
        refuse_key(json[item.key()]);
    for (auto const* const name : {"auto_map", "sp_model_kwargs"})
      if (!json[name].none() && !json[name].value().empty()) json[name].wrong("none");
    for (auto const* const name : {"do_lower_case", "split_special_tokens"}) json[name].expect_flag(false, false);
    auto const type = json["tokenizer_class"];
    bool const of_llama = type.none() || is_listed(llama_classes, type.text());
    if (!of_llama && !(with_json && is_listed(generic_classes, type.text())))
      type.wrong(with_json ? "a class of Llama, CodeLlama or GPT-2, or a generic one, such as PreTrainedTokenizerFast"
                           : "a class of Llama or CodeLlama, for there is no tokenizer.json");
    auto const flag = [&](char const* name) {
      return json[name].none() ? std::nullopt : std::optional(json[name].flag(false));
    };
    if (of_llama) config_.adds_begin = flag("add_bos_token"), config_.adds_end = flag("add_eos_token");
    config_.adds_blank = flag("add_prefix_space");
    config_.legacy = json["legacy"].flag(true);
  }

  void read_special_tokens(JsonField const& json) {
    for (auto const& item : json.value().items()) {
      if (item.value().is_null() || !is_special_key(item.key(), item.value())) continue;
      auto const field = json[item.key()];
      if (item.key() == "bos_token" || item.key() == "eos_token") {
        (item.key() == "bos_token" ? config_.begin : config_.end) = NamedToken{text_of(field), place(field)};
      } else if (item.key().ends_with("_token")) {
        config_.named.push_back({text_of(field), place(field)});
      } else if (item.value().is_object()) {
        for (auto const& token : item.value().items())
          config_.named.push_back({text_of(field[token.key()]), place(field)});
      } else {
        for (auto const& token : field.elements()) config_.named.push_back({text_of(token), place(token)});
      }
    }
  }

  bool is_named(std::string const& text) const {
    auto const is_text = [&](NamedToken const& token) { return token.text == text; };
    return (config_.begin && is_text(*config_.begin)) || (config_.end && is_text(*config_.end)) ||
           std::any_of(config_.named.begin(), config_.named.end(), is_text);
  }

  /// Tokens by their ids.
  void read_decoder(JsonField const& decoder) {
    if (!decoder.value().is_object()) decoder.wrong("an object of ids and tokens");
    for (auto const& item : decoder.value().items()) {
      auto const token = decoder[item.key()];
      std::int64_t id = -1;
      auto const* const end = item.key().data() + item.key().size();
      if (auto const read = std::from_chars(item.key().data(), end, id); read.ptr != end || id < 0)
        token.wrong("an id as its name");
      token.expect_fields({"content", "special", "single_word", "lstrip", "rstrip", "normalized", "__type", "id"});
      for (auto const* const name : {"single_word", "lstrip", "rstrip"}) token[name].expect_flag(false, false);
      auto const text = text_of(token);
      config_.added.push_back({text, id, token["special"].flag(false) || is_named(text), place(token)});
    }
  }

  /// Ids by their tokens.
  void read_added(fs::path const& path) {
    JsonFile const file(path);
    JsonField const json(file.json, file.what);
    for (auto const& item : file.json.items()) {
      auto const field = json[item.key()];
      auto const& value = item.value();
      auto const id = value.is_number_integer() ? value.get<std::int64_t>() : -1;
      if (id < 0) field.wrong("an id");
      config_.added.push_back({item.key(), id, is_named(item.key()), place(field)});
    }
  }

  fs::path const& folder_;
  TokenizerConfig config_;
};

}  // namespace

TokenizerConfig read_tokenizer_config(fs::path const& folder, bool with_json) {
  return ConfigReader(folder).read(with_json);
}

}  // namespace transformer
