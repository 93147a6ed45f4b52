// SPDX-License-Identifier: Apache-2.0
// The threads of one host stream, which share the parts of a task.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/detail/base/arithmetic.hpp"
#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

/// A thread that calls `main(context)`. One type of callable for all: std::thread is compiled for each anew.
/// @throws std::system_error if it cannot be started
inline std::thread start_thread(void (*main)(void*), void* context) { return std::thread(main, context); }

/// The calling thread and `threads() - 1` helpers, which run the parts of one job at a time.
///
/// [Note: A team belongs to one stream] A job publishes what the caller has done to the helpers that take part, and
/// returns with what they have done; helpers order nothing among each other. So a team adds no order to that of its
/// stream, and ThreadSanitizer still sees a wait for an event that is missing. A team of two streams would be an order
/// between them that nobody asked for.
///
/// A helper that the operating system keeps waiting holds up nobody: who is there takes the parts, and the caller waits
/// for those alone that others have begun. Each takes a share of what is left, smaller and smaller (guided
/// self-scheduling: Polychronopoulos and Kuck, 1987): few claims, and threads that end together.
///
/// Helpers look out for the next job for as long as Backoff spins and yields, and to offer them one takes the caller
/// less than a tenth of a microsecond. Then they sleep, and have to be woken by the operating system; the caller does
/// not wait for that. Nothing is allocated.
class Team {
 public:
  static constexpr int most_threads = 1024;

  /// Runs the parts [first, last) of a job on one thread. @param lane  which of the team's threads, in [0, threads())
  using Range = void (*)(void* job, std::int64_t first, std::int64_t last, int lane);

  /// @param name     begins the names of the helpers' threads
  /// @param threads  with the caller's, which is lane 0
  /// @throws UsageError unless threads is in [1, most_threads]; ResourceError if a helper cannot be started
  [[gnu::cold]] Team(std::string_view name, int threads) : threads_(threads) {
    FSDP_EXPECTS(threads >= 1 && threads <= most_threads, "team '{}': expected 1 to {} threads, got {}", name,
                 most_threads, threads);
    helpers_ = fsdp::detail::FixedArray<Helper>(static_cast<std::size_t>(threads - 1));
    int lane = 1;
    try {
      for (auto& helper : helpers_) {
        helper.team = this;
        helper.lane = lane;
        helper.thread = start_thread(help, &helper);
        ::pthread_setname_np(helper.thread.native_handle(), formatted("{}+{}", name.substr(0, 10), lane).c_str());
        ++lane;
      }
    } catch (std::exception const& error) {
      stop();
      fail<ResourceError>("team '{}': cannot start helper {} of {}: {}", name, lane, threads - 1, error.what());
    }
  }
  Team(Team const&) = delete;
  Team& operator=(Team const&) = delete;
  ~Team() { stop(); }

  int threads() const { return threads_; }

