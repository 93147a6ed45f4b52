// SPDX-License-Identifier: Apache-2.0
// Decodes tokens one by one into text that can be printed at once.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transformer/tokenizer/tokenizer.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {

/// Decodes a text token by token. Tokens may end inside a character: its first bytes are held back until it is whole,
/// or cannot become one any more.
class TextStream {
 public:
  /// @param tokenizer  must outlive it
  explicit TextStream(Tokenizer const& tokenizer) : tokenizer_(tokenizer) {}

  /// Adds tokens. @return the text that can be printed now
  std::string add(std::span<std::int64_t const> ids) {
    if (begun_) {
      held_ += tokenizer_.decode_rest(ids);
    } else {
      first_ids_.insert(first_ids_.end(), ids.begin(), ids.end());
      held_ = tokenizer_.decode(first_ids_);
      begun_ = !held_.empty();
    }
    auto const whole = last_whole_character(held_);
    auto text = held_.substr(0, whole);
    held_.erase(0, whole);
    return text;
  }
  std::string add(std::int64_t id) { return add({&id, 1}); }

  /// The text ends here: the bytes that are held back, as they are. The next token begins another text.
  std::string end() {
    begun_ = false;
    first_ids_.clear();
    return std::exchange(held_, {});
  }

 private:
  Tokenizer const& tokenizer_;
  std::vector<std::int64_t> first_ids_;  ///< of the tokens without a text that begin it
  bool begun_ = false;                   ///< a token had a text
  std::string held_;
};

}  // namespace transformer
