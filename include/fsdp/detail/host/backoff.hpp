// SPDX-License-Identifier: Apache-2.0
// Waits of the host: spin, yield, sleep on a futex, with a deadline.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <thread>  // and clocks: <chrono> itself has calendars, for which a file takes 1 % longer
#include <type_traits>

#include "fsdp/detail/base/clock.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

inline constexpr int wait_expired_exit_code = 70;      ///< the process ended because a wait missed its deadline
inline constexpr int wait_terminated_exit_code = 143;  ///< the process ended because SIGTERM came during a wait

/// A text of a wait's duration and begin: "for 1.2 s, since 2026-11-22T13:00:00Z". After a stop of the process during
/// the wait, that time of day is too late by the length of the stop.
[[gnu::cold]] inline std::string elapsed_text(AwakeClock::duration waited) {
  auto const since = std::chrono::system_clock::to_time_t(
      std::chrono::system_clock::now() - std::chrono::duration_cast<std::chrono::system_clock::duration>(waited));
  std::tm utc{};
  ::gmtime_r(&since, &utc);
  return formatted("for {:.1f} s, since {:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
                   std::chrono::duration<double>(waited).count(), utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                   utc.tm_hour, utc.tm_min, utc.tm_sec);
}

namespace detail {
inline std::atomic<std::int64_t> wait_deadline_ns{600'000'000'000};
inline std::atomic<bool> terminate_requested{false};
inline std::atomic<char const*> termination_cause{"SIGTERM"};
inline std::atomic<bool> giving_up{false};
inline std::atomic<bool> reported{
    false};  // by who knows more of the wait: what it comes of is not to be printed after it
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<char const*>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

inline constexpr std::chrono::milliseconds an_hour = std::chrono::hours{1};

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
}  // namespace detail

/// Sets how long a wait may last before the process reports it and ends (default: 10 minutes). Time in which the
/// process is stopped counts as a second at most.
inline void set_wait_deadline(std::chrono::nanoseconds deadline) {
  FSDP_EXPECTS(deadline.count() > 0, "the deadline of waits must be positive, got {} ns", deadline.count());
  detail::wait_deadline_ns.store(deadline.count(), std::memory_order_relaxed);
}
inline std::chrono::nanoseconds wait_deadline() {
  return std::chrono::nanoseconds{detail::wait_deadline_ns.load(std::memory_order_relaxed)};
}

/// Requests the end of the process: threads that wait report what they wait for and end it. Async-signal-safe.
/// @param cause  what they name: a signal, say. It is kept, not copied
inline void request_termination(char const* cause = "SIGTERM") noexcept {
  detail::termination_cause.store(cause, std::memory_order_relaxed);
  detail::terminate_requested.store(true);  // after its cause
}
inline bool termination_requested() noexcept { return detail::terminate_requested.load(std::memory_order_relaxed); }
inline char const* termination_cause() noexcept { return detail::termination_cause.load(std::memory_order_relaxed); }

/// Blocks for ever if another thread is ending the process because of a wait that has failed: what this one has found
/// since then may come of that, and is not to be reported instead.
inline void yield_to_end() {
  while (detail::giving_up.load()) std::this_thread::sleep_for(detail::an_hour);
}

/// Installs a SIGTERM handler that calls request_termination(). Opt-in: without it, SIGTERM ends the process at once.
inline void report_on_sigterm() {
  struct sigaction action {};
  action.sa_handler = [](int) { request_termination(); };
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, nullptr);
}

/// Users of a futex word: threads of one process, or several processes through shared memory.
enum class FutexScope : unsigned char { process, shared };

namespace detail {
inline std::uint32_t* address(std::atomic<std::uint32_t> const& word) {
  static_assert(sizeof(word) == sizeof(std::uint32_t));
  return reinterpret_cast<std::uint32_t*>(const_cast<std::atomic<std::uint32_t>*>(&word));
}
inline void futex_wait(std::atomic<std::uint32_t> const& word, std::uint32_t seen, std::int64_t at_most_ns,
                       FutexScope scope) {
  timespec const limit{static_cast<time_t>(at_most_ns / 1'000'000'000), static_cast<long>(at_most_ns % 1'000'000'000)};
  int const operation = scope == FutexScope::process ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  ::syscall(SYS_futex, address(word), operation, seen, &limit, nullptr, 0);
}
inline void futex_wake_all(std::atomic<std::uint32_t> const& word, FutexScope scope) {
  int const operation = scope == FutexScope::process ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
  ::syscall(SYS_futex, address(word), operation, 0x7fffffff, nullptr, nullptr, 0);
}

/// Prints what is awaited and ends the process. Other threads that wait get a moment to print theirs. If a thread knows
/// which peers are missing (`reported`), it prints instead.
[[noreturn, gnu::cold]] inline void give_up(std::string const& what, AwakeClock::duration waited, bool terminated) {
  std::this_thread::sleep_for(std::chrono::milliseconds{150});
  if (reported.load()) std::this_thread::sleep_for(an_hour);
  auto const why = terminated ? formatted("{} during a wait", termination_cause.load(std::memory_order_relaxed))
                              : std::string("a wait missed its deadline");
  auto const line = formatted("fsdp: {}: {}; waiting {}\n", why, what, elapsed_text(waited));
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  bool const first = !giving_up.exchange(true, std::memory_order_relaxed);
  std::this_thread::sleep_for(first ? std::chrono::milliseconds{250} : an_hour);
  std::_Exit(terminated ? wait_terminated_exit_code : wait_expired_exit_code);
}
}  // namespace detail

