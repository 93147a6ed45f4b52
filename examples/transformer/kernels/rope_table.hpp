// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of rotary position embeddings (Su et al., arXiv:2104.09864), with HuggingFace's scalings.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace transformer {

/// How rotary embeddings are stretched beyond the positions that a model was first trained for.
struct RopeScaling {
  enum class Kind {
    none,    ///< "default"
    linear,  ///< all frequencies are divided by `factor`
    llama3   ///< low frequencies are divided by `factor`, high ones stay, those between are interpolated
  };
  Kind kind = Kind::none;
  double factor = 1.0;
  double low_freq_factor = 1.0;   ///< llama3: wavelengths above original / low_freq_factor are of low frequencies
  double high_freq_factor = 4.0;  ///< llama3: wavelengths below original / high_freq_factor are of high frequencies
  std::int64_t original_max_position_embeddings = 8192;  ///< llama3

  friend bool operator==(RopeScaling const&, RopeScaling const&) = default;
};

/// Angle per position of pair i of a head of `size` elements: theta^(-2 i / size), scaled as transformers does in
/// modeling_rope_utils.py (_compute_linear_scaling_rope_parameters, _compute_llama3_parameters).
inline double rope_frequency(RopeScaling const& scaling, double theta, std::int64_t size, std::int64_t i) {
  double const plain = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(size));
  if (scaling.kind == RopeScaling::Kind::none) return plain;
  double const divided = plain / scaling.factor;
  if (scaling.kind == RopeScaling::Kind::linear) return divided;
  constexpr double turn = 6.283185307179586476925;
  double const low = scaling.low_freq_factor, high = scaling.high_freq_factor;
  double const turns = static_cast<double>(scaling.original_max_position_embeddings) * plain / turn;
  if (turns < low) return divided;
  if (turns > high) return plain;
  double const smooth = (turns - low) / (high - low);
  return (1.0 - smooth) * divided + smooth * plain;
}

/// The table (positions, size) of rope_forward and rope_backward: of each position size / 2 cosines, then as many
/// sines. Computed in double and rounded once; transformers computes angles in fp32, which are off by some 1e-7 of the
/// position.
/// @param size  elements of a head, even
inline std::vector<float> rope_table(RopeScaling const& scaling, double theta, std::int64_t size,
                                     std::int64_t positions) {
  std::int64_t const half = size / 2;
  std::vector<float> table(static_cast<std::size_t>(positions * size));
  for (std::int64_t i = 0; i < half; ++i) {
    double const frequency = rope_frequency(scaling, theta, size, i);
    for (std::int64_t position = 0; position < positions; ++position) {
      double const angle = static_cast<double>(position) * frequency;
      auto const cosine = static_cast<std::size_t>(position * size + i);
      table[cosine] = static_cast<float>(std::cos(angle));
      table[cosine + static_cast<std::size_t>(half)] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

}  // namespace transformer
