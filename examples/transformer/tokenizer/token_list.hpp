// SPDX-License-Identifier: Apache-2.0
// The tokens of a tokenizer.json.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transformer/tokenizer/json_field.hpp"
#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/tokenizer/tokenizer_config.hpp"

namespace transformer {

/// The tokens of model.vocab and added_tokens, and those that the files beside tokenizer.json add.
class TokenList {
 public:
  /// @param what  tokenizer.json for messages: "'path'"; lives as long as this
  /// @throws fsdp::ConfigError naming the token if ids are missing, occur twice or contradict each other, or if markers
  /// are to be found otherwise than by their texts
  TokenList(JsonField const& vocab, JsonField const& added, TokenizerConfig const& config, std::string_view what);

  /// By id: a token as the file has it.
  std::vector<std::string> const& texts() const { return texts_; }
  /// The tokens whose markers are found in texts.
  std::vector<SpecialToken> const& special() const { return special_; }
  std::optional<std::int64_t> special(std::string const& marker) const {
    auto const found = special_ids_.find(marker);
    return found == special_ids_.end() ? std::nullopt : std::optional(found->second);
  }
  /// The ids of those that are found by their markers, but are ordinary text when they are decoded.
  std::vector<std::int64_t> const& not_special() const { return not_special_; }
  /// The id of a token of model.vocab.
  std::optional<Merges::Id> find(std::string const& text) const {
    auto const found = ids_.find(text);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  std::string_view what() const { return what_; }

 private:
  std::string ids_expected() const;
  bool take(std::int64_t id);
  Merges::Id new_id(JsonField const& field);
  void add_marker(std::string const& text, std::int64_t id);
  void add(JsonField const& token);
  void add(AddedToken const& token);
  void make_special(NamedToken const& token);

  std::string_view what_;
  std::unordered_map<std::string, Merges::Id> ids_;  ///< of model.vocab
  std::vector<std::string> texts_;
  std::vector<bool> taken_;
  std::vector<SpecialToken> special_;
  std::unordered_map<std::string, std::int64_t> special_ids_;
  std::vector<std::int64_t> not_special_;
};

}  // namespace transformer
