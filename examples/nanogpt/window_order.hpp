// SPDX-License-Identifier: Apache-2.0
// The order in which training visits a token file: without replacement, the same for every world size.
#pragma once

#include <algorithm>
#include <cstdint>

namespace nanogpt {

/// One step of the splitmix64 finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
constexpr std::uint64_t mix(std::uint64_t word) {
  word += 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

/// A pseudo-random permutation of [0, size) that needs no table: a Feistel network over a power of four of words,
/// applied again until the word is in range (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
/// One to four applications on average.
class Permutation {
 public:
  /// @pre 1 <= size < 2^62
  constexpr Permutation(std::int64_t size, std::uint64_t key) : size_(static_cast<std::uint64_t>(size)), key_(key) {
    while ((std::uint64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
  }

  /// @pre 0 <= index < size
  constexpr std::int64_t operator()(std::int64_t index) const {
    auto word = static_cast<std::uint64_t>(index);
    do word = once(word);
    while (word >= size_);
    return static_cast<std::int64_t>(word);
  }

 private:
  static constexpr std::uint64_t rounds = 6;

  constexpr std::uint64_t once(std::uint64_t word) const {
    std::uint64_t const mask = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = word >> half_bits_, right = word & mask;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      std::uint64_t const next = left ^ (mix(mix(key_ + round) ^ right) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t size_, key_;
  unsigned half_bits_ = 0;
};

/// [Note: Training windows]
/// nanoGPT draws every training sequence anywhere in the text, with replacement, and every rank from a generator of its
/// own. Here the sequences of a run are numbered: iteration by iteration, micro-step by micro-step, rank by rank. An
/// epoch of them cuts the text into windows that touch but do not overlap, from a random phase on, and the windows into
/// as many equal runs, *strata*, as an iteration has sequences: each of its sequences comes from a stratum of its own,
/// which it visits in random order. Every token is then met equally often, every batch is drawn from the whole text
/// (stratified sampling: its mean gradient varies less), ranks never train on the same window in one epoch, and since a
/// sequence depends on its number alone, the global batch is the same for every number of ranks and of micro-steps.
///
/// Of an epoch, fewer than two windows' tokens and a window for each stratum are left out, at the ends; the phase
/// chooses which. Every start from 0 to tokens - block_size - 1 occurs.
class WindowOrder {
 public:
  /// @param batch  sequences of an iteration; where the text has fewer windows, there is one stratum
  /// @pre tokens > block_size >= 1, batch >= 1
  constexpr WindowOrder(std::uint64_t seed, std::int64_t tokens, std::int64_t block_size, std::int64_t batch)
      : seed_(mix(seed)), block_size_(block_size) {
    auto const windows = std::max<std::int64_t>(1, (tokens - block_size) / block_size);
    strata_ = batch <= windows ? batch : 1;
    visits_ = windows / strata_;
    phases_ = tokens - strata_ * visits_ * block_size;
  }

  /// Sequences of an epoch.
  constexpr std::int64_t windows() const { return strata_ * visits_; }

  /// First token of a sequence of the run. @pre number >= 0
  constexpr std::int64_t start(std::int64_t number) const {
    auto const round = number / strata_, stratum = number % strata_;
    auto const key = mix(seed_ ^ static_cast<std::uint64_t>(round / visits_));  // one for each epoch
    auto const phase = static_cast<std::int64_t>(mix(key) % static_cast<std::uint64_t>(phases_));
    Permutation const order(visits_, mix(key + static_cast<std::uint64_t>(stratum)));
    return phase + (stratum * visits_ + order(round % visits_)) * block_size_;
  }

 private:
  std::uint64_t seed_;
  std::int64_t block_size_;
  std::int64_t strata_ = 1, visits_ = 1;  ///< runs of windows, and windows of each
  std::int64_t phases_ = 1;
};

}  // namespace nanogpt
