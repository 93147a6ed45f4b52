// SPDX-License-Identifier: Apache-2.0
// Options of a decoder.
#pragma once

#include <cstdint>

#include "fsdp/kernels.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

struct DecoderOptions {
  bool training = true;                       ///< false: less memory, forward passes only
  std::int64_t recompute = 0;                 ///< number of first layers that are computed again in backward
  std::int64_t segment = 1;                   ///< layers computed again together; only the input of the first is kept
  std::int64_t unit_layers = 1;               ///< neighbouring layers that share a unit; 0: all, in the root
  std::uint64_t seed = 1337;                  ///< of the dropout masks
  std::int64_t panel = 256;                   ///< query rows of an attention panel
  std::int64_t attention_elements = 1 << 18;  ///< attention scores that a thread works on at a time
  std::int64_t logits_elements = 32 << 20;    ///< logits that exist at a time
  Tuning tuning{};
};

/// Options that suit a device. On a GPU, pieces that fill it: each part of the logits reads and writes all of the
/// classifier's gradient, and a panel's scores stay in the second-level cache on the host alone.
template <class D>
DecoderOptions decoder_options() {
  DecoderOptions options;
  if constexpr (fsdp::RunsThreadBlocks<D>) {
    options.logits_elements = std::int64_t{512} << 20;
    options.attention_elements = std::int64_t{64} << 20;
  }
  return options;
}

}  // namespace transformer
