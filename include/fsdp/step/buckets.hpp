// SPDX-License-Identifier: Apache-2.0
// Buckets of gradients that are all-reduced together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Buckets of NoShard: contiguous ranges of all gradients in the order in which backward completes them. Cuts elements
/// of `element_bytes` into ranges: the first of about `first_bytes`, the others of about `bucket_bytes` (both rounded
/// up to layout_alignment elements). A unit may be split, and several may be merged.
/// @param ends          of each unit, in elements
/// @param bucket_bytes  0: one bucket a unit
inline std::vector<Range> make_buckets(std::vector<std::int64_t> const& ends, std::size_t element_bytes,
                                       std::int64_t bucket_bytes, std::int64_t first_bytes) {
  std::vector<Range> buckets;
  auto const total = ends.empty() ? 0 : ends.back();
  std::int64_t begin = 0;
  if (bucket_bytes <= 0) {
    for (auto const end : ends) {
      buckets.push_back({begin, end});
      begin = end;
    }
    return buckets;
  }
  auto const elements = [&](std::int64_t bytes) {
    auto const size = static_cast<std::int64_t>(element_bytes);
    return align_up((bytes + size - 1) / size, layout_alignment);
  };
  while (begin < total) {
    auto const end = std::min(total, begin + elements(buckets.empty() ? first_bytes : bucket_bytes));
    buckets.push_back({begin, end});
    begin = end;
  }
  return buckets;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
