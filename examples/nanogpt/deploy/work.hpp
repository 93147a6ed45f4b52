// SPDX-License-Identifier: Apache-2.0
// FLOP and bytes of a GPT's modules, for plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fsdp/plan.hpp"
#include "nanogpt/gpt_config.hpp"
#include "transformer/layers/activation_plan.hpp"

namespace nanogpt {

/// By use: the embedding, each block, the head; of a micro-step of one rank. Matrix products are counted by FLOP, 2 m n
/// k each. Attention has two products forward and five backward over the T (T + 1) / 2 pairs that the causal mask
/// leaves (Dao et al., FlashAttention, arXiv:2205.14135). Norms, GELU, classifier and embedding are counted by bytes:
/// each tensor of a fused kernel moves once.
/// @param plan           of the activations: batch, length, and which blocks are computed again by themselves
/// @param element_bytes  of parameters and activations
inline std::vector<fsdp::plan::Work> work_of(GptConfig const& config, ActivationPlan const& plan,
                                             std::size_t element_bytes) {
  auto const number = [](std::int64_t value) { return static_cast<double>(value); };
  auto const e = static_cast<double>(element_bytes);
  auto const rows = number(plan.rows()), width = number(config.n_embd), vocabulary = number(config.vocab_size);
  auto const stream = rows * width * e;  // bytes of a residual stream
  auto const pairs = number(plan.batch) * number(plan.sequence) * (number(plan.sequence) + 1) / 2;
  auto const block_products = 2 * 12 * width * width * rows, attention = 2 * width * pairs;  // FLOP of one product
  std::vector<fsdp::plan::Work> uses;
  uses.push_back({{0, 2 * stream}, {0, stream + 2 * rows * width * 4}});
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    // Two norms with residuals and GELU of 4 C values; attention's operands.
    fsdp::plan::Load const forward{block_products + 2 * attention, (2 * 4 + 2 * 4 + 4) * stream};
    fsdp::plan::Load backward{2 * block_products + 5 * attention, (2 * 6 + 4 * 4 + 8) * stream};
    if (plan.segment == 1 && plan.recomputes(layer)) {
      backward.flop += forward.flop;
      backward.bytes += forward.bytes;
    }
    uses.push_back({forward, backward});
  }
  auto const head = 2 * vocabulary * width * rows;
  uses.push_back({{head, 2 * rows * vocabulary * e + 4 * stream}, {2 * head, 6 * stream}});
  return uses;
}

}  // namespace nanogpt
