// SPDX-License-Identifier: Apache-2.0
// Calls of a rank, the notes that waiting peers read of them, the ends of engines, and messages about all of these. All
// communicators use the same words.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/base/format.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm {

enum class Collective : std::uint8_t { all_gather, reduce_scatter, all_reduce, all_reduce_mean, broadcast };

constexpr std::string_view name(Collective collective) {
  constexpr std::array<std::string_view, 5> names{"all_gather", "reduce_scatter", "all_reduce", "all_reduce_mean",
                                                  "broadcast"};
  return names[static_cast<std::size_t>(collective)];
}

/// A collective, or another call in which a rank waits. For messages: refers to its texts, and is made without
/// allocation. Empty members are left out.
struct CallDescription {
  std::string_view call;            ///< name(Collective), "exchange", "ncclCommSplit", ...
  std::string_view what{};          ///< the text of an exchange
  std::uint64_t sequence = 0;       ///< a collective's number in its communicator; 0: none
  std::size_t count = 0;            ///< elements, as the caller gave them
  std::string_view type{};          ///< of the elements; empty: their number is unknown too
  int root = -1;                    ///< of a broadcast; -1: there is none
  bool in_place = false;            ///< set if in place is a variant of its own
  Label label{};                    ///< unit, pass, history
  std::string_view communicator{};  ///< name of the communicator

  static CallDescription collective(Collective kind, std::size_t count, DType type, int root, Label label) {
    return {.call = name(kind),
            .count = count,
            .type = fsdp::name(type),
            .root = kind == Collective::broadcast ? root : -1,
            .label = label};
  }
  static CallDescription exchange(std::string_view what, std::string_view communicator = {}) {
    return {.call = "exchange", .what = what, .communicator = communicator};
  }

  /// A copy that is collective `number` of the communicator `on`.
  CallDescription numbered(std::uint64_t number, std::string_view on = {}) const {
    auto copy = *this;
    copy.sequence = number;
    copy.communicator = on;
    return copy;
  }

  /// "all_gather 57 of 1024 bf16 for unit 'block.3' (backward) on 'gather' after step 0.5".
  [[gnu::cold]] std::string describe() const {
    std::string text{call};
    if (sequence != 0) text += formatted(" {}", sequence);
    if (!what.empty()) text += formatted(" of '{}'", what);
    if (!type.empty()) text += formatted(" of {} {}", count, type);
    if (in_place) text += " in place";
    if (root >= 0) text += formatted(" from rank {}", root);
    if (!label.unit.empty()) text += formatted(" for unit '{}'", label.unit);
    if (!label.pass.empty()) text += formatted(" ({})", label.pass);
    if (!communicator.empty()) text += formatted(" on '{}'", communicator);
    if (!label.history.empty()) text += formatted(" after {}", label.history);
    return text;
  }
};
using Operation [[deprecated("write CallDescription")]] = CallDescription;

/// @param who  "rank 2": this rank    @param waited  until now
[[gnu::cold]] inline std::string waiting_text(std::string_view who, CallDescription const& operation,
                                              AwakeClock::duration waited) {
  auto where = operation;
  where.label.history = {};  // for ranks that disagree: these do not, or would have been told
  return formatted("{}: waiting in {}, {}", who, where.describe(), host::elapsed_text(waited));
}

/// Last sentence of the report when a wait ends the process.
constexpr std::string_view reason_to_end(bool terminated) { return terminated ? "asked to terminate" : "giving up"; }

/// A message: ranks differ in collective number `sequence`. `first` and `second` describe it on two ranks.
/// @param cause  what differs, if that can be named
[[gnu::cold]] inline std::string disagreement_text(std::uint64_t sequence, int first_rank, std::string_view first,
                                                   int second_rank, std::string_view second,
                                                   std::string_view cause = {}) {
  return formatted("{}{}ranks disagree about collective {}: rank {} runs {}, rank {} runs {}", cause,
                   cause.empty() ? "" : "; ", sequence, first_rank, first, second_rank, second);
}
/// A message that also names the only difference: the element type, the number of elements, or a value of earlier
/// calls.
[[gnu::cold]] inline std::string disagreement_text(std::uint64_t sequence, int first_rank, CallDescription const& first,
                                                   int second_rank, CallDescription const& second) {
  std::string cause;
  if (first.call == second.call && first.label.unit == second.label.unit && first.root == second.root &&
      first.in_place == second.in_place) {
    auto const items = [](CallDescription const& of) {
      return formatted("element type {}, number of elements {}, {}", of.type, of.count, of.label.history);
    };
    cause = fsdp::detail::value_that_differs(items(first), first_rank, items(second), second_rank);
    if (cause.starts_with("history ")) cause = "calls before the last one differ";
  }
  return disagreement_text(sequence, first_rank, first.describe(), second_rank, second.describe(), cause);
}

/// @throws PeerError: `rank` waits for `peer`, which makes no more calls
[[noreturn, gnu::cold]] inline void throw_peer_left(int rank, CallDescription const& operation, int peer,
                                                    bool by_exception) {
  fail<PeerError>("rank {}: waits in {}, but rank {} has left the group{}", rank, operation.describe(), peer,
                  by_exception ? " after an exception" : "");
}

