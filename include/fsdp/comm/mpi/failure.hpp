// SPDX-License-Identifier: Apache-2.0
// The first failure of a communicator, visible to all ranks of a node.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

template <std::size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  auto const length = std::min(text.size(), N - 1);
  std::copy_n(text.data(), length, to);
  to[length] = '\0';
}

/// A failure in shared memory. The first text and the earliest collective count. A rank that fails in one has done its
/// part of those before: peers that are still in them wait on, for what is under way. Zeroed memory is a note without a
/// failure.
struct FailureNote {
  static constexpr std::size_t most_text = 1024;
  static constexpr std::uint64_t none = std::numeric_limits<std::uint64_t>::max();  ///< collectives that can fail
  /// number of a wait outside of collectives
  static constexpr std::uint64_t any = none - 1;

  std::atomic<std::uint64_t> since{none};  ///< collectives from this number on are not run any more
  std::atomic<std::uint32_t> state{0};     ///< of the text. 0: none, 1: being written, 2: set
  std::uint32_t is_order_error = 0;
  char text[most_text] = {};

  /// @param collective  number of the one that waits: its peers' failures in later ones do not concern it
  bool failed(std::uint64_t collective = any) const {
    return since.load(std::memory_order_acquire) <= collective && state.load(std::memory_order_acquire) == 2;
  }
  /// @param collective  in which the rank failed; 0: all are concerned
  /// @return whether that ends more waits than before
  bool set(std::string_view what, bool order_error, std::uint64_t collective = 0) {
    std::uint32_t empty = 0;
    if (state.compare_exchange_strong(empty, 1)) {
      is_order_error = order_error ? 1 : 0;
      copy_text(text, what);
      state.store(2, std::memory_order_release);
    }
    auto earliest = since.load();
    while (collective < earliest)
      if (since.compare_exchange_weak(earliest, collective)) return true;
    return false;
  }
  /// Removes the failure. @pre no other thread uses it
  void forget() {
    since.store(none);
    state.store(0);
  }
  /// @pre failed()
  [[noreturn]] void raise(int world_rank) const {
    std::string const what = static_cast<char const*>(text);
    if (is_order_error != 0) fail<OrderError>("rank {}: {}", world_rank, what);
    throw PeerError(what);  // it names the rank where it began
  }
};

/// The failure of a stream of this process that no call had thrown before its engine ended.
inline FailureNote& left_failure() {
  static FailureNote note;
  return note;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
