// SPDX-License-Identifier: Apache-2.0
// Calls of a rank, and messages about them. All communicators use the same words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/difference.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"
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
struct Operation {
  std::string_view call;            ///< name(Collective), "exchange", "ncclCommSplit", ...
  std::string_view what{};          ///< the text of an exchange
  std::uint64_t sequence = 0;       ///< a collective's number in its communicator; 0: none
  std::size_t count = 0;            ///< elements, as the caller gave them
  std::string_view type{};          ///< of the elements; empty: their number is unknown too
  int root = -1;                    ///< of a broadcast; -1: there is none
  bool in_place = false;            ///< set if in place is a variant of its own
  Label label{};                    ///< unit, pass, since
  std::string_view communicator{};  ///< name of the communicator

  static Operation collective(Collective kind, std::size_t count, DType type, int root, Label label) {
    return {.call = name(kind),
            .count = count,
            .type = fsdp::name(type),
            .root = kind == Collective::broadcast ? root : -1,
            .label = label};
  }
  static Operation exchange(std::string_view what, std::string_view communicator = {}) {
    return {.call = "exchange", .what = what, .communicator = communicator};
  }

  /// A copy that is collective `number` of the communicator `on`.
  Operation numbered(std::uint64_t number, std::string_view on = {}) const {
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
    if (!label.since.empty()) text += formatted(" after {}", label.since);
    return text;
  }
};

/// @param who  "rank 2": this rank    @param waited  until now
[[gnu::cold]] inline std::string waiting_text(std::string_view who, Operation const& operation,
                                              AwakeClock::duration waited) {
  auto where = operation;
  where.label.since = {};  // for ranks that disagree: these do not, or would have been told
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
[[gnu::cold]] inline std::string disagreement_text(std::uint64_t sequence, int first_rank, Operation const& first,
                                                   int second_rank, Operation const& second) {
  std::string cause;
  if (first.call == second.call && first.label.unit == second.label.unit && first.root == second.root &&
      first.in_place == second.in_place) {
    auto const items = [](Operation const& of) {
      return formatted("element type {}, number of elements {}, {}", of.type, of.count, of.label.since);
    };
    cause = fsdp::detail::value_that_differs(items(first), first_rank, items(second), second_rank);
    if (cause.starts_with("history ")) cause = "calls before the last one differ";
  }
  return disagreement_text(sequence, first_rank, first.describe(), second_rank, second.describe(), cause);
}

/// @throws PeerError: `rank` waits for `peer`, which makes no more calls
[[noreturn, gnu::cold]] inline void throw_peer_left(int rank, Operation const& operation, int peer, bool by_exception) {
  fail<PeerError>("rank {}: waits in {}, but rank {} has left the group{}", rank, operation.describe(), peer,
                  by_exception ? " after an exception" : "");
}

/// Checks that every communicator makes of a collective. `rank` is the number that messages give the calling rank.
/// @throws UsageError
inline void expect_buffers(int rank, Operation const& operation, void const* send, void const* receive) {
  FSDP_EXPECTS(operation.count == 0 || (send != nullptr && receive != nullptr), "rank {}: {}: a buffer is null", rank,
               operation.describe());
}
inline void expect_root(int rank, int ranks, Operation const& operation) {
  FSDP_EXPECTS(operation.root >= 0 && operation.root < ranks,
               "rank {}: {}: expected a root among the ranks, got rank {} of {}", rank, operation.describe(),
               operation.root, ranks);
}
/// @param stream  the name of the operation's stream, where it has one
inline void expect_bound_stream(int rank, Operation const& operation, bool is_bound, std::string_view stream = {}) {
  FSDP_EXPECTS(
      is_bound,
      "rank {}: {} is enqueued on a second stream{}: all collectives of a communicator must use the same stream", rank,
      operation.describe(), stream.empty() ? "" : formatted(" ('{}')", stream));
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::comm
