// SPDX-License-Identifier: Apache-2.0
// Reads HuggingFace's tokenizer_config.json, special_tokens_map.json and added_tokens.json, which complete the
// tokenizer.json or tokenizer.model beside them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace transformer {

/// A token that another file adds to those of tokenizer.json or tokenizer.model.
struct AddedToken {
  std::string text;
  std::int64_t id = 0;
  bool special = true;  ///< decode leaves it out where the tokenizer is SentencePiece's
  std::string where{};  ///< names the file and the key, for messages
};

/// A token that must be one of the tokenizer's: as a special token its marker is found in texts.
struct NamedToken {
  std::string text, where{};
};

struct TokenizerConfig {
  std::optional<NamedToken> begin{}, end{};  ///< bos_token, eos_token
  /// add_bos_token, add_eos_token: whether `begin` stands before each text and `end` behind it; none: the tokenizer's
  /// own file decides. Beside a tokenizer.json, transformers heeds them for the classes of Llama and CodeLlama only; a
  /// folder that names no class is taken for a Llama's.
  std::optional<bool> adds_begin{}, adds_end{};
  std::optional<bool> adds_blank{};  ///< add_prefix_space
  bool legacy = true;                ///< a text behind a marker gets a blank before it, as a whole text does
  std::vector<NamedToken> named{};   ///< further special tokens
  std::vector<AddedToken> added{};   ///< in the order of their ids
  std::string where{};               ///< tokenizer_config.json, for messages
};

/// Reads the files that are there. Where tokenizer_config.json has added_tokens_decoder, transformers reads neither
/// added_tokens.json nor special_tokens_map.json, and so do we.
/// @param with_json  there is a tokenizer.json
/// @throws fsdp::ConfigError naming the first key that is wrong, with which transformers computes other ids than we do,
/// or whose effect is not known
TokenizerConfig read_tokenizer_config(std::filesystem::path const& folder, bool with_json);

}  // namespace transformer
