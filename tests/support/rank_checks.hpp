// SPDX-License-Identifier: Apache-2.0
// Checks that ranks make on threads of their own. Catch2's assertions are for one thread.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"

namespace fsdp::testing {

/// Failed checks of all threads.
class RankChecks {
 public:
  void expect(bool holds, std::string_view what, int line) {
    if (holds) return;
    std::lock_guard const lock(mutex_);
    failures_ += formatted("line {}: {}\n", line, what);
  }
  /// Failed checks since the last call; "" if there are none.
  std::string take() {
    std::lock_guard const lock(mutex_);
    return std::exchange(failures_, {});
  }

 private:
  std::mutex mutex_;
  std::string failures_;
};

inline RankChecks rank_checks;

}  // namespace fsdp::testing

/// On any thread. A test that uses it ends with CHECK_RANKS().
#define RANK_CHECK(...) fsdp::testing::rank_checks.expect(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__, __LINE__)
#define CHECK_RANKS() CHECK(fsdp::testing::rank_checks.take() == "")
