// SPDX-License-Identifier: Apache-2.0
// The first failure that concerns several ranks, where all ranks of a node see it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"

namespace fsdp::mpi::detail {

template <std::size_t N>
void copy_text(char (&to)[N], std::string_view text) {
  auto const length = std::min(text.size(), N - 1);
  std::copy_n(text.data(), length, to);
  to[length] = '\0';
}

/// In shared memory. Zeroed memory is a note without a failure.
struct FailureNote {
  static constexpr std::size_t most_text = 1024;

  std::atomic<std::uint32_t> state{0};  ///< 0: none, 1: being written, 2: set
  std::uint32_t is_order_error = 0;
  char text[most_text] = {};

  bool failed() const { return state.load(std::memory_order_acquire) == 2; }
  /// @return false if another failure came first: that one counts
  bool set(std::string_view what, bool order_error) {
    std::uint32_t none = 0;
    if (!state.compare_exchange_strong(none, 1)) return false;
    is_order_error = order_error ? 1 : 0;
    copy_text(text, what);
    state.store(2, std::memory_order_release);
    return true;
  }
  /// @pre failed()
  [[noreturn]] void raise(int world_rank) const {
    std::string const what = static_cast<char const*>(text);
    if (is_order_error != 0) fail<OrderError>("rank {}: {}", world_rank, what);
    fail<PeerError>("rank {}: a peer failed: {}", world_rank, what);
  }
};

}  // namespace fsdp::mpi::detail
