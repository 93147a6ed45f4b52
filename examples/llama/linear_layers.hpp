// SPDX-License-Identifier: Apache-2.0
// The linear layers of a block.
#pragma once

#include <array>
#include <string_view>

namespace llama {

/// Their names in the block, in the order of their tensors.
inline constexpr std::array<std::string_view, 7> linear_layers{
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

}  // namespace llama
