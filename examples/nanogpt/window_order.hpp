// SPDX-License-Identifier: Apache-2.0
// The order in which training visits a token file: without replacement, the same for every world size.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "fsdp/kernels/rounding.hpp"

namespace nanogpt {

/// One step of SplitMix64.
constexpr std::uint64_t mix(std::uint64_t word) { return fsdp::rounding::mix(word + 0x9e3779b97f4a7c15u); }

/// A permutation of [0, size): steps of about size / golden ratio, round and round, from a start that the key chooses.
/// Any run of neighbours is spread evenly over the whole (the additive recurrence of least discrepancy: Niederreiter,
/// "Random Number Generation and Quasi-Monte Carlo Methods", SIAM 1992, chapter 3).
class Rotation {
 public:
  /// @pre 1 <= size < 2^31
  constexpr Rotation(std::int64_t size, std::uint64_t key)
      : size_(size),
        first_(static_cast<std::int64_t>(key % static_cast<std::uint64_t>(size))),
        step_(std::max<std::int64_t>(1, size * 618034 / 1000000)) {
    while (std::gcd(step_, size_) != 1) ++step_;
  }

  /// @pre 0 <= index < size
  constexpr std::int64_t operator()(std::int64_t index) const { return (first_ + index * step_) % size_; }

 private:
  std::int64_t size_, first_, step_;
};

/// [Note: Training windows]
/// nanoGPT draws every training sequence anywhere in the text, with replacement, and every rank from a generator of its
/// own. Here the sequences of a run are numbered: iteration by iteration, micro-step by micro-step, rank by rank. An
/// epoch of them cuts the text into windows that touch but do not overlap, from a random phase on, and meets each once.
/// The windows lie in as many runs, *strata*, as an iteration has sequences, equal but for a window: each of its
/// sequences comes from a stratum of its own, which it walks through in even steps from a random start. Every batch and
/// every few batches are drawn evenly from the whole text (their mean gradient varies less), ranks never train on the
/// same window in one epoch, and since a sequence depends on its number alone, the global batch is the same for every
/// number of ranks and of micro-steps.
///
/// Of the text, fewer than two windows' tokens are left out, at its ends; the phase chooses which. Every start from 0
/// to tokens - block_size - 1 occurs.
class WindowOrder {
 public:
  /// @param batch  sequences of an iteration; where the text has fewer windows, there is one stratum
  /// @pre tokens > block_size >= 1, batch >= 1
  constexpr WindowOrder(std::uint64_t seed, std::int64_t tokens, std::int64_t block_size, std::int64_t batch)
      : seed_(mix(seed)), block_size_(block_size) {
    windows_ = std::max<std::int64_t>(1, (tokens - block_size) / block_size);
    strata_ = batch <= windows_ ? batch : 1;
    phases_ = tokens - windows_ * block_size;
  }

  /// Sequences of an epoch.
  constexpr std::int64_t windows() const { return windows_; }

  /// First token of a sequence of the run. @pre number >= 0
  constexpr std::int64_t start(std::int64_t number) const {
    auto const epoch = number / windows_, visit = number % windows_;
    auto const round = visit / strata_, stratum = visit % strata_;
    auto const size = windows_ / strata_, longer = windows_ % strata_;  // the first strata have a window more
    auto const key = mix(seed_ ^ static_cast<std::uint64_t>(epoch));
    auto const phase = static_cast<std::int64_t>(mix(key) % static_cast<std::uint64_t>(phases_));
    Rotation const order(size + (stratum < longer ? 1 : 0), mix(key + static_cast<std::uint64_t>(stratum)));
    return phase + (stratum * size + std::min(stratum, longer) + order(round)) * block_size_;
  }

 private:
  std::uint64_t seed_;
  std::int64_t block_size_;
  std::int64_t windows_ = 1;  ///< of an epoch
  std::int64_t strata_ = 1;   ///< runs of them
  std::int64_t phases_ = 1;
};

}  // namespace nanogpt