/// Yields until the core is wanted elsewhere, for a fifth of a millisecond at most.
///
/// [Note: Yield on an idle core, sleep on a busy one] Waking a sleeper takes 50 to 100 us on a virtual machine. Ranks
/// that work in step wake each other in turn and lose that much in every collective: as long as it takes to move half a
/// mebibyte. So a wait yields first, longer than a wake-up takes. But a yield on a core where a thread computes hands
/// over a whole time slice, whereas a thread that wakes from sleep is scheduled soon. A yield that returns late tells
/// the two apart: then the thread sleeps, at once in its next waits too, and looks again after ever more of them.
class YieldPhase {
 public:
  /// @return false if it is time to sleep
  bool yield() {
    if (over_) return false;
    auto const before = std::chrono::steady_clock::now();
    if (!begun_) {
      begun_ = true;
      start_ = before;
      over_ = habit().sleeps_left > 0;
      if (over_) --habit().sleeps_left;
    } else {
      over_ = before - start_ > at_most;
    }
    if (over_) return false;
    ::sched_yield();
    if (std::chrono::steady_clock::now() - before < late) {
      habit().sleeps_next = least_sleeps;
    } else {
      over_ = true;
      habit().sleeps_left = habit().sleeps_next;
      habit().sleeps_next = habit().sleeps_next < most_sleeps ? 2 * habit().sleeps_next : most_sleeps;
    }
    return true;
  }

 private:
  static constexpr std::chrono::microseconds at_most{200};
  static constexpr std::chrono::microseconds late{30};  ///< an idle core: below 1 us; peers that wait too: a few us
  static constexpr int least_sleeps = 4;
  static constexpr int most_sleeps = 256;

  struct Habit {
    int sleeps_left = 0;  ///< waits to come that do not yield
    int sleeps_next = least_sleeps;
  };
  static Habit& habit() {
    static thread_local Habit of_this_thread;
    return of_this_thread;
  }

  bool begun_ = false;
  bool over_ = false;
  std::chrono::steady_clock::time_point start_{};
};

/// A wait: call pause() until its condition holds. Spins first, then yields, then sleeps, so that ranks that outnumber
/// the cores do not steal them from each other. While it sleeps it minds the deadline and SIGTERM.
class Backoff {
 public:
  /// Causes that end a wait early: the deadline and SIGTERM; SIGTERM alone (waiting for work of any length); none (an
  /// idle worker).
  enum class Limit : unsigned char { deadline, termination, none };

  explicit Backoff(Limit limit = Limit::deadline) : limit_(limit) {}

  /// Pauses once; later calls sleep for 20 us, doubled each time up to 1 ms.
  /// @param describe returns the text that says what is awaited; called only when the wait is given up
  template <class Describe>
  void pause(Describe const& describe) {
    if (brief()) return;
    if (is_over()) give_up(describe());
    timespec const span{0, sleep_ns_};
    ::nanosleep(&span, nullptr);
    sleep_ns_ = sleep_ns_ * 2 < 1'000'000 ? sleep_ns_ * 2 : 1'000'000;
  }

  /// Pauses once; later calls sleep until `word` no longer holds `seen`, somebody wakes them, or 5 ms (an idle worker:
  /// 100 ms) have passed.
  /// @param sleepers counts the threads that sleep on `word`: who changes the word wakes them only if there are any
  template <class Describe>
  void pause(std::atomic<std::uint32_t> const& word, std::uint32_t seen, std::atomic<std::uint32_t>& sleepers,
             Describe const& describe, FutexScope scope = FutexScope::process) {
    if (brief()) return;
    if (is_over()) give_up(describe());
    sleep(word, seen, sleepers, scope);
  }

 private:
  static constexpr int spins = 64;
  static constexpr std::int64_t sleep_at_most_ns = 5'000'000;

  [[gnu::noinline]] bool brief() {
    if (rounds_ == spins) return yields_.yield();
    if (rounds_++ == 0 && limit_ != Limit::none) start_ = AwakeClock::now();
    detail::relax();
    return true;
  }
  [[gnu::noinline]] void sleep(std::atomic<std::uint32_t> const& word, std::uint32_t seen,
                               std::atomic<std::uint32_t>& sleepers, FutexScope scope) const {
    // Relaxed on both sides: a lock-prefixed operation orders the processor where that matters, ThreadSanitizer learns
    // no order from it, and the limit covers processors on which a wake-up could be missed.
    sleepers.fetch_add(1, std::memory_order_relaxed);
    if (word.load(std::memory_order_relaxed) == seen) {
      detail::futex_wait(word, seen, limit_ == Limit::none ? 20 * sleep_at_most_ns : sleep_at_most_ns, scope);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
  /// Whether the wait was ended early.
  bool is_over() const {
    if (limit_ == Limit::none) return false;
    auto const waited = AwakeClock::now() - start_;
    return termination_requested() || (limit_ == Limit::deadline && waited > wait_deadline());
  }
  [[noreturn, gnu::cold, gnu::noinline]] void give_up(std::string const& what) const {
    detail::give_up(what, AwakeClock::now() - start_, termination_requested());
  }

  Limit limit_;
  int rounds_ = 0;
  YieldPhase yields_;
  long sleep_ns_ = 20'000;
  AwakeClock::time_point start_{};
};

/// Wakes the threads that Backoff::pause(word, ...) put to sleep. Call it after changing `word`.
inline void wake_sleepers(std::atomic<std::uint32_t> const& word, std::atomic<std::uint32_t>& sleepers,
                          FutexScope scope = FutexScope::process) {
  if (sleepers.fetch_add(0, std::memory_order_relaxed) != 0) detail::futex_wake_all(word, scope);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
