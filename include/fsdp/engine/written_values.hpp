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
#include "fsdp/format.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Hashes of the values that this rank has written, by unit.
class WrittenValues {
 public:
  explicit WrittenValues(std::size_t units = 0) : hashes_(units, 0) {}

  /// Adds the unit's next values. It hashes four lanes of 8 bytes, and takes little longer than reading the values.
  void add(std::size_t unit, std::span<std::byte const> bytes) {
    constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
    std::array<std::uint64_t, 4> lanes{hashes_[unit] ^ bytes.size(), 1, 2, 3}, words{};
    for (std::size_t at = 0; at < bytes.size(); at += sizeof words) {
      auto const part = bytes.subspan(at, std::min(sizeof words, bytes.size() - at));
      words = {};
      std::memcpy(words.data(), part.data(), part.size());
      for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = (std::rotl(lanes[i], 23) ^ words[i]) * odd;
    }
    hashes_[unit] = lanes[0] ^ std::rotl(lanes[1], 16) ^ std::rotl(lanes[2], 32) ^ std::rotl(lanes[3], 48);
    some_ = true;
  }
  /// Text for differing_replicas(): 16 characters for each unit; "" if nothing was written.
  [[gnu::cold]] std::string text() const {
    std::string all;
    if (some_)
      for (auto const hash : hashes_) all += formatted("{:016x}", hash);
    return all;
  }

 private:
  std::vector<std::uint64_t> hashes_;
  bool some_ = false;
};

/// A sentence that names the first unit of which two ranks that keep the same part have written other values; empty:
/// there is none.
/// @param texts    WrittenValues::text() of every rank
/// @param unit_at  the unit of a number below `units`
/// @param what     the values are
template <class UnitAt>
[[gnu::cold]] std::string differing_replicas(std::vector<std::string> const& texts, std::size_t units,
                                             UnitAt const& unit_at, std::string_view what) {
  constexpr std::string_view nothing = "0000000000000000";  // the hash of a rank that has written nothing
  constexpr std::size_t digits = nothing.size();
  auto const hash = [&](std::size_t rank, std::size_t unit) {
    std::string_view const text = texts[rank];
    return text.empty() ? nothing : text.substr(unit * digits, digits);
  };
  for (std::size_t unit = 0; unit < units; ++unit)
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      auto const twin = rank % static_cast<std::size_t>(unit_at(unit).placement().shards);
      if (hash(rank, unit) != hash(twin, unit))
        return formatted(
            "replicas of unit '{}' differ in {}: rank {} was given other values than rank {}. Give every replica the "
            "same values",
            unit_at(unit).name(), what, rank, twin);
    }
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
