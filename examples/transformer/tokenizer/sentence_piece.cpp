// SPDX-License-Identifier: Apache-2.0
// SentencePiece's byte-pair encoding.
#include "transformer/tokenizer/sentence_piece.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

constexpr char32_t blank_code = 0x2581;
constexpr std::string_view replacement = "\xef\xbf\xbd";  // U+FFFD

/// Calls `use(place, character)` for each character of a text.
template <class Use>
void each_character(std::string_view text, Use const& use) {
  for (std::size_t place = 0; place < text.size();) {
    auto const character = utf8_at(text, place);
    use(place, character);
    place += character.length;
  }
}

/// Whether a character begins before `place` and ends behind it.
bool is_inside_character(std::string_view text, std::size_t place) {
  if ((static_cast<unsigned char>(text[place]) & 0xc0u) != 0x80u) return false;
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, place); ++back)
    if (utf8_at(text, place - back).length > back) return true;
  return false;
}

std::uint64_t pair_of_characters(char32_t left, char32_t right) { return std::uint64_t{left} << 32u | right; }

}  // namespace

SentencePiece::SentencePiece(SentencePieceModel model) : model_(std::move(model)) {
  for (std::size_t id = 0; id < model_.pieces.size(); ++id)
    if (model_.pieces[id].kind == PieceKind::unknown) unknown_ = static_cast<Id>(id);
  if (model_.byte_fallback) byte_ids_ = byte_pieces(model_.pieces, "vocabulary");
  add_characters();
  if (model_.merges)
    merge_as_listed();
  else
    merge_by_score();
  model_.merges.reset();
}

void SentencePiece::add_characters() {
  for (std::size_t i = 0; i < model_.pieces.size(); ++i) {
    auto const& [text, score, kind] = model_.pieces[i];
    auto const id = static_cast<Id>(i);
    if (kind == PieceKind::user_defined) {
      user_defined_[static_cast<unsigned char>(text[0])].push_back(id);
      join(text);
    }
    if (kind != PieceKind::normal && kind != PieceKind::user_defined) continue;
    if (auto const first = utf8_at(text, 0); first.length == text.size()) characters_.emplace(first.code, id);
  }
  for (auto& ids : user_defined_)
    std::sort(ids.begin(), ids.end(), [&](Id a, Id b) {
      return model_.pieces[static_cast<std::size_t>(a)].text.size() >
             model_.pieces[static_cast<std::size_t>(b)].text.size();
    });
}

// [Note: Pairs of a vocabulary with scores]
// SentencePiece merges two symbols if their texts together are a piece. A symbol is a character or the text of a piece,
// so all pairs that can ever be merged are found once, by cutting each piece at each of its characters. A merge's rank
// is that of the piece's score: pairs with one result share it, and so do pieces with equal scores, of which the
// leftmost is merged first.
void SentencePiece::merge_by_score() {
  std::map<float, std::int32_t, std::greater<>> ranks;
  std::unordered_map<std::string_view, Id> symbols;
  for (std::size_t id = 0; id < model_.pieces.size(); ++id) {
    auto const& [text, score, kind] = model_.pieces[id];
    if (kind != PieceKind::normal) continue;
    ranks.emplace(score, 0);
    symbols.emplace(text, static_cast<Id>(id));
  }
  for (std::int32_t rank = 0; auto& score : ranks) score.second = rank++;

  struct Pair {
    Id left, right;
    Merges::Merge merge;
  };
  std::vector<Pair> pairs;
  auto const symbol = [&](std::string_view text) {
    if (auto const found = symbols.find(text); found != symbols.end()) return found->second;
    return utf8_at(text, 0).length == text.size() ? symbol_of(text) : Id{-1};
  };
  for (std::size_t id = 0; id < model_.pieces.size(); ++id) {
    auto const& [piece, score, kind] = model_.pieces[id];
    if (kind != PieceKind::normal) continue;
    std::string_view const text = piece;
    auto const before = pairs.size();
    each_character(text, [&, score = score](std::size_t place, Utf8Character const&) {
      if (place == 0) return;
      auto const left = symbol(text.substr(0, place)), right = left < 0 ? left : symbol(text.substr(place));
      if (right >= 0) pairs.push_back({left, right, {ranks.at(score), static_cast<Id>(id)}});
    });
    if (pairs.size() > before) join(text);
  }
  merges_ = Merges(pairs.size());
  for (auto const& [left, right, merge] : pairs) merges_.add(left, right, merge);
}

void SentencePiece::merge_as_listed() {
  merges_ = Merges(model_.merges->size());
  for (auto const& [left, right, merged] : *model_.merges) {
    merges_.add(left, right, merged);
    join(model_.pieces[static_cast<std::size_t>(merged)].text);
  }
}

