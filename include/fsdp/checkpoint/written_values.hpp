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
  /// @note Collective: yes, one exchange of 16 characters a unit.
  template <class E>
  [[gnu::cold]] void expect_equal_replicas(E& engine, std::string_view what) const {
    std::string mine;
    for (auto const hash : hashes_) mine += formatted("{:016x}", hash);
    auto const texts = engine.world().exchange(mine, what);
    auto const shards = engine.shards();
    for (std::size_t unit = 0; unit < hashes_.size(); ++unit) {
      for (std::size_t rank = 0; rank < texts.size(); ++rank) {
        auto const twin = rank % static_cast<std::size_t>(shards[unit].placement().shards);
        if (texts[rank].compare(unit * digits, digits, texts[twin], unit * digits, digits) == 0) continue;
        fail<ConfigError>(
            "rank {}: replicas of unit '{}' differ in {}: rank {} was given other values than rank {}. Give every "
            "replica the same values",
            engine.rank(), shards[unit].name(), what, rank, twin);
      }
    }
  }

 private:
  static constexpr std::size_t digits = 16;  ///< of a hash
  std::vector<std::uint64_t> hashes_;
};

/// Whether this rank was given each part of a tensor that it keeps.
class ReadParts {
 public:
  /// The next part of a tensor. @param is_read  false: it stays as it is
  void add(std::string_view tensor, bool is_read) {
    parts_ += is_read ? '+' : '-';
    parts_ += tensor;
    parts_ += '\n';
  }

  /// All ranks that keep parts of a tensor were given them, or none.
  /// @throws ConfigError on every rank if they differ, naming the first tensor and two ranks
  /// @note Collective: yes.
  template <class E>
  [[gnu::cold]] void expect_whole_tensors(E& engine) const {
    auto const texts = engine.world().exchange(parts_, "imported tensors");
    for (std::size_t giver = 0; giver < texts.size(); ++giver) {
      auto const& given = texts[giver];
      for (std::size_t at = 1; at < given.size();) {
        auto const end = given.find('\n', at);
        for (std::size_t other = 0; given[at] == '+' && other < texts.size(); ++other) {
          auto const tensor = given.substr(at + 1, end - at - 1);
          if (texts[other].find(formatted("\n-{}\n", tensor)) == std::string::npos) continue;
          fail<ConfigError>(
              "rank {}: ranks differ in what they import: tensor '{}' was given on rank {} and left as it is on rank "
              "{}. Give it on all ranks or on none",
              engine.rank(), tensor, giver, other);
        }
        at = end + 1;
      }
    }
  }

 private:
  std::string parts_ = "\n";  ///< a line for each
};

}  // namespace fsdp::checkpoint
