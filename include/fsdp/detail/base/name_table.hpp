// SPDX-License-Identifier: Apache-2.0
// A hash table from names to positions in a list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Finds entries of a list by their names in constant time. The list keeps the names; the table has a hash for each
/// entry. Entries are added and removed at the list's end. Several entries may have one name.
class NameTable {
 public:
  static constexpr std::size_t none = ~std::size_t{0};

  std::size_t size() const { return entries_.size(); }
  /// Takes memory for one more entry. @throws std::bad_alloc; nothing has changed then
  [[gnu::cold]] void reserve() {
    if (entries_.size() == entries_.capacity()) entries_.reserve(entries_.size() < 8 ? 16 : 2 * entries_.size());
    if (entries_.size() < heads_.size()) return;
    std::vector<std::size_t> heads(heads_.empty() ? 16 : 2 * heads_.size(), none);
    heads_.swap(heads);
    for (std::size_t i = 0; i < entries_.size(); ++i) link(i);
  }
  /// Adds the entry of position size(). @pre reserve() was called for it
  [[gnu::cold]] void add(std::string_view name) noexcept {
    entries_.push_back({hash_name(name), none});
    link(entries_.size() - 1);
  }
  /// Removes all but the first `count` entries.
  [[gnu::cold]] void truncate(std::size_t count) noexcept {
    for (; entries_.size() > count; entries_.pop_back()) head(entries_.back().hash) = entries_.back().next;
  }
  /// @param is_it  called with positions of entries that may have the name, the last one first; says whether one is
  /// the entry that is looked for
  /// @return its position; none: there is no such entry
  template <class IsIt>
  std::size_t find(std::string_view name, IsIt const& is_it) const {
    if (entries_.empty()) return none;
    auto const wanted = hash_name(name);
    for (auto i = heads_[wanted & (heads_.size() - 1)]; i != none; i = entries_[i].next)
      if (entries_[i].hash == wanted && is_it(i)) return i;
    return none;
  }

 private:
  struct Entry {
    std::uint64_t hash;
    std::size_t next;  ///< an earlier entry with the same head; none: there is none
  };

  std::size_t& head(std::uint64_t of) noexcept { return heads_[of & (heads_.size() - 1)]; }
  void link(std::size_t entry) noexcept {
    auto& first = head(entries_[entry].hash);
    entries_[entry].next = first;
    first = entry;
  }

  std::vector<Entry> entries_;
  std::vector<std::size_t> heads_;  ///< a power of two of them: the last entry of each chain
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
