// SPDX-License-Identifier: Apache-2.0
// Hashes of the values that were written into shards, compared over replicas.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/consult.hpp"
#include "fsdp/error.hpp"

namespace fsdp::checkpoint {

/// Hashes of the values that this rank has written, by unit.
class WrittenValues {
 public:
  explicit WrittenValues(std::size_t units) : hashes_(units, 0) {}

  /// The next values of the unit. In four lanes of 8 bytes, so that it takes little longer than reading them.
  void add(std::size_t unit, std::span<float const> values) {
    constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
    auto const bytes = std::as_bytes(values);
    std::array<std::uint64_t, 4> lanes{hashes_[unit] ^ bytes.size(), 1, 2, 3}, words{};
    for (std::size_t at = 0; at < bytes.size(); at += sizeof words) {
      auto const part = bytes.subspan(at, std::min(sizeof words, bytes.size() - at));
      words = {};
      std::memcpy(words.data(), part.data(), part.size());
      for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = (std::rotl(lanes[i], 23) ^ words[i]) * odd;
    }
    hashes_[unit] = lanes[0] ^ std::rotl(lanes[1], 16) ^ std::rotl(lanes[2], 32) ^ std::rotl(lanes[3], 48);
  }

  /// Ranks that keep the same part of a unit have written the same.
  /// @param what  the values are, for the message
  /// @throws ConfigError on every rank if they have not, naming the first unit and two ranks
  /// @note Collective: yes; rank 0 receives 16 characters a unit of every rank.
  template <class E>
  [[gnu::cold]] void expect_equal_replicas(E& engine, std::string_view what) const {
    std::string mine;
    for (auto const hash : hashes_) mine += formatted("{:016x}", hash);
    auto const shards = engine.shards();
    auto const problem = comm::consult(engine.world(), mine, what, [&](std::vector<std::string> const& texts) {
      for (std::size_t unit = 0; unit < hashes_.size(); ++unit) {
        for (std::size_t rank = 0; rank < texts.size(); ++rank) {
          auto const twin = rank % static_cast<std::size_t>(shards[unit].placement().shards);
          if (texts[rank].compare(unit * digits, digits, texts[twin], unit * digits, digits) == 0) continue;
          return formatted("replicas of unit '{}' differ in {}: rank {} was given other values than rank {}",
                           shards[unit].name(), what, rank, twin);
        }
      }
      return std::string();
    });
    if (!problem.empty()) fail<ConfigError>("rank {}: {}. Give every replica the same values", engine.rank(), problem);
  }

 private:
  static constexpr std::size_t digits = 16;  ///< of a hash
  std::vector<std::uint64_t> hashes_;
};

/// Whether this rank was given each part of a tensor that it keeps.
class ReadParts {
 public:
  /// @param tensor   counted over all units
  /// @param is_read  false: this rank's part stays as it is
  void add(std::size_t tensor, bool is_read) {
    if (signs_.size() <= tensor) signs_.resize(tensor + 1, ' ');
    signs_[tensor] = is_read ? '+' : '-';
  }

  /// All ranks that keep parts of a tensor were given them, or none.
  /// @throws ConfigError on every rank if they differ, naming the first tensor and two ranks
  /// @note Collective: yes; rank 0 receives a character a tensor of every rank.
  template <class E>
  [[gnu::cold]] void expect_whole_tensors(E& engine) const {
    auto const problem = comm::consult(engine.world(), signs_, "imported tensors", [&](auto const& texts) {
      std::size_t tensor = 0;
      auto const shards = engine.shards();
      for (std::size_t u = 0; u < shards.size(); ++u) {
        for (auto const& info : shards[u].layout().tensors()) {
          auto const given = first_with('+', tensor, texts), left = first_with('-', tensor, texts);
          ++tensor;
          if (given < texts.size() && left < texts.size())
            return formatted("tensor '{}' was given on rank {} and left as it is on rank {}", info.name, given, left);
        }
      }
      return std::string();
    });
    if (!problem.empty())
      fail<ConfigError>("rank {}: ranks differ in what they import: {}. Give it on all ranks or on none", engine.rank(),
                        problem);
  }

 private:
  static std::size_t first_with(char sign, std::size_t tensor, std::vector<std::string> const& texts) {
    std::size_t rank = 0;
    while (rank < texts.size() && (texts[rank].size() <= tensor || texts[rank][tensor] != sign)) ++rank;
    return rank;
  }

  std::string signs_;  ///< of each tensor: '+' given, '-' left, ' ' not here
};

}  // namespace fsdp::checkpoint
