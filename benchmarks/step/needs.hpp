// SPDX-License-Identifier: Apache-2.0
// Minimum FLOP and bytes of a training step, by class of kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "classes.hpp"
#include "examples/nanogpt/gpt_config.hpp"
#include "roof.hpp"

namespace bench {

struct Need {
  double flop = 0;
  double bytes = 0;
  /// Seconds at the roof.
  double seconds(Roof const& roof) const { return std::max(flop / roof.gemm_flops, bytes / roof.copy_bytes); }
};

/// [Note: What a class needs]
/// Matrix products and attention are counted by FLOP: 2 m n k a product; attention has two products forward and five
/// backward (Dao et al., FlashAttention, arXiv:2205.14135), each over the T (T + 1) / 2 pairs that the causal mask
/// leaves. The others are counted by bytes: each tensor of a fused kernel moves once, in its own type.
///
/// Included is what the trainer chose to compute twice: LayerNorm's and GELU's results are not kept for backward. Not
/// included is what could be left out: column sums' partial rows, zeroing, casts of micro-steps after the first.
/// Per token of width C, with e bytes an element:
///
/// - LayerNorm with the residual addition before it: reads both summands, writes sum and result, 4 C e, for each of the
///   2 L + 1; backward reads the gradient, the input and the residual's gradient and writes that, 4 C e, and the
///   result again, 2 C e, for all but the last
/// - GELU of 4 C values: 2 * 4 C e; backward reads input and gradient and writes result and gradient, 4 * 4 C e
/// - classifier: the logits are read once and overwritten once
/// - embedding: reads rows of the token table, writes them; the position table is read once a sequence of the batch.
///   Backward reads the gradient, and reads and writes a row of each table's fp32 gradient per distinct token and
///   position
/// - optimizer: reads parameter, gradient and two moments, writes all but the gradient: 28 bytes a parameter; the norm
///   reads the gradient, 4 more
/// - casts: where parameters are computed with in a narrower type, each is read in fp32 and written once a step
inline std::array<Need, class_count> needs(nanogpt::GptConfig const& config, std::int64_t batch, std::int64_t length,
                                           std::int64_t micro_steps, std::size_t element_bytes, bool clips) {
  auto const micro = static_cast<double>(micro_steps);
  auto const rows = micro * static_cast<double>(batch * length);
  auto const width = static_cast<double>(config.n_embd), layers = static_cast<double>(config.n_layer);
  auto const vocabulary = static_cast<double>(config.vocab_size), padded = static_cast<double>(config.padded_vocab());
  auto const e = static_cast<double>(element_bytes);
  auto const positions = static_cast<double>(length);
  auto const parameters = static_cast<double>(config.parameters());
  auto const distinct = micro * std::min(vocabulary, static_cast<double>(batch * length));

  std::array<Need, class_count> all{};
  auto const need = [&](KernelClass of) -> Need& { return all[static_cast<std::size_t>(of)]; };
  need(KernelClass::matrix_products).flop = 3 * 2 * rows * (layers * 12 * width * width + vocabulary * width);
  double const pairs = micro * static_cast<double>(batch) * 0.5 * positions * (positions + 1);
  need(KernelClass::attention) = {7 * 2 * pairs * width * layers, (4 + 8) * rows * width * e * layers};
  need(KernelClass::layer_norm).bytes = rows * width * e * ((2 * layers + 1) * (4 + 4) + 2 * layers * 2);
  need(KernelClass::gelu).bytes = rows * 4 * width * e * (2 + 4) * layers;
  need(KernelClass::classifier).bytes = rows * padded * e * 2;
  need(KernelClass::embedding).bytes =
      rows * width * e * 3 + micro * positions * width * e + (distinct + micro * positions) * width * 4 * 2;
  need(KernelClass::optimizer).bytes = parameters * (clips ? 32 : 28);
  if (element_bytes < 4) need(KernelClass::casts).bytes = parameters * (4 + e);
  return all;
}

}  // namespace bench