  /// Runs the parts [0, parts) of a job, in no order, and returns when all have run.
  /// Parts compute as IEEE 754 says, whatever modes the thread that runs them has (IeeeArithmetic).
  /// @throws what the first part threw that threw; parts that had not begun then are skipped
  /// @throws UsageError from inside a part of this team, or beside another thread: there is one job at a time
  void run(std::int64_t parts, Range range, void* job) {
    FSDP_EXPECTS(!busy_.exchange(true, std::memory_order_relaxed),
                 "this team already runs a job; neither a part of it nor another thread may start a second one");
    range_ = range;
    job_ = job;
    for (first_ = 0; first_ < parts && !failed_.load(std::memory_order_relaxed); first_ += most_parts)
      run_at_once(static_cast<std::uint32_t>(std::min(parts - first_, most_parts)));
    busy_.store(false, std::memory_order_relaxed);
    if (failed_.exchange(false, std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
  }

  /// Runs a callable: f(part).
  template <class F>
  void run(std::int64_t parts, F const& f) {
    run(
        parts,
        [](void* job, std::int64_t first, std::int64_t last, int) {
          for (; first < last; ++first) (*static_cast<F const*>(job))(first);
        },
        const_cast<F*>(&f));
  }

 private:
  struct Helper {
    Team* team = nullptr;
    int lane = 0;
    std::thread thread;
  };
  static constexpr std::int64_t most_parts = 0xffff'ffff;  // at once

  void run_at_once(std::uint32_t parts) {
    parts_ = parts;
    state_.store(std::uint64_t{++number_} << 32 | parts, std::memory_order_release);
    // A barrier on the processor, and none for ThreadSanitizer, as in TaskQueue.
    calls_.fetch_add(1, std::memory_order_relaxed);
    if (sleepers_.load(std::memory_order_relaxed) != 0) detail::futex_wake_all(calls_, FutexScope::process);

    auto const others = parts - take_parts(0);
    Backoff backoff{Backoff::Limit::none};  // a part may take as long as a task may
    for (auto seen = done_.load(std::memory_order_relaxed); seen != others;
         seen = done_.load(std::memory_order_relaxed))
      backoff.pause(done_, seen, waiting_, [] { return std::string{}; });
    static_cast<void>(done_.load(std::memory_order_acquire));
    done_.store(0, std::memory_order_relaxed);  // all parts are accounted for: nobody adds to it
  }

  /// Takes parts and runs them until none is left. A claim can only succeed while its job lasts, for a part of it has
  /// not run yet; so a helper that comes late looks at nothing that may be gone.
  /// @return how many
  std::uint32_t take_parts(int lane) {
    std::uint32_t taken = 0;
    auto state = state_.load(std::memory_order_relaxed);
    while (left(state) != 0) {
      auto const count = std::max(left(state) / (2 * static_cast<std::uint32_t>(threads_)), 1u);
      if (!state_.compare_exchange_weak(state, state - count, std::memory_order_acquire, std::memory_order_relaxed))
        continue;
      auto const first = first_ + (parts_ - left(state));
      run_range(first, first + count, lane);
      taken += count;
      state = state_.load(std::memory_order_relaxed);
    }
    return taken;
  }
  void run_range(std::int64_t first, std::int64_t last, int lane) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      IeeeArithmetic const arithmetic;
      range_(job_, first, last, lane);
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
  }

  /// A helper's thread. @param helper  its Helper
  static void help(void* helper) {
    auto& [team, lane, thread] = *static_cast<Helper*>(helper);
    team->help(lane);
  }
  void help(int lane) {
    Backoff backoff{Backoff::Limit::none};
    for (;;) {
      auto const seen = calls_.load(std::memory_order_relaxed);
      if (stopping_.load(std::memory_order_relaxed)) return;
      if (auto const taken = take_parts(lane); taken != 0) {
        done_.fetch_add(taken, std::memory_order_release);
        wake_sleepers(done_, waiting_);
        backoff = Backoff{Backoff::Limit::none};
      } else {
        backoff.pause(calls_, seen, sleepers_, [] { return std::string{}; });
      }
    }
  }
  [[gnu::cold]] void stop() {
    stopping_.store(true, std::memory_order_relaxed);
    calls_.fetch_add(1, std::memory_order_relaxed);
    detail::futex_wake_all(calls_, FutexScope::process);
    for (auto& helper : helpers_)
      if (helper.thread.joinable()) helper.thread.join();
  }
  static std::uint32_t left(std::uint64_t state) { return static_cast<std::uint32_t>(state); }

  // State that helpers poll, and the job, which they read once they have claimed a part of it.
  alignas(64) std::atomic<std::uint64_t> state_{0};  // the job's number, and below it how many of its parts are left
  std::atomic<std::uint32_t> calls_{0};              // changes whenever there is something for helpers
  std::atomic<std::uint32_t> sleepers_{0};
  Range range_ = nullptr;
  void* job_ = nullptr;
  std::int64_t first_ = 0;   // number of the first of `parts_`
  std::uint32_t parts_ = 0;  // handed out at once
  std::uint32_t number_ = 0;

  int const threads_;
  alignas(64) std::atomic<std::uint32_t> done_{0};  // parts that helpers have run
  std::atomic<std::uint32_t> waiting_{0};           // the caller sleeps until it has changed
  std::atomic<bool> failed_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> busy_{false};
  std::exception_ptr error_;  // of the part that set failed_
  fsdp::detail::FixedArray<Helper> helpers_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
