// SPDX-License-Identifier: Apache-2.0
// The order in which training visits token files: without replacement, the same for every world size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include "fsdp/kernels.hpp"

namespace transformer {

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

/// Where a sequence begins.
struct Window {
  std::size_t shard = 0;
  std::int64_t start = 0;  ///< token of the shard
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
///
/// Several shards are cut each for itself, with a phase of its own, and their windows are numbered one shard after the
/// other. The strata are runs of these numbers, so an epoch is a permutation of the windows of all shards. One shard
/// has the order that a single file has.

class WindowOrder {
 public:
  /// @param shards  tokens of each; outlives the order
  /// @param batch   sequences of an iteration; where the text has fewer windows, there is one stratum
  /// @pre block_size >= 1, every shard has more tokens, batch >= 1
  constexpr WindowOrder(std::uint64_t seed, std::span<std::int64_t const> shards, std::int64_t block_size,
                        std::int64_t batch)
      : seed_(mix(seed)), shards_(shards), block_size_(block_size) {
    for (auto const tokens : shards_) windows_ += windows_of(tokens);
    strata_ = batch <= windows_ ? batch : 1;
  }

  /// Sequences of an epoch.
  constexpr std::int64_t windows() const { return windows_; }

  /// The window of a sequence: its first token. Sequences of a run are numbered from 0. @pre number >= 0
  constexpr Window at(std::int64_t number) const {
    auto const epoch = number / windows_, visit = number % windows_;
    auto const round = visit / strata_, stratum = visit % strata_;
    auto const size = windows_ / strata_, longer = windows_ % strata_;  // the first strata have a window more
    auto const key = mix(seed_ ^ static_cast<std::uint64_t>(epoch));
    Rotation const order(size + (stratum < longer ? 1 : 0), mix(key + static_cast<std::uint64_t>(stratum)));
    auto window = stratum * size + std::min(stratum, longer) + order(round);
    std::size_t shard = 0;
    for (; window >= windows_of(shards_[shard]); ++shard) window -= windows_of(shards_[shard]);
    auto const phases = shards_[shard] - windows_of(shards_[shard]) * block_size_;
    auto const word = mix(key ^ (static_cast<std::uint64_t>(shard) << 40));
    auto const phase = static_cast<std::int64_t>(word % static_cast<std::uint64_t>(phases));
    return {shard, phase + window * block_size_};
  }

 private:
  constexpr std::int64_t windows_of(std::int64_t tokens) const {
    return std::max<std::int64_t>(1, (tokens - block_size_) / block_size_);
  }

  std::uint64_t seed_;
  std::span<std::int64_t const> shards_;
  std::int64_t block_size_;
  std::int64_t windows_ = 0;  ///< of an epoch
  std::int64_t strata_ = 1;   ///< runs of them
};

/// The number of places in the shards at which sequences may begin. @pre every shard has more than block_size tokens
constexpr std::int64_t count_starts(std::span<std::int64_t const> shards, std::int64_t block_size) {
  std::int64_t count = 0;
  for (auto const tokens : shards) count += tokens - block_size;
  return count;
}

/// The place of this number among them. @pre 0 <= number < count_starts(shards, block_size)
constexpr Window start_of_number(std::span<std::int64_t const> shards, std::int64_t block_size, std::int64_t number) {
  std::size_t shard = 0;
  for (; number >= shards[shard] - block_size; ++shard) number -= shards[shard] - block_size;
  return {shard, number};
}

}  // namespace transformer
