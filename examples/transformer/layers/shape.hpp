// SPDX-License-Identifier: Apache-2.0
// The shape of a decoder, the same for all models.
#pragma once

#include <cstdint>
#include <string_view>

#include "transformer/attention/shape.hpp"

namespace transformer {

/// The shape of a decoder-only transformer.
struct DecoderShape {
  std::int64_t layers = 1;
  std::int64_t width = 1;            ///< C: of the residual stream
  std::int64_t vocabulary = 1;       ///< V
  std::int64_t positions = 1;        ///< longest sequence
  std::string_view positions_field;  ///< the config's field that says so, for messages
  float dropout = 0.0f;              ///< highest probability of dropping in training
  AttentionShape attention{};
  bool tied = true;  ///< the token embedding is the head's matrix too
};

/// Row length of the logits: the vocabulary rounded up to 128. Weights keep exactly `vocabulary` rows; the columns
/// behind them hold nothing and take no part in the softmax.
constexpr std::int64_t padded_vocabulary(std::int64_t vocabulary) { return (vocabulary + 127) / 128 * 128; }

}  // namespace transformer
