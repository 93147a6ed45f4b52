// SPDX-License-Identifier: Apache-2.0
// The tensors of a GPT, by our names, and what HuggingFace makes of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gpt_config.hpp"

namespace nanogpt {

/// A tensor as the model has it.
struct GptTensor {
  std::string name;  ///< "transformer.h.0.attn.c_attn.weight": HuggingFace's GPT2LMHeadModel has the same
  std::vector<std::int64_t> shape;  ///< ours
  bool transposed = false;          ///< HuggingFace has it as (in, out), in a Conv1D; we as (out, in)

  std::int64_t numel() const;
  /// The extents that HuggingFace's has.
  std::vector<std::int64_t> conv1d_shape() const;
  bool is_bias() const;
};

inline constexpr std::string_view token_table = "transformer.wte.weight";     // (V, C)
inline constexpr std::string_view position_table = "transformer.wpe.weight";  // (block size, C)

/// Every tensor of such a model: the tables, layer by layer, the last norm.
std::vector<GptTensor> gpt_tensors(GptConfig const& config);

/// Our name for one that HuggingFace's files have, with or without "transformer."; "" for a buffer, which is a mask and
/// no weight. An unknown name is given back as it is.
std::string our_name(std::string_view theirs);

/// @param what  says so, for the message
/// @throws fsdp::ConfigError unless the shape is one that a GPT may have, with numbers that cannot overflow
void expect_possible(GptConfig const& config, std::string_view what);

}  // namespace nanogpt
