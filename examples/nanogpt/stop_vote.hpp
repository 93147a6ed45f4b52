// SPDX-License-Identifier: Apache-2.0
// One rank is asked to stop, by a signal: all ranks agree when.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

namespace nanogpt {

/// Exit code of a run that was asked to stop, and has saved where to go on from.
inline constexpr int saved_and_stopped = 85;

/// This process has been asked to save and stop (SIGUSR1).
inline std::atomic<bool> stop_requested{false};

/// Asks the ranks about once a second whether one of them is to stop, at iterations that are the same on all: how many
/// lie between two questions follows from the ranks' mean time of one.
class StopVote {
 public:
  /// To be called by all ranks between iterations.
  /// @return whether to stop: the same on every rank
  /// @note Collective: yes, where it asks; blocks then.
  template <class E>
  bool stops(E& engine) {
    if (engine.world_size() == 1) return stop_requested.load(std::memory_order_relaxed);
    if (--until_next_ > 0) return false;
    auto const now = Clock::now();
    auto const each = std::chrono::duration<double>(now - last_).count() / static_cast<double>(between_);
    auto const mean = engine.mean_over_ranks({stop_requested.load(std::memory_order_relaxed) ? 1.0 : 0.0, each});
    last_ = now;
    between_ = mean[1] >= 1.0 ? 1 : mean[1] <= 1e-3 ? 1000 : std::llround(1.0 / mean[1]);
    until_next_ = between_;
    return mean[0] > 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
  std::int64_t between_ = 1, until_next_ = 1;
};

}  // namespace nanogpt