/// Checks that every communicator makes of a collective. `rank` is the number that messages give the calling rank.
/// @throws UsageError
inline void expect_buffers(int rank, CallDescription const& operation, void const* send, void const* receive) {
  FSDP_EXPECTS(operation.count == 0 || (send != nullptr && receive != nullptr), "rank {}: {}: a buffer is null", rank,
               operation.describe());
}
inline void expect_root(int rank, int ranks, CallDescription const& operation) {
  FSDP_EXPECTS(operation.root >= 0 && operation.root < ranks,
               "rank {}: {}: expected a root among the ranks, got rank {} of {}", rank, operation.describe(),
               operation.root, ranks);
}
/// @param stream  the name of the operation's stream, where it has one
inline void expect_bound_stream(int rank, CallDescription const& operation, bool is_bound,
                                std::string_view stream = {}) {
  FSDP_EXPECTS(
      is_bound,
      "rank {}: {} is enqueued on a second stream{}: all collectives of a communicator must use the same stream", rank,
      operation.describe(), stream.empty() ? "" : formatted(" ('{}')", stream));
}

constexpr std::uint64_t hash_of(std::string_view text) {  // FNV-1a
  std::uint64_t hash = 14695981039346656037u;
  for (char const c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

/// A copy of a short text, so that peers, of other processes too, may print it after its owner is gone. Long texts are
/// cut, but compared in full.
class Text {
 public:
  Text() = default;
  explicit Text(std::string_view text) { assign(text); }

  void assign(std::string_view text) {
    size_ = text.size();
    hash_ = hash_of(text);
    std::copy_n(text.data(), std::min<std::size_t>(size_, kept_.size()), kept_.begin());
  }
  std::string_view view() const { return {kept_.data(), std::min<std::size_t>(size_, kept_.size())}; }
  bool operator==(Text const& other) const {
    return size_ == other.size_ && hash_ == other.hash_ && view() == other.view();
  }

 private:
  std::array<char, 48> kept_{};
  std::uint64_t size_ = 0;
  std::uint64_t hash_ = 0;
};
static_assert(std::is_trivially_copyable_v<Text> && sizeof(Text) == 64);

/// Text that a split exchanges, so that ranks can compare it: the name of the groups that it makes.
inline std::string split_of(std::string_view name) { return formatted("split '{}'", name); }

/// Compares what ranks exchange. All ranks see the same labels, so all throw or none.
/// @param what_of  the label of a rank's exchange, as Text; `name_of` the number that messages give the rank
/// @throws OrderError naming rank 0's label and the first that differs
template <class WhatOf, class NameOf>
void expect_same_exchange(int rank, int ranks, WhatOf const& what_of, NameOf const& name_of) {
  for (int other = 1; other < ranks; ++other) {
    if (what_of(other) == what_of(0)) continue;
    fail<OrderError>("rank {}: ranks disagree about a control call: rank {} exchanges \"{}\", rank {} exchanges \"{}\"",
                     name_of(rank), name_of(0), what_of(0).view(), name_of(other), what_of(other).view());
  }
}

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

  static CallNote collective(std::uint64_t id, std::string_view communicator, CallDescription const& operation) {
    return {id << 1, cut<16>(operation.call), cut<56>(operation.label.unit), cut<16>(operation.label.pass),
            cut<24>(communicator)};
  }
  static CallNote control(std::uint64_t id, std::string_view communicator, std::string_view what) {
    return {id << 1 | 1, cut<16>("exchange"), cut<56>(what), {}, cut<24>(communicator)};
  }

  std::string text() const {
    if ((place & 1) != 0) return CallDescription::exchange(unit.data(), communicator.data()).describe();
    return CallDescription{
        .call = call.data(), .label = {unit.data(), pass.data()}, .communicator = communicator.data()}
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

/// The end of one engine on one rank. Trivially copyable: MPI moves it.
struct EngineEnd {
  std::uint64_t world = 0;         ///< number of the engine's communicator, equal on its ranks and no other's
  std::int64_t engine = 0;         ///< its number in its mesh
  std::array<char, 80> history{};  ///< text of the rank's detail::History

  std::string said() const {
    return history[0] == '\0' ? std::string("without any step")
                              : formatted("after {}", std::string_view(history.data()));
  }
};

/// The latest ends of one rank's engines.
class EngineEnds {
 public:
  /// Adds an end. Without memory for it, the engine is not compared.
  void add(std::uint64_t world, int engine, std::string_view history) noexcept {
    try {
      if (list_.empty()) list_ = fsdp::detail::FixedArray<EngineEnd>(most);
      if (size_ == most) {
        for (std::size_t i = 1; i < most; ++i) list_[i - 1] = list_[i];
        --size_;
      }
      list_[size_++] = {world, engine, cut<80>(history)};
    } catch (...) {
    }
  }
  std::span<EngineEnd const> list() const { return {list_.begin(), size_}; }
  void clear() { size_ = 0; }

 private:
  static constexpr std::size_t most = 256;
  fsdp::detail::FixedArray<EngineEnd> list_;  ///< empty, or room for the most
  std::size_t size_ = 0;
};

/// A sentence about one engine's ends on two ranks.
[[gnu::cold]] inline std::string differing_ends(EngineEnd const& one, int rank, EngineEnd const& other,
                                                int other_rank) {
  auto const value = fsdp::detail::value_that_differs(one.history.data(), rank, other.history.data(), other_rank);
  return formatted(
      "ranks ended after different steps: {}{}engine {} of its mesh ended {} on rank {}, and {} on rank {}", value,
      value.empty() ? "" : "; ", one.engine, one.said(), rank, other.said(), other_rank);
}
/// @param by_rank  the ends of each rank's engines
/// @return the first difference, as a sentence; "" if there is none. An engine that one rank alone has ended counts not
[[gnu::cold]] inline std::string difference(fsdp::detail::FixedArray<std::span<EngineEnd const>> const& by_rank) {
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    for (auto const& own : by_rank[rank])
      for (auto other = rank + 1; other < by_rank.size(); ++other)
        for (auto const& theirs : by_rank[other])
          if (theirs.world == own.world && theirs.engine == own.engine && theirs.history != own.history)
            return differing_ends(own, static_cast<int>(rank), theirs, static_cast<int>(other));
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
