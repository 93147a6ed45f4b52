// SPDX-License-Identifier: Apache-2.0
// A cache of the ids of frequent words.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

namespace transformer {

/// Remembers short words with few ids, one for each of its slots: a word that comes later takes the slot. Takes 64
/// bytes a slot from the first word on. For one thread.
class WordCache {
 public:
  static constexpr std::size_t most_slots = std::size_t{1} << 15;

  /// @param slots  a power of two
  explicit WordCache(std::size_t slots = most_slots) : slot_count_(slots) {}

  struct alignas(64) Slot {
    std::uint8_t length = 0;  ///< of the word, in bytes; 0: the slot is empty
    std::uint8_t count = 0;   ///< of its ids
    std::array<char, 30> word;
    std::array<std::uint32_t, 8> ids;

    bool holds(std::string_view other) const {
      return length == other.size() && std::memcmp(word.data(), other.data(), length) == 0;
    }
    void put(std::string_view other, std::span<std::int32_t const> other_ids) {
      if (other_ids.size() > ids.size()) return;
      length = static_cast<std::uint8_t>(other.size());
      count = static_cast<std::uint8_t>(other_ids.size());
      std::copy(other.begin(), other.end(), word.begin());
      std::transform(other_ids.begin(), other_ids.end(), ids.begin(),
                     [](std::int32_t id) { return static_cast<std::uint32_t>(id); });
    }
  };
  static_assert(sizeof(Slot) == 64);

  /// The slot of a word, whatever it holds; nullptr for a word that is too long.
  Slot* slot(std::string_view word) {
    if (word.empty() || word.size() > Slot{}.word.size()) return nullptr;
    if (slots_.empty()) slots_.resize(slot_count_);
    return &slots_[std::hash<std::string_view>{}(word) & (slot_count_ - 1)];
  }

 private:
  std::size_t slot_count_;
  std::vector<Slot> slots_;
};

}  // namespace transformer
