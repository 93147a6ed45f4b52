// SPDX-License-Identifier: Apache-2.0
// What turns text into token ids and back.
#include "transformer/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <bit>

#include "fsdp/error.hpp"

namespace transformer {
namespace {

/// Finds the markers in a text from the left; of those at one place, the longest.
class MarkerSearch {
 public:
  MarkerSearch(std::vector<SpecialToken> const& tokens, std::string_view text) : text_(text) {
    for (auto const& token : tokens)
      if (!token.marker.empty()) next_.push_back({&token, text.find(token.marker)});
  }

  struct Found {
    SpecialToken const* token = nullptr;  ///< null: there are no more
    std::size_t place = std::string_view::npos;
  };
  /// The first marker at `begin` or behind it. @pre `begin` does not decrease
  Found from(std::size_t begin) {
    Found first;
    for (auto& [token, place] : next_) {
      if (place < begin) place = text_.find(token->marker, begin);
      if (place == std::string_view::npos || place > first.place) continue;
      if (place < first.place || token->marker.size() > first.token->marker.size()) first = {token, place};
    }
    return first;
  }

 private:
  std::string_view text_;
  std::vector<Found> next_;
};

}  // namespace

std::vector<SpecialToken> Tokenizer::special_tokens() const {
  auto const end = end_of_text();
  if (!end) return {};
  return {{std::string(end_of_text_marker), *end}};
}

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, Marker marker) const {
  std::vector<std::int64_t> ids;
  WordCache cache(std::bit_ceil(std::min(text.size() / 8 + 1, WordCache::most_slots)));
  if (marker == Marker::text) {
    append(text, ids, cache);
    return ids;
  }
  auto const tokens = special_tokens();
  MarkerSearch search(tokens, text);
  for (std::size_t begin = 0; begin < text.size();) {
    auto const [token, place] = search.from(begin);
    auto const part = text.substr(begin, place - begin);
    if (!part.empty() && begin == 0) append(part, ids, cache);
    if (!part.empty() && begin > 0) append_behind_marker(part, ids, cache);
    if (token == nullptr) break;
    ids.push_back(token->id);
    begin = place + token->marker.size();
  }
  return ids;
}

std::size_t Tokenizer::checked(std::int64_t id) const {
  if (id < 0 || id >= size())
    fsdp::fail<fsdp::ConfigError>("token {} lies outside the vocabulary of {} tokens", id, size());
  return static_cast<std::size_t>(id);
}

}  // namespace transformer
