// SPDX-License-Identifier: Apache-2.0
// Threads of a local run, and the choice of the error that the run throws.
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/host/thread.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail {

inline bool is_peer_error(std::exception_ptr const& error) {
  try {
    std::rethrow_exception(error);
  } catch (PeerError const&) {
    return true;
  } catch (...) {
    return false;
  }
}

/// A rank's thread, the function that it calls, and the exception that ended it.
struct RankThread {
  int rank = 0;
  void const* live = nullptr;  ///< called with the rank; its type is its caller's to know
  std::thread thread{};
  std::exception_ptr error{};
};

/// Throws the error of the rank that failed first. A rank that was told of a peer's failure may end before that peer
/// does: the cause is thrown, if there is one.
[[gnu::cold]] inline void rethrow_first(fsdp::detail::FixedArray<RankThread> const& threads, std::size_t first) {
  auto chosen = threads[first].error;
  for (auto const& thread : threads) {
    auto const& error = thread.error;
    if (error != nullptr && (chosen == nullptr || (is_peer_error(chosen) && !is_peer_error(error)))) chosen = error;
  }
  if (chosen != nullptr) std::rethrow_exception(chosen);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::local::detail
