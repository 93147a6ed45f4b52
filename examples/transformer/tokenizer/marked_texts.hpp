// SPDX-License-Identifier: Apache-2.0
// Texts whose markers are tokens, a part at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transformer/tokenizer/tokenizer.hpp"

namespace transformer {

/// Another tokenizer, but for the markers of its special tokens in a text: append makes their ids of them, as encode
/// with Marker::token does, and HuggingFace's tokenizers. No cut goes through a marker.
class MarkedTexts final : public Tokenizer {
 public:
  explicit MarkedTexts(std::shared_ptr<Tokenizer const> tokenizer)
      : tokenizer_(std::move(tokenizer)), search_(tokenizer_->special_tokens()) {}

  std::int64_t size() const override { return tokenizer_->size(); }
  std::optional<std::int64_t> end_of_text() const override { return tokenizer_->end_of_text(); }
  TextTemplate text_template() const override { return tokenizer_->text_template(); }
  std::vector<SpecialToken> special_tokens() const override { return tokenizer_->special_tokens(); }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  void append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  void append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const override;
  std::string decode(std::span<std::int64_t const> ids) const override { return tokenizer_->decode(ids); }
  std::string decode_rest(std::span<std::int64_t const> ids) const override { return tokenizer_->decode_rest(ids); }
  std::size_t last_cut(std::string_view text) const override;

 private:
  enum class Place : unsigned char { beginning, rest, behind_marker };
  void append_parts(std::string_view text, Place place, std::vector<std::int64_t>& ids, WordCache& cache) const;

  std::shared_ptr<Tokenizer const> tokenizer_;
  MarkerSearch search_;
};

}  // namespace transformer
