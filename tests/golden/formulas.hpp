// SPDX-License-Identifier: Apache-2.0
// Weights, batches and projections by formula, as tests/golden/tiny_gpt2.py and make_golden.py have them.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace golden {

/// The model and the runs: tiny_gpt2.py names them alike.
inline constexpr std::int64_t layers = 2, heads = 4, width = 64, block = 32, vocabulary = 257;
inline constexpr std::int64_t sequences = 6, length = 20;  ///< of a batch over all ranks
inline constexpr int steps = 10;
inline constexpr float decay = 0.125f, clip = 1.0f, sgd_rate = 0.5f, adamw_rate = 0x1p-7f;
inline constexpr float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-3f;

/// 64 bits for each number: FNV-1a of a text, then a step and the mixing of splitmix64 (Steele, Lea and Flood, OOPSLA
/// 2014).
class Hashes {
 public:
  explicit Hashes(std::string_view text) {
    for (char const c : text) start_ = (start_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  std::uint64_t operator()(std::int64_t number) const {
    std::uint64_t z = start_ + (static_cast<std::uint64_t>(number) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t start_ = 0xcbf29ce484222325u;
};

/// Elements first, first + 1, ... of a tensor: multiples of 2^-18 that fp32 holds exactly. Matrices lie within 1/4,
/// biases within 1/8, weights of a LayerNorm within 1/8 of 1.
inline void initial(std::string_view name, std::int64_t first, std::span<float> out) {
  Hashes const hash(name);
  bool const weight = name.ends_with("weight"), norm = weight && name.find("ln_") != name.npos;
  float const scale = weight && !norm ? 0.25f : 0.125f;
  for (auto& value : out) {
    auto const centred = static_cast<std::int32_t>(hash(first++) >> 48) - 32768;
    value = static_cast<float>(centred) * 0x1p-15f * scale + (norm ? 1.0f : 0.0f);
  }
}

/// A token ("tokens") or target ("targets") of a step; `place` counts a batch's rows over all ranks.
inline std::int32_t id(Hashes const& text, int step, std::int64_t place) {
  return static_cast<std::int32_t>(text(step * sequences * length + place) % vocabulary);
}

/// Golden values of a tensor: make_golden.py defines the projections.
struct Fingerprint {
  double norm = 0;
  std::array<double, 16> projections{};
};

inline Fingerprint fingerprint(std::string const& name, std::span<float const> values) {
  Hashes const hash(name + " projections");
  Fingerprint print;
  std::int64_t place = 0;
  for (float const single : values) {
    double const value = static_cast<double>(single);
    print.norm += value * value;
    auto const bits = hash(place++);
    for (std::size_t k = 0; k < print.projections.size(); ++k)
      print.projections[k] += (2.0 * static_cast<double>((bits >> (4 * k)) & 15) - 15.0) * value;
  }
  print.norm = std::sqrt(print.norm);
  for (auto& projection : print.projections) projection /= std::sqrt(85.0);
  return print;
}

/// An estimate of the norm of two tensors' difference.
inline double distance(Fingerprint const& a, Fingerprint const& b) {
  double squares = 0;
  for (std::size_t k = 0; k < a.projections.size(); ++k) squares += std::pow(a.projections[k] - b.projections[k], 2);
  return std::sqrt(squares / static_cast<double>(a.projections.size()));
}

/// A tensor of PyTorch's.
struct Row {
  std::string_view activation;  ///< gelu or gelu_new
  std::string_view kind;        ///< logits, gradient; sgd and adamw: parameters after `steps` steps
  std::string_view tensor;
  Fingerprint print;
};

}  // namespace golden
