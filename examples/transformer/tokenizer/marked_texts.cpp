// SPDX-License-Identifier: Apache-2.0
#include "transformer/tokenizer/marked_texts.hpp"

namespace transformer {

void MarkedTexts::append_parts(std::string_view text, Place place, std::vector<std::int64_t>& ids,
                               WordCache& cache) const {
  search_.each_part(text, [&](std::string_view part, SpecialToken const* token) {
    if (!part.empty() && place == Place::beginning) tokenizer_->append(part, ids, cache);
    if (!part.empty() && place == Place::rest) tokenizer_->append_rest(part, ids, cache);
    if (!part.empty() && place == Place::behind_marker) tokenizer_->append_behind_marker(part, ids, cache);
    if (token != nullptr) ids.push_back(token->id);
    place = Place::behind_marker;
  });
}

void MarkedTexts::append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  append_parts(text, Place::beginning, ids, cache);
}

void MarkedTexts::append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  append_parts(text, Place::rest, ids, cache);
}

void MarkedTexts::append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  append_parts(text, Place::behind_marker, ids, cache);
}

std::size_t MarkedTexts::last_cut(std::string_view text) const {
  auto const longest = search_.longest();
  if (longest == 0) return tokenizer_->last_cut(text);
  if (text.size() < longest) return 0;
  // A marker that begins before `known` is whole, and none that is longer can begin there.
  auto const known = text.size() - longest + 1;
  std::size_t before_marker = 0, begin = 0;
  for (auto found = search_.find(text, begin); found.place < known; found = search_.find(text, begin)) {
    before_marker = found.place;
    begin = found.place + found.token->marker.size();
  }
  auto const cut = begin < known ? tokenizer_->last_cut(text.substr(begin, known - begin)) : 0;
  return cut > 0 ? begin + cut : before_marker;
}

}  // namespace transformer
