// SPDX-License-Identifier: Apache-2.0
// Compares a tokenizer with the sums of tokenizer_cases.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/catch.hpp"
#include "tests/transformer/tokenizer_cases.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace fsdp::testing {

class Fnv {
 public:
  void add(std::uint64_t value) { sum_ = (sum_ ^ value) * 0x100000001b3u; }
  std::uint64_t sum() const { return sum_; }

 private:
  std::uint64_t sum_ = 0xcbf29ce484222325u;
};

inline std::uint64_t sum_of(std::vector<std::int64_t> const& ids) {
  Fnv sum;
  for (auto const id : ids) sum.add(static_cast<std::uint64_t>(id));
  return sum.sum();
}
inline std::uint64_t sum_of(std::string_view text) {
  Fnv sum;
  for (char const byte : text) sum.add(static_cast<unsigned char>(byte));
  return sum.sum();
}

/// The hard texts, then those that are not UTF-8.
inline std::vector<std::string> all_texts() {
  auto texts = tokenizer_texts;
  texts.insert(texts.end(), broken_texts.begin(), broken_texts.end());
  return texts;
}

/// Checks the ids and the decoded texts that the case of this name has.
inline void check_sums(std::string const& name, transformer::Tokenizer const& tokenizer,
                       std::vector<std::string> const& texts, transformer::Marker marker = transformer::Marker::text) {
  auto const& sums = token_sums.at(name);
  REQUIRE(sums.size() == texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    INFO(name << ": '" << texts[i].substr(0, 80) << "'");
    auto const ids = tokenizer.encode(texts[i], marker);
    CHECK(sum_of(ids) == sums[i].ids);
    CHECK(sum_of(tokenizer.decode(ids)) == sums[i].text);
  }
}

/// Checks that a text may be cut at last_cut of any of its beginnings, and that ids are decoded one by one as together.
/// @return how many cuts there were
inline std::size_t check_cuts(transformer::Tokenizer const& tokenizer, std::vector<std::string> const& texts) {
  std::size_t cuts = 0;
  for (auto const& text : texts) {
    auto const ids = tokenizer.encode(text);
    for (std::size_t known = 1; known <= text.size(); known += text.size() > 500 ? 97u : 1u) {
      auto const cut = tokenizer.last_cut(std::string_view(text).substr(0, known));
      if (cut == 0) continue;
      ++cuts;
      std::vector<std::int64_t> parts;
      transformer::WordCache cache(16);
      tokenizer.append(std::string_view(text).substr(0, cut), parts, cache);
      tokenizer.append_rest(std::string_view(text).substr(cut), parts, cache);
      if (parts != ids) FAIL("'" << text.substr(0, 200) << "' up to " << known << ", cut at " << cut);
    }
  }
  return cuts;
}

}  // namespace fsdp::testing
