// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding over bytes, the tokenizer of GPT-2, SmolLM and Llama 3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/tokenizer/words.hpp"

namespace transformer {

/// The contents of encoder.json (tokens and their ids) and of vocab.bpe (merges, the first to be applied first), and
/// what messages call them.
struct BytePairFiles {
  std::string_view encoder_json, vocab_bpe;
  std::string_view encoder_name = "encoder.json", merges_name = "vocab.bpe";
};

/// A vocabulary of bytes and of merges.
struct BytePairParts {
  std::vector<std::string> tokens;  ///< id to bytes
  std::array<Merges::Id, 256> byte_ids{};
  Merges merges{0};
  WordPattern pattern = WordPattern::gpt2;
  /// A word that is in the vocabulary is not split by merges: HuggingFace's ignore_merges.
  bool whole_words = false;
  std::vector<SpecialToken> special_tokens;
  TextTemplate around_text;
  std::optional<std::int64_t> end_of_text;
};

/// Byte-pair encoding over bytes: any text has ids, UTF-8 or not, and decoding them gives the same bytes.
class BytePair final : public Tokenizer {
 public:
  /// @throws fsdp::ConfigError saying what does not fit together, in which file
  explicit BytePair(BytePairFiles const& files);
  /// @param parts  of read_tokenizer_json, which checks them
  explicit BytePair(BytePairParts parts);

  std::int64_t size() const override { return std::ssize(parts_.tokens); }
  std::optional<std::int64_t> end_of_text() const override { return parts_.end_of_text; }
  TextTemplate text_template() const override { return parts_.around_text; }
  std::vector<SpecialToken> special_tokens() const override { return parts_.special_tokens; }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  std::string decode(std::span<std::int64_t const> ids) const override;
  std::size_t last_cut(std::string_view text) const override;

 private:
  BytePairParts parts_;
  std::unordered_map<std::string_view, Merges::Id> words_;  ///< the tokens, if whole_words
};

}  // namespace transformer
