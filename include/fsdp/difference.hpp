// SPDX-License-Identifier: Apache-2.0
// A sentence about the first difference between two descriptions that must be equal on all ranks.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "fsdp/format.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Names the first item that differs in two lists of items, which ", " separates. An item is a name and a value behind
/// the last space: "learning rate differs: 0.1 on rank 0, 0.2 on rank 1". In a name, what precedes " with " and ": "
/// tells whose value it is, and is left out. Empty: no item differs in its value alone.
[[gnu::cold]] inline std::string value_that_differs(std::string_view one, int rank, std::string_view other,
                                                    int other_rank) {
  auto const next = [](std::string_view& list) {
    auto const end = std::min(list.find(", "), list.size());
    auto const item = list.substr(0, end);
    list.remove_prefix(std::min(end + 2, list.size()));
    return item;
  };
  while (!one.empty() && !other.empty()) {
    auto const ours = next(one), theirs = next(other);
    if (ours == theirs) continue;
    auto const at = ours.rfind(' ');
    if (at == std::string_view::npos || at != theirs.rfind(' ') || ours.substr(0, at) != theirs.substr(0, at)) break;
    auto name = ours.substr(0, at);
    for (std::string_view const before : {" with ", ": "})
      if (auto const found = name.rfind(before); found != std::string_view::npos)
        name.remove_prefix(found + before.size());
    auto const values = std::string(ours.substr(at)) + std::string(theirs.substr(at));
    if (name.empty() || values.find_first_of("()[]{}'\"") != std::string::npos) break;
    return formatted("{} differs: {} on rank {}, {} on rank {}", name, ours.substr(at + 1), rank, theirs.substr(at + 1),
                     other_rank);
  }
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
