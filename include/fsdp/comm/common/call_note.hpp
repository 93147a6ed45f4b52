// SPDX-License-Identifier: Apache-2.0
// Notes of the call in which a rank is. Peers may read it at any time, for the message when ranks wait in different
// calls.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "fsdp/comm/common/operation.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

/// A text in a fixed array, cut if need be.
template <std::size_t N>
constexpr std::array<char, N> cut(std::string_view text) {
  std::array<char, N> kept{};
  std::copy_n(text.data(), std::min(text.size(), N - 1), kept.begin());
  return kept;
}

/// A call of a rank: a collective, or a call of the control plane.
struct CallNote {
  std::uint64_t place = 0;  ///< the communicator's number, equal on its ranks, times two; 1 more: control plane
  std::array<char, 16> call{};
  std::array<char, 56> unit{};  ///< of the control plane: the exchanged text
  std::array<char, 16> pass{};
  std::array<char, 24> communicator{};

  static CallNote collective(std::uint64_t id, std::string_view communicator, Operation const& operation) {
    return {id << 1, cut<16>(operation.call), cut<56>(operation.label.unit), cut<16>(operation.label.pass),
            cut<24>(communicator)};
  }
  static CallNote control(std::uint64_t id, std::string_view communicator, std::string_view what) {
    return {id << 1 | 1, cut<16>("exchange"), cut<56>(what), {}, cut<24>(communicator)};
  }

  std::string text() const {
    if ((place & 1) != 0) return Operation::exchange(unit.data(), communicator.data()).describe();
    return Operation{.call = call.data(), .label = {unit.data(), pass.data()}, .communicator = communicator.data()}
        .describe();
  }
};

/// A ring of the latest numbered notes of a rank. Written by one thread; read by any, of any process that maps it.
///
/// All words are relaxed: reading them orders nothing, so that ThreadSanitizer still sees every forgotten wait for an
/// event. A note that is half there, or was overwritten, does not match its sum, and counts as not known.
template <class Note, std::size_t Depth>
class NoteRing {
  static_assert(std::is_trivially_copyable_v<Note> && sizeof(Note) % sizeof(std::uint64_t) == 0);

 public:
  static constexpr std::size_t depth = Depth;

  void write(std::uint64_t number, Note const& note) {
    auto const words = std::bit_cast<Words>(note);
    auto& slot = slots_[number % Depth];
    slot.sum.store(sum_of(words, number), std::memory_order_relaxed);
    for (std::size_t i = 0; i < words.size(); ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  }
  /// Reads note `number`; nullopt if it was not written yet, or is overwritten.
  std::optional<Note> read(std::uint64_t number) const {
    auto const& slot = slots_[number % Depth];
    auto const sum = slot.sum.load(std::memory_order_relaxed);
    Words words;
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
    if (sum != sum_of(words, number)) return std::nullopt;
    return std::bit_cast<Note>(words);
  }

 private:
  using Words = std::array<std::uint64_t, sizeof(Note) / sizeof(std::uint64_t)>;
  struct Slot {
    std::atomic<std::uint64_t> sum{0};
    std::array<std::atomic<std::uint64_t>, std::tuple_size_v<Words>> words{};
  };

  static std::uint64_t sum_of(Words const& words, std::uint64_t number) {
    constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
    std::array<std::uint64_t, 4> sums{number * odd, 1, 2, 3};  // four, so that none waits for the other
    for (std::size_t i = 0; i < words.size(); ++i) {
      auto& sum = sums[i % sums.size()];
      sum = (std::rotl(sum, 23) ^ words[i]) * odd;
    }
    return (sums[0] ^ std::rotl(sums[1], 16) ^ std::rotl(sums[2], 32) ^ std::rotl(sums[3], 48)) | 1;  // no empty slot's
  }

  std::array<Slot, Depth> slots_{};
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
