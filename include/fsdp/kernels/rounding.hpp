// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding to bf16 and fp16. Random bits depend only on seed, step and element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fsdp/kernels/block.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// [Note: Stochastic rounding]
/// A value between two neighbours of a narrow type goes to the upper one with a probability that is its distance from
/// the lower one, so that the mean is the value itself: updates smaller than half a unit in the last place add up
/// instead of vanishing (Gupta, Agrawal, Gopalakrishnan, Narayanan: Deep Learning with Limited Numerical Precision,
/// ICML 2015). The bits are a function of seed, tensor, element of the full tensor, and step: no state, equal for any
/// sharding, and repeated runs repeat.
namespace rounding {

/// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
FSDP_HD constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// The random numbers of one tensor in one step.
/// @param tensor  hash_name() of the tensor's name
FSDP_HD inline std::uint64_t key(std::uint64_t seed, std::uint64_t tensor, std::int64_t step) {
  return mix(mix(seed + 0x9e3779b97f4a7c15ull) ^
             mix(tensor + static_cast<std::uint64_t>(step) * 0xd1342543de82ef95ull));
}

/// 64 random bits of an element of the tensor: enough for four roundings of 16.
FSDP_HD inline std::uint64_t bits(std::uint64_t key, std::int64_t element) {
  return mix((static_cast<std::uint64_t>(element) * 0x9e3779b97f4a7c15ull) ^ key);
}

/// Rounds to one of the two neighbours of `value` in T, as fp32; a value of T stays itself. Below 2^-14 fp16 draws on
/// 2^-40.
/// @param random  16 random bits
template <class T>
FSDP_HD inline float stochastic(float value, std::uint32_t random) {
  auto const word = detail::bit_cast<std::uint32_t>(value);
  std::uint32_t const magnitude = word & 0x7fffffffu;
  if constexpr (std::is_same_v<T, bf16>) {
    std::uint32_t const rounded = (word + random) & 0xffff0000u;
    return magnitude > 0x7f800000u ? value : detail::bit_cast<float>(rounded);
  } else if constexpr (std::is_same_v<T, fp16>) {
    if (magnitude >= 0x7f800000u) return value;
    std::uint32_t const sign = word & 0x80000000u;
    if (magnitude < 0x38800000u) {  // below 2^-14 the neighbours are multiples of 2^-24
      auto const fixed = static_cast<std::int32_t>(detail::bit_cast<float>(magnitude) * 0x1p40f);
      float const multiple = static_cast<float>((fixed + static_cast<std::int32_t>(random)) >> 16) * 0x1p-24f;
      return detail::bit_cast<float>(sign | detail::bit_cast<std::uint32_t>(multiple));
    }
    std::uint32_t const rounded = (magnitude + (random >> 3)) & 0xffffe000u;
    return detail::bit_cast<float>(sign | rounded);  // 65536 and above become infinite when stored
  } else {
    static_assert(std::is_same_v<T, float>, "stochastic rounding is to bf16 or fp16");
    return value;
  }
}

}  // namespace rounding
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