/// The symbol of a character that is a part of pieces.
SentencePiece::Id SentencePiece::symbol_of(std::string_view text) {
  auto const next = static_cast<Id>(model_.pieces.size() + parts_.size());
  auto const [found, is_new] = characters_.emplace(utf8_at(text, 0).code, next);
  if (is_new) parts_.emplace_back(text);
  return found->second;
}

void SentencePiece::join(std::string_view text) {
  char32_t before = 0;
  each_character(text, [&](std::size_t place, Utf8Character const& character) {
    auto const code = character.code == blank_code ? U' ' : character.code;
    if (place > 0 && before < table_size && code < table_size) joined_ascii_.set(before * table_size + code);
    if (place > 0 && (before >= table_size || code >= table_size)) joined_.insert(pair_of_characters(before, code));
    before = code;
  });
}

bool SentencePiece::joined(char32_t left, char32_t right) const {
  if (left == blank_code) left = U' ';
  if (right == blank_code) right = U' ';
  if (left < table_size && right < table_size) return joined_ascii_[left * table_size + right];
  return joined_.contains(pair_of_characters(left, right));
}

bool SentencePiece::is_piece(char32_t character) const {
  if (character == U' ' && model_.escapes_blanks) character = blank_code;
  auto const found = characters_.find(character);
  return found != characters_.end() && found->second < size();
}

/// As SentencePiece's normalizer (normalizer.cc) with the rule "identity".
std::string SentencePiece::normalized(std::string_view text, Place place) const {
  auto const blank = model_.escapes_blanks ? blank_symbol : std::string_view(" ");
  std::string out;
  if (model_.removes_extra_blanks && place == Place::beginning)
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  if (text.empty()) return out;
  out.reserve(text.size() + text.size() / 2 + blank.size());
  bool const begins_blank = text.starts_with(' ') || text.starts_with(blank_symbol);
  if (place == Place::beginning && (model_.blank_before == BlankBefore::always ||
                                    (model_.blank_before == BlankBefore::unless_there && !begins_blank)))
    out += blank;
  bool after_blank = model_.removes_extra_blanks && place == Place::beginning;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == ' ') {
      if (!after_blank) out += blank;
      after_blank = model_.removes_extra_blanks;
      ++at;
      continue;
    }
    after_blank = false;
    auto const byte = static_cast<unsigned char>(text[at]);
    auto const character = byte < 0x80 ? Utf8Character{byte, 1, true} : utf8_at(text, at);
    out += character.valid ? text.substr(at, character.length) : replacement;
    at += character.length;
  }
  while (model_.removes_extra_blanks && out.ends_with(blank)) out.resize(out.size() - blank.size());
  return out;
}

SentencePiece::Id SentencePiece::user_defined_at(std::string_view text, std::size_t place) const {
  for (auto const id : user_defined_[static_cast<unsigned char>(text[place])])
    if (text.substr(place).starts_with(model_.pieces[static_cast<std::size_t>(id)].text)) return id;
  return -1;
}

// [Note: Words of a text without words]
// A merge makes a piece, so nothing is merged across two characters that no piece has side by side: the symbols on both
// sides are the same with and without the other side. A text is cut there into words, which are short and come again.
std::size_t SentencePiece::end_of_word(std::string_view text, std::size_t begin) const {
  auto before = utf8_at(text, begin);
  auto end = begin + before.length;
  while (end < text.size() && user_defined_at(text, end) < 0) {
    auto const byte = static_cast<unsigned char>(text[end]);
    auto const next = byte < 0x80 ? Utf8Character{byte, 1, true} : utf8_at(text, end);
    if (!joined(before.code, next.code) || (model_.splits_before_blanks && next.code == blank_code)) break;
    before = next;
    end += next.length;
  }
  return end;
}

void SentencePiece::add_symbols(std::string_view text, std::vector<Id>& symbols) const {
  each_character(text, [&](std::size_t place, Utf8Character const& character) {
    if (auto const found = characters_.find(character.code); found != characters_.end())
      symbols.push_back(found->second);
    else if (!model_.byte_fallback)
      symbols.push_back(unknown_);
    else
      for (auto const byte : text.substr(place, character.length))
        symbols.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
  });
}

void SentencePiece::finish(std::vector<Id>& symbols) const {
  merges_.apply(symbols);
  auto const pieces = static_cast<Id>(model_.pieces.size());
  if (std::none_of(symbols.begin(), symbols.end(), [&](Id id) { return id >= pieces; })) return;
  std::vector<Id> ids;
  for (auto const id : symbols) {
    if (id < pieces)
      ids.push_back(id);
    else if (!model_.byte_fallback)
      ids.push_back(unknown_);
    else
      for (auto const byte : parts_[static_cast<std::size_t>(id - pieces)])
        ids.push_back(byte_ids_[static_cast<unsigned char>(byte)]);
  }
  symbols = std::move(ids);
}

