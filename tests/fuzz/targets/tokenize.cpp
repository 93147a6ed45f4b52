// SPDX-License-Identifier: Apache-2.0
// Any bytes as text: decoding gives them back, a cache changes nothing, both ways of merging agree, and so do the ids
// of a text that is cut where it may be.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "tests/support/byte_pair_files.hpp"
#include "transformer/tokenizer/byte_pair.hpp"
#include "transformer/tokenizer/merges.hpp"

namespace {

using fsdp::testing::BytePairs;
using transformer::BytePair;
using transformer::Merges;

void demand(bool holds) {
  if (!holds) std::abort();
}

Merges merges_of(BytePairs const& pairs) {
  Merges merges(pairs.merges.size());
  auto const tokens = pairs.tokens();
  auto const id = [&](std::string const& token) {
    return static_cast<Merges::Id>(std::find(tokens.begin(), tokens.end(), token) - tokens.begin());
  };
  for (auto const& [left, right] : pairs.merges) merges.add(id(left), id(right), id(left + right));
  return merges;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static auto const pairs = BytePairs::random(2, 300, "aeinost '\n1!\xc2\xa0\xe4\xb8");
  static BytePair const tokenizer({pairs.encoder_json(), pairs.vocab_bpe()});
  static auto const merges = merges_of(pairs);
  static transformer::WordCache cache;
  std::string_view const text(reinterpret_cast<char const*>(data), size);

  auto const ids = tokenizer.encode(text);
  demand(tokenizer.decode(ids) == text);
  demand(tokenizer.decode(tokenizer.encode(text, transformer::Marker::token)) == text);
  std::vector<std::int64_t> cached;
  tokenizer.append(text, cached, cache);
  demand(cached == ids);

  // A reader that has seen the text up to any place may cut it there.
  for (auto const known : {size / 3, size / 2, size}) {
    auto const cut = tokenizer.last_cut(text.substr(0, known));
    auto parts = tokenizer.encode(text.substr(0, cut));
    for (auto const id : tokenizer.encode(text.substr(cut))) parts.push_back(id);
    demand(parts == ids);
  }

  std::vector<Merges::Id> by_short(data, data + size), by_long = by_short;
  merges.apply_to_short(by_short);
  merges.apply_to_long(by_long);
  demand(by_short == by_long);
  return 0;
}
