// SPDX-License-Identifier: Apache-2.0
// Short texts that ranks exchange: names of units and of control calls; and their comparison.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

constexpr std::uint64_t hash_of(std::string_view text) {  // FNV-1a
  std::uint64_t hash = 14695981039346656037u;
  for (char const c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

/// A copy of a short text, so that peers, of other processes too, may print it after its owner is gone. Long texts are
/// cut, but compared in full.
class Text {
 public:
  Text() = default;
  explicit Text(std::string_view text) { assign(text); }

  void assign(std::string_view text) {
    size_ = text.size();
    hash_ = hash_of(text);
    std::copy_n(text.data(), std::min<std::size_t>(size_, kept_.size()), kept_.begin());
  }
  std::string_view view() const { return {kept_.data(), std::min<std::size_t>(size_, kept_.size())}; }
  bool operator==(Text const& other) const {
    return size_ == other.size_ && hash_ == other.hash_ && view() == other.view();
  }

 private:
  std::array<char, 48> kept_{};
  std::uint64_t size_ = 0;
  std::uint64_t hash_ = 0;
};
static_assert(std::is_trivially_copyable_v<Text> && sizeof(Text) == 64);

/// Text that a split exchanges, so that ranks can compare it: the name of the groups that it makes.
inline std::string split_of(std::string_view name) { return formatted("split '{}'", name); }

/// Compares what ranks exchange. All ranks see the same labels, so all throw or none.
/// @param what_of  the label of a rank's exchange, as Text; `name_of` the number that messages give the rank
/// @throws OrderError naming rank 0's label and the first that differs
template <class WhatOf, class NameOf>
void expect_same_exchange(int rank, int ranks, WhatOf const& what_of, NameOf const& name_of) {
  for (int other = 1; other < ranks; ++other) {
    if (what_of(other) == what_of(0)) continue;
    fail<OrderError>("rank {}: ranks disagree about a control call: rank {} exchanges \"{}\", rank {} exchanges \"{}\"",
                     name_of(rank), name_of(0), what_of(0).view(), name_of(other), what_of(other).view());
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
