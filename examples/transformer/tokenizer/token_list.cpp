// SPDX-License-Identifier: Apache-2.0
#include "transformer/tokenizer/token_list.hpp"

#include <iterator>
#include <set>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"

namespace transformer {
namespace {

std::size_t place_of(std::int64_t id) { return static_cast<std::size_t>(id); }

}  // namespace

TokenList::TokenList(JsonField const& vocab, JsonField const& added, TokenizerConfig const& config,
                     std::string_view what)
    : what_(what) {
  if (!vocab.value().is_object() || vocab.value().empty()) vocab.wrong("an object of tokens and their ids");
  for (auto const& item : vocab.value().items()) ids_.emplace(item.key(), 0);
  auto const elements = added.none() ? std::vector<JsonField>{} : added.elements();
  std::set<std::string> others;
  for (auto const& token : elements)
    if (!ids_.contains(token["content"].text())) others.insert(token["content"].text());
  for (auto const& token : config.added)
    if (!ids_.contains(token.text)) others.insert(token.text);
  texts_.resize(ids_.size() + others.size());
  taken_.resize(texts_.size());
  for (auto const& item : vocab.value().items()) {
    auto const id = new_id(vocab[item.key()]);
    ids_[item.key()] = id;
    texts_[place_of(id)] = item.key();
  }
  for (auto const& token : elements) add(token);
  for (auto const& token : config.added) add(token);
  for (auto const& token : config.named) make_special(token);
  if (config.begin) make_special(*config.begin);
  if (config.end) make_special(*config.end);
}

std::string TokenList::ids_expected() const {
  return fsdp::formatted("an id from 0 to {} that no other token has", texts_.size() - 1);
}

bool TokenList::take(std::int64_t id) {
  if (id < 0 || id >= std::ssize(texts_) || taken_[place_of(id)]) return false;
  taken_[place_of(id)] = true;
  return true;
}

Merges::Id TokenList::new_id(JsonField const& field) {
  auto const& value = field.value();
  auto const id = value.is_number_integer() ? value.get<std::int64_t>() : -1;
  if (!take(id)) field.wrong(ids_expected());
  return static_cast<Merges::Id>(id);
}

void TokenList::add_marker(std::string const& text, std::int64_t id) {
  texts_[place_of(id)] = text;
  special_.push_back({text, id});
  special_ids_.emplace(text, id);
}

/// Adds a token of added_tokens.
void TokenList::add(JsonField const& token) {
  token.expect_fields({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  auto const content = token["content"].text();
  if (content.empty()) token["content"].wrong("a text");
  for (auto const* const name : {"single_word", "lstrip", "rstrip"}) token[name].expect_flag(false, false);
  if (special(content)) token["content"].wrong("a token that does not occur twice");
  auto const known = find(content);
  if (known && !token["id"].is(*known)) token["id"].wrong(fsdp::formatted("{}, as in model.vocab", *known));
  auto const id = known ? *known : new_id(token["id"]);
  add_marker(content, id);
  if (!token["special"].flag(false)) not_special_.push_back(id);
}

/// Adds a token of a file beside tokenizer.json.
void TokenList::add(AddedToken const& token) {
  auto known = special(token.text);
  bool const has_marker = known.has_value();
  if (auto const piece = find(token.text); !known && piece) known = *piece;
  if (token.text.empty() || (known ? *known != token.id : !take(token.id)))
    fsdp::fail<fsdp::ConfigError>("{}: token '{}': expected {}, got {}", token.where, excerpt(token.text),
                                  known ? fsdp::formatted("id {}, as {} has it", *known, what_) : ids_expected(),
                                  token.id);
  if (has_marker) return;
  add_marker(token.text, token.id);
  if (!token.special) not_special_.push_back(token.id);
}

void TokenList::make_special(NamedToken const& token) {
  if (special(token.text)) return;
  auto const id = find(token.text);
  if (!id)
    fsdp::fail<fsdp::ConfigError>(
        "{}: expected a token of {}, or one whose id added_tokens_decoder or added_tokens.json has, got '{}'",
        token.where, what_, excerpt(token.text));
  add_marker(token.text, *id);
}

}  // namespace transformer
