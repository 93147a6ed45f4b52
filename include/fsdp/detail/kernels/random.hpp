// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers, and stochastic rounding to bf16 and fp16. Random bits depend only on seed, step and
// element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Four 32-bit words: a counter of Philox, or its result.
struct Words {
  std::uint32_t a, b, c, d;
};

/// Philox4x32-10 of a 128-bit counter under a 64-bit key (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy
/// as 1, 2, 3; SC 2011).
FSDP_HD inline Words philox(Words counter, std::uint64_t key) {
  auto low = static_cast<std::uint32_t>(key);
  auto high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    std::uint64_t const first = std::uint64_t{0xd2511f53u} * counter.a;
    std::uint64_t const second = std::uint64_t{0xcd9e8d57u} * counter.c;
    counter = {static_cast<std::uint32_t>(second >> 32) ^ counter.b ^ low, static_cast<std::uint32_t>(second),
               static_cast<std::uint32_t>(first >> 32) ^ counter.d ^ high, static_cast<std::uint32_t>(first)};
    low += 0x9e3779b9u;
    high += 0xbb67ae85u;
  }
  return counter;
}

/// A sequence of random elements: which one is chosen by a seed and a stream id, such as a tensor's hash.
struct RandomSequence {
  std::uint64_t seed = 0;
  std::uint64_t id = 0;
};

/// Four values made of four random words, in the same order.
template <class T>
struct Four {
  T a, b, c, d;
};

/// The words of one counter of a sequence. @pre counter >= 0
FSDP_HD inline Words random_words(RandomSequence sequence, std::int64_t counter) {
  return philox({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32),
                 static_cast<std::uint32_t>(sequence.id), static_cast<std::uint32_t>(sequence.id >> 32)},
                sequence.seed);
}

/// [Note: Random elements]
/// Elements come in groups of 64. A group is 16 counters of four words; the element at position p of its group takes
/// word p / 16 of counter p % 16. Vectors of counters then give vectors of consecutive elements.
///
/// Calls `store(i, value)` for i in [0, n), where value belongs to element `first + i` of the sequence.
/// @param make   Four<T> of four random words
/// @pre first >= 0
template <class Make, class Store>
FSDP_HD inline void each_random(HostBlock const&, std::int64_t n, RandomSequence sequence, std::int64_t first,
                                Make make, Store store) {
  using T = decltype(make(Words{}).a);
  constexpr int group = 64;
  constexpr int counters = 16;
  auto const id_low = static_cast<std::uint32_t>(sequence.id);
  auto const id_high = static_cast<std::uint32_t>(sequence.id >> 32);
  for (std::int64_t begin = first - first % group; begin < first + n; begin += group) {
    T value[group];
    auto const base = static_cast<std::uint64_t>(begin / 4);
    auto const base_low = static_cast<std::uint32_t>(base);  // a multiple of 16: adding a lane never carries
    auto const base_high = static_cast<std::uint32_t>(base >> 32);
    FSDP_INDEPENDENT
    for (std::uint32_t lane = 0; lane < counters; ++lane) {
      auto const four = make(philox({base_low + lane, base_high, id_low, id_high}, sequence.seed));
      value[lane] = four.a;
      value[lane + counters] = four.b;
      value[lane + 2 * counters] = four.c;
      value[lane + 3 * counters] = four.d;
    }
    std::int64_t const offset = begin - first;
    if (offset >= 0 && offset + group <= n) {
      FSDP_INDEPENDENT
      for (int p = 0; p < group; ++p) store(offset + p, value[p]);
    } else {
      for (int p = 0; p < group; ++p) {
        if (offset + p >= 0 && offset + p < n) store(offset + p, value[p]);
      }
    }
  }
}

/// Makes and stores random elements with a Block of several threads.
template <class Block, class Make, class Store>
FSDP_HD inline void each_random(Block const& block, std::int64_t n, RandomSequence sequence, std::int64_t first,
                                Make make, Store store) {
  std::int64_t const begin = first / 64 * 16;
  std::int64_t const end = (first + n + 63) / 64 * 16;
  for (std::int64_t counter = begin + block.thread(); counter < end; counter += block.threads()) {
    auto const four = make(random_words(sequence, counter));
    std::int64_t const i = counter / 16 * 64 + counter % 16 - first;
    if (i >= 0 && i < n) store(i, four.a);
    if (i + 16 >= 0 && i + 16 < n) store(i + 16, four.b);
    if (i + 32 >= 0 && i + 32 < n) store(i + 32, four.c);
    if (i + 48 >= 0 && i + 48 < n) store(i + 48, four.d);
  }
}

/// Uniform in (0, 1], from all 32 bits.
FSDP_HD inline float uniform_above_zero(std::uint32_t word) {
  return math::mul_add(static_cast<float>(static_cast<std::int32_t>(word >> 1)), 0x1p-31f, 0x1p-32f);
}

/// Uniform in [0, 1), a multiple of 2^-24.
FSDP_HD inline float uniform_below_one(std::uint32_t word) {
  return static_cast<float>(static_cast<std::int32_t>(word >> 8)) * 0x1p-24f;
}

/// Words to uniform values in [low, high).
struct UniformValues {
  float low, high;
  FSDP_HD float one(std::uint32_t word) const {
    float const value = math::mul_add(uniform_below_one(word), high - low, low);
    return value < high ? value : low;  // rounding may reach high
  }
  FSDP_HD Four<float> operator()(Words w) const { return {one(w.a), one(w.b), one(w.c), one(w.d)}; }
};

/// Words to normal values (Box and Muller, 1958).
struct NormalValues {
  float mean, deviation;
  FSDP_HD Four<float> operator()(Words w) const {
    float const first = deviation * math::sqrt(-2.0f * math::log(uniform_above_zero(w.a)));
    float const second = deviation * math::sqrt(-2.0f * math::log(uniform_above_zero(w.c)));
    auto const one = math::sin_cos_turns(static_cast<float>(static_cast<std::int32_t>(w.b)) * 0x1p-32f);
    auto const two = math::sin_cos_turns(static_cast<float>(static_cast<std::int32_t>(w.d)) * 0x1p-32f);
    return {math::mul_add(first, one.cos, mean), math::mul_add(first, one.sin, mean),
            math::mul_add(second, two.cos, mean), math::mul_add(second, two.sin, mean)};
  }
};

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
