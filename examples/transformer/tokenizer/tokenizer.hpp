// SPDX-License-Identifier: Apache-2.0
// The interface of tokenizers: text to token ids and back.
#pragma once

#include <array>
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

/// How encode treats the marker of a special token in a text: as its characters, or as the token.
enum class Marker : bool { text, token };

/// A token that is found in a text by its marker, before the text is tokenized. Most of them are special: they begin or
/// end texts, or separate the turns of a dialogue.
struct SpecialToken {
  std::string marker;  ///< as people write it: "</s>"
  std::int64_t id = 0;
};

/// The ids that a model expects around each text: HuggingFace's template of a single sequence.
struct TextTemplate {
  std::vector<std::int64_t> before{}, after{};

  friend bool operator==(TextTemplate const&, TextTemplate const&) = default;
};

/// Finds markers in a text from the left; of those at one place, the longest.
class MarkerSearch {
 public:
  explicit MarkerSearch(std::vector<SpecialToken> tokens);

  struct Found {
    SpecialToken const* token = nullptr;  ///< null: there is none
    std::size_t place = std::string_view::npos;
  };
  /// The first marker that begins at `begin` or behind it.
  Found find(std::string_view text, std::size_t begin) const;
  /// Calls `use(part, token)` for the text before each marker and the marker's token, and for the text behind the last
  /// marker and null. A part may be empty.
  template <class Use>
  void each_part(std::string_view text, Use const& use) const {
    for (std::size_t begin = 0;;) {
      auto const [token, place] = find(text, begin);
      use(text.substr(begin, place - begin), token);
      if (token == nullptr) return;
      begin = place + token->marker.size();
    }
  }
  /// Bytes of the longest marker; 0 if there are none.
  std::size_t longest() const { return longest_; }

 private:
  std::vector<SpecialToken> tokens_;
  std::array<std::vector<std::size_t>, 256> of_byte_;  ///< numbers of tokens by their first byte, the longest first
  std::string first_bytes_;
  std::size_t longest_ = 0;
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
  /// The ids that a model expects around each text. Neither append nor encode adds them.
  virtual TextTemplate text_template() const { return {}; }
  /// The tokens whose markers encode looks for: the one that ends a document, unless a tokenizer has others.
  virtual std::vector<SpecialToken> special_tokens() const;
  /// Appends the ids of a text; a marker in it is text.
  /// @param cache  the calling thread's, used with this tokenizer alone
  /// @throws fsdp::ConfigError if the text has what the vocabulary lacks
  virtual void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const = 0;
  /// Appends the ids of a text that continues one that append was given and that ended at last_cut. Tokenizers that put
  /// a blank before a text put none here.
  virtual void append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
    append(text, ids, cache);
  }
  /// Appends the ids of a text behind a marker.
  virtual void append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
    append(text, ids, cache);
  }
  /// @throws fsdp::ConfigError naming an id outside the vocabulary
  virtual std::string decode(std::span<std::int64_t const> ids) const = 0;
  /// Decodes ids that follow others whose text is not empty. Only decode leaves out the blank before a text.
  virtual std::string decode_rest(std::span<std::int64_t const> ids) const { return decode(ids); }
  /// The last place at which a text that goes on beyond its end may be cut, so that the ids of both parts are those of
  /// the whole; 0 if there is none yet.
  virtual std::size_t last_cut(std::string_view text) const = 0;

  /// The ids of a text. Where two markers begin at one place, the longer one counts.
  /// @throws fsdp::ConfigError as append
  std::vector<std::int64_t> encode(std::string_view text, Marker marker = Marker::text) const;

 protected:
  /// @throws fsdp::ConfigError if `id` lies outside the vocabulary
  std::size_t checked(std::int64_t id) const;
};

}  // namespace transformer
