// SPDX-License-Identifier: Apache-2.0
// Clock of deadlines. It stands still while the process is stopped: see docs/adr/0031-deadlines-count-time-awake.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>  // and clocks: <chrono> itself has calendars, for which a file takes 1 % longer

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Clock of deadlines: the steady clock without the time in which the whole process was stopped, by SIGSTOP, a
/// scheduler that suspends jobs, a frozen container or a pause. A rank that goes on after an hour of that has not
/// waited for its peers, which were stopped too.
///
/// Every thread that waits looks at the clock again within a second, or is in a LongCall. A longer gap between two
/// looks of all threads is therefore a stop, and counts as a second. Time in which no thread looks is cut in the same
/// way, but no wait lies in it.
struct AwakeClock {
  using duration = std::chrono::nanoseconds;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<AwakeClock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    for (;;) {  // a stop may lie between any two of these lines
      auto const stopped = stopped_.load(std::memory_order_acquire);
      auto const clock = duration(std::chrono::steady_clock::now().time_since_epoch()).count();
      if (clock - looked_.load(std::memory_order_acquire) > longest_gap / 4) look(clock);
      if (stopped_.load(std::memory_order_acquire) == stopped) return time_point(duration(clock - stopped));
    }
  }

  /// While an object of this type lives, gaps count in full: its thread is in a call that may take long, for example to
  /// a name server.
  class LongCall {
   public:
    LongCall() {
      now();
      calls_.fetch_add(1);
    }
    LongCall(LongCall const&) = delete;
    LongCall& operator=(LongCall const&) = delete;
    ~LongCall() {
      now();
      calls_.fetch_sub(1);
    }
  };

 private:
  [[gnu::cold]] static void look(std::int64_t clock) {
    std::lock_guard const lock(mutex_);
    auto const gap = clock - looked_.load(std::memory_order_relaxed);
    if (gap <= 0) return;
    if (gap > longest_gap && calls_.load() == 0) stopped_.fetch_add(gap - longest_gap, std::memory_order_release);
    looked_.store(clock, std::memory_order_release);
  }
  static constexpr std::int64_t longest_gap = 1'000'000'000;
  static inline std::mutex mutex_;
  static inline std::atomic<int> calls_{0};             ///< long calls under way
  static inline std::atomic<std::int64_t> looked_{0};   ///< the steady clock when a thread looked last
  static inline std::atomic<std::int64_t> stopped_{0};  ///< nanoseconds that do not count
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
