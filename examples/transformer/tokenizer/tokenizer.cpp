// SPDX-License-Identifier: Apache-2.0
// The interface of tokenizers: text to token ids and back.
#include "transformer/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "fsdp/error.hpp"

namespace transformer {
MarkerSearch::MarkerSearch(std::vector<SpecialToken> tokens) : tokens_(std::move(tokens)) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    auto const& marker = tokens_[i].marker;
    if (marker.empty()) continue;
    of_byte_[static_cast<unsigned char>(marker[0])].push_back(i);
    if (first_bytes_.find(marker[0]) == std::string::npos) first_bytes_ += marker[0];
    longest_ = std::max(longest_, marker.size());
  }
  for (auto& of_byte : of_byte_)
    std::stable_sort(of_byte.begin(), of_byte.end(),
                     [&](std::size_t a, std::size_t b) { return tokens_[a].marker.size() > tokens_[b].marker.size(); });
}

MarkerSearch::Found MarkerSearch::find(std::string_view text, std::size_t begin) const {
  bool const one_byte = first_bytes_.size() == 1;  // "<", as a rule
  for (auto place = begin; place < text.size() && !first_bytes_.empty(); ++place) {
    if (one_byte) place = text.find(first_bytes_[0], place);
    if (place == std::string_view::npos) break;
    for (auto const i : of_byte_[static_cast<unsigned char>(text[place])])
      if (text.substr(place).starts_with(tokens_[i].marker)) return {&tokens_[i], place};
  }
  return {};
}

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
  bool first = true;
  MarkerSearch(special_tokens()).each_part(text, [&](std::string_view part, SpecialToken const* token) {
    if (!part.empty() && first) append(part, ids, cache);
    if (!part.empty() && !first) append_behind_marker(part, ids, cache);
    if (token != nullptr) ids.push_back(token->id);
    first = false;
  });
  return ids;
}

std::size_t Tokenizer::checked(std::int64_t id) const {
  if (id < 0 || id >= size())
    fsdp::fail<fsdp::ConfigError>("token {} lies outside the vocabulary of {} tokens", id, size());
  return static_cast<std::size_t>(id);
}

}  // namespace transformer
