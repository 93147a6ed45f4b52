// SPDX-License-Identifier: Apache-2.0
// What turns text into token ids and back.
#include "transformer/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <bit>

#include "fsdp/error.hpp"

namespace transformer {

std::vector<std::int64_t> Tokenizer::encode(std::string_view text, Marker marker) const {
  std::vector<std::int64_t> ids;
  WordCache cache(std::bit_ceil(std::min(text.size() / 8 + 1, WordCache::most_slots)));
  if (auto const id = marker == Marker::token ? end_of_text() : std::nullopt) {
    for (auto found = text.find(end_of_text_marker); found != std::string_view::npos;
         found = text.find(end_of_text_marker)) {
      append(text.substr(0, found), ids, cache);
      ids.push_back(*id);
      text.remove_prefix(found + end_of_text_marker.size());
    }
  }
  append(text, ids, cache);
  return ids;
}

std::size_t Tokenizer::checked(std::int64_t id) const {
  if (id < 0 || id >= size())
    fsdp::fail<fsdp::ConfigError>("token {} lies outside the vocabulary of {} tokens", id, size());
  return static_cast<std::size_t>(id);
}

}  // namespace transformer
