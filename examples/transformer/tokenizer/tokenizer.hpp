// SPDX-License-Identifier: Apache-2.0
// What turns text into token ids and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transformer/tokenizer/word_cache.hpp"

namespace transformer {

/// The marker between documents, as it is written in a text.
inline constexpr std::string_view end_of_text_marker = "<|endoftext|>";

/// What encode makes of a marker in a text, that of the end of a text or another special token's: the characters that
/// it is written with, or its own id.
enum class Marker : bool { text, token };

/// A token that no text has: it begins or ends texts, or separates the turns of a dialogue.
struct SpecialToken {
  std::string marker;  ///< as people write it: "</s>"
  std::int64_t id = 0;
};

/// Turns texts into ids in [0, size()) and back. Threads may share one; what changes is in their WordCaches.
class Tokenizer {
 public:
  Tokenizer() = default;
  Tokenizer(Tokenizer const&) = delete;
  Tokenizer& operator=(Tokenizer const&) = delete;
  virtual ~Tokenizer() = default;

  virtual std::int64_t size() const = 0;
  /// The id that ends a document, if the vocabulary has one.
  virtual std::optional<std::int64_t> end_of_text() const = 0;
  /// The id that a model expects before each text, if it expects one. Neither append nor encode adds it.
  virtual std::optional<std::int64_t> begin_of_text() const { return std::nullopt; }
  /// The tokens whose markers encode looks for: the one that ends a document, unless a tokenizer has others.
  virtual std::vector<SpecialToken> special_tokens() const;
  /// Appends the ids of a text; a marker in it is text.
  /// @param cache  the calling thread's, used with this tokenizer alone
  /// @throws fsdp::ConfigError if the text has what the vocabulary lacks
  virtual void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const = 0;
  /// The same of a text that continues another, which append was given and which ended at last_cut. Some tokenizers put
  /// a blank before a text; this one gets none.
  virtual void append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
    append(text, ids, cache);
  }
  /// @throws fsdp::ConfigError naming an id outside the vocabulary
  virtual std::string decode(std::span<std::int64_t const> ids) const = 0;
  /// The same of ids that follow others, whose text is not empty: the blank before a text is left out by decode alone.
  virtual std::string decode_rest(std::span<std::int64_t const> ids) const { return decode(ids); }
  /// The last place at which a text that goes on beyond its end may be cut, so that the ids of both parts are those of
  /// the whole; 0 if there is none yet.
  virtual std::size_t last_cut(std::string_view text) const = 0;

  /// The ids of a text. Where two markers begin at one place, the longer one counts.
  /// @throws fsdp::ConfigError as append
  std::vector<std::int64_t> encode(std::string_view text, Marker marker = Marker::text) const;

 protected:
  /// Appends the text behind a marker.
  virtual void append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
    append(text, ids, cache);
  }
  /// @throws fsdp::ConfigError if `id` lies outside the vocabulary
  std::size_t checked(std::int64_t id) const;
};

}  // namespace transformer
