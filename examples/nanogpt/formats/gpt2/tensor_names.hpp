// SPDX-License-Identifier: Apache-2.0
// The tensors of a GPT: names, shapes, and their orientation in HuggingFace's files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nanogpt/gpt_config.hpp"
#include "transformer/weights/tensor_list.hpp"

namespace nanogpt {

/// By HuggingFace's names, of GPT2LMHeadModel: "transformer.h.0.attn.c_attn.weight". Transposed: a Conv1D's.
using GptTensor = WeightTensor;

/// How a file has the weights of linear layers.
enum class Orientation {
  out_in,  ///< ours
  in_out   ///< HuggingFace's Conv1D
};

inline constexpr std::string_view token_table = "transformer.wte.weight";     // (V, C)
inline constexpr std::string_view position_table = "transformer.wpe.weight";  // (block size, C)

/// Every tensor of such a model: the tables, layer by layer, the last norm.
std::vector<GptTensor> gpt_tensors(GptConfig const& config);

/// The tensors that the files of such a model have. The head's matrix may be there too, or in place of wte: they are
/// tied.
TensorList gpt_tensor_list(GptConfig const& config, Orientation orientation);

/// Our name for one that HuggingFace's files have, with or without "transformer."; "" for a buffer, which is a mask and
/// no weight. An unknown name is given back as it is.
std::string our_name(std::string_view theirs);

/// @param what  says so, for the message
/// @throws fsdp::ConfigError unless the shape is one that a GPT may have, with numbers that cannot overflow
void expect_possible(GptConfig const& config, std::string_view what);

}  // namespace nanogpt
