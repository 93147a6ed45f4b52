// SPDX-License-Identifier: Apache-2.0
// GPT-2's byte-pair encoding, read from the files that OpenAI published.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/tokenizer/merges.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// The contents of encoder.json (tokens and their ids) and of vocab.bpe (merges, the first to be applied first), and
/// what messages call them.
struct BytePairFiles {
  std::string_view encoder_json, vocab_bpe;
  std::string_view encoder_name = "encoder.json", merges_name = "vocab.bpe";
};

/// Byte-pair encoding over bytes: any text has ids, UTF-8 or not, and decoding them gives the same bytes.
class BytePair final : public Tokenizer {
 public:
  /// @throws fsdp::ConfigError saying what does not fit together, in which file
  explicit BytePair(BytePairFiles const& files);

  std::int64_t size() const override { return static_cast<std::int64_t>(tokens_.size()); }
  std::optional<std::int64_t> end_of_text() const override { return end_of_text_; }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  std::string decode(std::span<std::int64_t const> ids) const override;
  std::size_t last_cut(std::string_view text) const override;

 private:
  std::vector<std::string> tokens_;  ///< id to bytes
  std::vector<Merges::Id> byte_ids_;
  Merges merges_;
  std::optional<std::int64_t> end_of_text_;
};

}  // namespace transformer
