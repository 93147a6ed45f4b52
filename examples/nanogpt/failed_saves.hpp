// SPDX-License-Identifier: Apache-2.0
// Saves that have failed: when the next attempt is.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "fsdp/format.hpp"

namespace nanogpt {

/// The attempts at a checkpoint after one that has failed: after one log line, then after 2, 4, 8 ... of them, and
/// wherever a checkpoint is due anyway. Every attempt may fill the disk first, so they become rare.
class FailedSaves {
 public:
  /// @param log_interval  iterations between log lines
  explicit FailedSaves(std::int64_t log_interval) : log_interval_(log_interval) {}

  /// A save has failed. @param iteration  before which the run stands
  void add(std::int64_t iteration) {
    wait_ = wait_ == 0 ? log_interval_ : std::min<std::int64_t>(2 * wait_, std::int64_t{1} << 40);
    next_ = iteration + wait_;
  }
  /// A save has succeeded.
  void clear() { wait_ = 0, next_ = -1; }
  /// Before which iteration the next attempt is; -1: none is.
  std::int64_t next() const { return next_; }

 private:
  std::int64_t log_interval_;
  std::int64_t wait_ = 0, next_ = -1;
};

/// The end of a run, and a stop by a signal, try as often again, with these pauses between attempts.
inline constexpr std::chrono::seconds pauses_at_the_end[]{std::chrono::seconds(1), std::chrono::seconds(2),
                                                          std::chrono::seconds(4)};

/// Waits. @param look  called every now and then: a second signal ends the process
template <class Look>
void pause_before_attempt(std::chrono::milliseconds pause, Look&& look) {
  constexpr std::chrono::milliseconds slice(50);
  for (; pause.count() > 0; pause -= slice) {
    look();
    std::this_thread::sleep_for(std::min(pause, slice));
  }
}

/// "the checkpoint before iteration 12 could not be saved: 'out/...' cannot be written: No space left on device".
inline std::string text_of_failed_save(std::string_view what, std::int64_t iteration, std::string_view why) {
  return fsdp::formatted("the {} before iteration {} could not be saved: {}", what, iteration, why);
}

}  // namespace nanogpt