void SentencePiece::append_words(std::string_view text, Place place, std::vector<std::int64_t>& ids,
                                 WordCache& cache) const {
  auto const whole = normalized(text, place);
  auto const begin_of_ids = ids.size();
  // A run of unknown characters is one id.
  auto const add = [&](std::int64_t id) {
    if (id != unknown_ || ids.size() == begin_of_ids || ids.back() != unknown_) ids.push_back(id);
  };
  std::vector<Id> symbols;
  for (std::size_t begin = 0, end = 0; begin < whole.size(); begin = end) {
    if (auto const id = user_defined_at(whole, begin); id >= 0) {
      add(id);
      end = begin + model_.pieces[static_cast<std::size_t>(id)].text.size();
      continue;
    }
    end = end_of_word(whole, begin);
    auto const word = std::string_view(whole).substr(begin, end - begin);
    auto* const slot = cache.slot(word);
    if (slot != nullptr && slot->holds(word)) {
      for (std::size_t i = 0; i < slot->count; ++i) add(slot->ids[i]);
      continue;
    }
    symbols.clear();
    add_symbols(word, symbols);
    finish(symbols);
    for (auto const id : symbols) add(id);
    if (slot != nullptr) slot->put(word, symbols);
  }
}

void SentencePiece::append_at_once(std::string_view text, std::vector<std::int64_t>& ids) const {
  auto const whole = normalized(text, Place::beginning);
  std::vector<Id> symbols;
  for (std::size_t begin = 0; begin < whole.size();) {
    auto const id = user_defined_at(whole, begin);
    auto const length =
        id >= 0 ? model_.pieces[static_cast<std::size_t>(id)].text.size() : utf8_at(whole, begin).length;
    if (id >= 0)
      symbols.push_back(id);
    else
      add_symbols(std::string_view(whole).substr(begin, length), symbols);
    begin += length;
  }
  finish(symbols);
  auto const end = std::unique(symbols.begin(), symbols.end(), [&](Id a, Id b) { return a == unknown_ && b == a; });
  ids.insert(ids.end(), symbols.begin(), end);
}

void SentencePiece::append(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  append_words(text, Place::beginning, ids, cache);
}

void SentencePiece::append_rest(std::string_view text, std::vector<std::int64_t>& ids, WordCache& cache) const {
  append_words(text, Place::rest, ids, cache);
}

void SentencePiece::append_behind_marker(std::string_view text, std::vector<std::int64_t>& ids,
                                         WordCache& cache) const {
  append_words(text, model_.blank_behind_markers ? Place::beginning : Place::rest, ids, cache);
}

/// As SentencePieceProcessor::Decode (sentencepiece_processor.cc).
std::string SentencePiece::decode_at(std::span<std::int64_t const> ids, Place place) const {
  std::string text;
  bool expects_blank = place == Place::beginning && model_.drops_first_blank, dropped = false;
  for (auto const id : ids) {
    auto const& [piece, score, kind] = model_.pieces[checked(id)];
    if (kind == PieceKind::byte) {
      text += static_cast<char>(*byte_of_piece(piece));
      continue;
    }
    if (dropped || !text.empty()) expects_blank = false;
    dropped = false;
    if (kind == PieceKind::control) continue;
    if (kind == PieceKind::unknown) {
      text += model_.unknown_text;
      continue;
    }
    std::string_view rest = piece;
    if (expects_blank && rest.starts_with(blank_symbol)) {
      rest.remove_prefix(blank_symbol.size());
      dropped = !model_.removes_extra_blanks;
    }
    for (auto found = rest.find(blank_symbol); found != std::string_view::npos; found = rest.find(blank_symbol)) {
      text += rest.substr(0, found);
      text += ' ';
      rest.remove_prefix(found + blank_symbol.size());
    }
    text += rest;
  }
  return text;
}

std::string SentencePiece::decode(std::span<std::int64_t const> ids) const { return decode_at(ids, Place::beginning); }

std::string SentencePiece::decode_rest(std::span<std::int64_t const> ids) const { return decode_at(ids, Place::rest); }

std::size_t SentencePiece::last_cut(std::string_view text) const {
  auto const code_of = [](Utf8Character const& character) {
    return character.valid ? character.code : char32_t{0xfffd};
  };
  for (auto place = last_whole_character(text); place-- > 1;) {
    if (is_inside_character(text, place)) continue;
    auto const before = code_of(utf8_before(text, place)), behind = code_of(utf8_at(text, place));
    if (joined(before, behind)) continue;
    // Blanks at an end may be removed.
    if (model_.removes_extra_blanks && (before == U' ' || before == blank_code)) continue;
    // A run of unknown characters is one id.
    if (!model_.byte_fallback && !is_piece(before) && !is_piece(behind)) continue;
    return place;
  }
  return 0;
}

}  // namespace transformer
