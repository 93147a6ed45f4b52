// SPDX-License-Identifier: Apache-2.0
// The current pass of a model: sequences, position, dropout.
#pragma once

#include <cstdint>

#include "transformer/kernels/dropout.hpp"

namespace transformer {

/// Parts of a layer's forward: everything, or what backward needs of a layer whose output is known.
enum class Forward : unsigned char { all, without_output };

/// One micro-step as layers see it.
struct Pass {
  std::int64_t batch = 1;     ///< B: sequences
  std::int64_t length = 1;    ///< n: rows per sequence that this pass computes
  std::int64_t position = 0;  ///< position of the first of them; the keys of earlier ones are there already
  std::int64_t capacity = 1;  ///< rows between two sequences in qkv; at least position + length
  std::int64_t sequence = 0;  ///< number of the first sequence, as masks count them
  DropoutMask mask{};         ///< equal in forward and backward of a micro-step; probability 0 outside training

  std::int64_t rows() const { return batch * length; }
  /// Number of the first row, as masks count them.
  std::int64_t first_row() const { return sequence * length; }
  DropoutMask mask_of_embedding() const { return mask_at(-1, 0); }
  /// The mask of one place in a layer; places are 0 to 3.
  DropoutMask mask_at(std::int64_t layer, std::uint32_t place) const {
    DropoutMask at = mask;
    at.site = static_cast<std::uint32_t>(layer + 1) * 4 + place;
    return at;
  }
};

}  // namespace transformer
