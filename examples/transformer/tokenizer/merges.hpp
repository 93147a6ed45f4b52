// SPDX-License-Identifier: Apache-2.0
// Byte-pair encoding of one word: merges pairs of symbols by rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace transformer {

/// The merges of a byte-pair encoding, ranked. A word is encoded by merging the leftmost of its pairs with the lowest
/// rank until no pair has one. HuggingFace's tokenizers and SentencePiece merge in this order, one pair at a time.
///
/// OpenAI's encoder merges all pairs of a rank before it looks for the next rank. Both orders give the same symbols if
/// a pair's symbols are bytes or results of lower ranks, each of one merge alone (BytePairFiles with anything else are
/// refused): then no merge makes a pair of lower rank than its own.
class Merges {
 public:
  using Id = std::int32_t;
  struct Merge {
    std::int32_t rank = no_rank;
    Id merged = 0;
  };
  static constexpr std::int32_t no_rank = INT32_MAX;

  /// @param count  merges that will be added at most
  explicit Merges(std::size_t count);
  /// Adds the merge of the next rank. @pre the pair has none, and there is room
  void add(Id left, Id right, Id merged) { add(left, right, {count_++, merged}); }
  /// Adds a merge of any rank. Pairs with one result may share a rank. @pre as above
  void add(Id left, Id right, Merge merge);
  /// @return rank no_rank if the pair is not merged
  Merge find(Id left, Id right) const;

  /// Merges the symbols of a word, in place. Takes O(n log n) for n symbols.
  void apply(std::vector<Id>& symbols) const;
  /// Both ways of apply: the first is quadratic and faster up to some hundred symbols.
  void apply_to_short(std::vector<Id>& symbols) const;
  void apply_to_long(std::vector<Id>& symbols) const;

 private:
  struct Entry {
    std::uint64_t pair = no_pair;
    Merge merge;
  };
  static constexpr std::uint64_t no_pair = UINT64_MAX;
  std::size_t place(std::uint64_t pair) const;

  std::vector<Entry> table_;  ///< open addressing, a power of two, at most half full
  std::int32_t count_ = 0;
};

}  // namespace transformer
