// SPDX-License-Identifier: Apache-2.0
// Lets all ranks agree on the iteration at which a run stops after a signal to one rank.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>

namespace transformer {

/// Exit code of a run that was asked to stop, and has saved where to go on from.
inline constexpr int saved_and_stopped = 85;

/// This process has been asked to save and stop: by SIGINT (Ctrl-C), SIGTERM or SIGUSR1.
inline std::atomic<bool> stop_requested{false};

/// mpirun has sent SIGTERM: it is ending the run, and exits with 1 whatever its ranks do.
inline std::atomic<bool> launcher_ends_run{false};

/// Asks the ranks every now and then whether one of them is to stop, at calls that are the same on all ranks: the
/// ranks' mean time between two calls decides how many lie between two questions.
class StopVote {
 public:
  /// @param every  seconds between two questions, about. mpirun kills ranks a second after it has sent SIGTERM
  explicit StopVote(double every) : every_(every) {}

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
    // Calls may become slower: no more than twice as many as before lie between two questions, and a bounded number.
    auto const wanted = std::llround(every_ / std::max(mean[1], 1e-3));
    between_ = std::clamp<std::int64_t>(wanted, 1, 2 * between_);
    until_next_ = between_;
    return mean[0] > 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double every_;
  Clock::time_point last_ = Clock::now();
  std::int64_t between_ = 1, until_next_ = 1;
};

}  // namespace transformer
