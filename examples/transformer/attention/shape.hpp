// SPDX-License-Identifier: Apache-2.0
// The shape of an attention.
#pragma once

#include <cstdint>

namespace transformer {

struct AttentionShape {
  std::int64_t heads = 1;
  std::int64_t size = 64;  ///< Q: of a head

  /// A: of queries, of keys, of values, and of the result.
  std::int64_t width() const { return heads * size; }
};

}  // namespace transformer
