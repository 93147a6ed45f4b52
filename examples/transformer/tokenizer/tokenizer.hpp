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

/// What encode makes of the marker in a text: the characters that it is written with, or its own id.
enum class Marker : bool { text, token };

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
  /// Appends the ids of a text; a marker in it is text.
  /// @param cache  the calling thread's, used with this tokenizer alone
  /// @throws fsdp::ConfigError if the text has what the vocabulary lacks
  virtual void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const = 0;
  /// @throws fsdp::ConfigError naming an id outside the vocabulary
  virtual std::string decode(std::span<std::int64_t const> ids) const = 0;
  /// The last place at which a text that goes on beyond its end may be cut, so that the ids of both parts are those of
  /// the whole; 0 if there is none yet.
  virtual std::size_t last_cut(std::string_view text) const = 0;

  /// The ids of a text. @throws fsdp::ConfigError as append
  std::vector<std::int64_t> encode(std::string_view text, Marker marker = Marker::text) const;

 protected:
  /// @throws fsdp::ConfigError if `id` lies outside the vocabulary
  std::size_t checked(std::int64_t id) const;
};

}  // namespace transformer
