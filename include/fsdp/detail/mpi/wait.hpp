// SPDX-License-Identifier: Apache-2.0
// Waits for other processes, with a deadline and without using a core; a wait that is given up is reported.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/detail/mpi/header.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi {

/// Exit code of a rank that gave up waiting.
inline constexpr int exit_missing_peer = 75;

namespace detail {

/// Process-wide state for the signal handler and the last message of a rank.
struct Process {
  std::atomic<int> waiting{0};           ///< threads that wait for peers now
  std::atomic<bool> initialized{false};  ///< MPI runs
};

inline Process& process() {
  static Process state;
  return state;
}

/// SIGTERM: a waiting thread reports what it waits for and ends the process; without one, the default applies.
inline void on_terminate(int signal) {
  if (process().waiting.load() == 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  host::request_termination();
  ::alarm(10);  // in case the waiting thread does not come to it
}

/// Writes the text to stderr at once, as one piece.
inline void write_error(std::string_view text) {
  while (!text.empty()) {
    auto const written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

/// Ends every process of the run with a non-zero code. Callable from any thread. Call it after this rank has printed
/// its message: SIGTERM, which the launcher sends now, and other threads' waits add nothing to it.
[[noreturn]] inline void end_run(int code) {
  host::detail::reported.store(true);
  std::signal(SIGTERM, SIG_IGN);
  static std::atomic<bool> ending{false};  // MPI_Abort is not for two threads
  while (ending.exchange(true)) ::pause();
  std::signal(SIGALRM, SIG_DFL);
  ::alarm(5);  // MPI_Abort talks to the launcher; this process ends even if that takes for ever
  if (process().initialized.load()) MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

inline std::string list_of(std::vector<int> const& ranks) { return ranks.empty() ? "unknown" : listed(ranks); }

/// Sleeps until the next look: yields at first, then sleeps for up to 200 microseconds.
class PollPause {
 public:
  void operator()() {
    if (++rounds_ <= 32) {
      ::sched_yield();
      return;
    }
    ::timespec const nap{0, rounds_ < 64 ? 20'000 : 200'000};
    ::nanosleep(&nap, nullptr);
  }

 private:
  int rounds_ = 0;
};

/// Waits until `done()`. Past the timeout, or on SIGTERM, prints what this rank waits for and ends the run.
/// @param rank this rank in the world    @param operation in which it waits, for the message
/// @param pause called between looks; returns within about 100 ms
/// @param missing world ranks that have not arrived, for the message
template <class Done, class Pause, class Missing>
void wait_until(int rank, comm::CallDescription const& operation, std::chrono::milliseconds timeout, Done&& done,
                Pause&& pause, Missing&& missing) {
  for (int spin = 0; spin < 64; ++spin) {
    if (done()) return;
    host::detail::relax();
  }
  struct Counted {
    Counted() { process().waiting.fetch_add(1); }
    ~Counted() { process().waiting.fetch_sub(1); }
    Counted(Counted const&) = delete;
    Counted& operator=(Counted const&) = delete;
  } const counted;
  auto const since = AwakeClock::now();
  host::YieldPhase yields;  // also where pause() would sleep: a yield is cheaper to end
  while (!done()) {
    if (yields.yield()) continue;
    bool const terminated = host::termination_requested();
    auto const elapsed = AwakeClock::now() - since;
    if (terminated || elapsed > timeout) {
      while (host::detail::reported.exchange(true)) ::pause();  // another thread speaks for this rank
      write_error(formatted("{}; missing ranks: {}; {}\n",
                            comm::waiting_text(formatted("rank {}", rank), operation, elapsed), list_of(missing()),
                            comm::reason_to_end(terminated)));
      end_run(exit_missing_peer);
    }
    pause();
  }
}

/// A counter in shared memory that one rank advances and its node peers wait for.
struct alignas(64) SharedCounter {
  std::atomic<std::uint64_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  bool reached(std::uint64_t target) const { return value.load(std::memory_order_acquire) >= target; }

  /// Makes everything written before visible to ranks that see the new value.
  void publish(std::uint64_t next) {
    value.store(next, std::memory_order_seq_cst);
    wake();
  }
  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) != 0)
      ::syscall(SYS_futex, futex_word(), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
  /// Sleeps until the value may have changed, or 50 ms.
  void sleep_below(std::uint64_t target) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    auto const seen = value.load(std::memory_order_seq_cst);
    if (seen < target) {
      ::timespec const limit{0, 50'000'000};
      ::syscall(SYS_futex, futex_word(), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  // The kernel compares 32 bits; the low half changes with every step.
  static_assert(std::endian::native == std::endian::little);
  std::uint32_t* futex_word() { return reinterpret_cast<std::uint32_t*>(&value); }
};
static_assert(sizeof(SharedCounter) == 64 && std::atomic<std::uint64_t>::is_always_lock_free);

/// Throws VendorError with MPI's text unless `code` is MPI_SUCCESS.
inline void check(int code, std::string_view call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail<VendorError>("{}: {}", call, static_cast<char const*>(text));
}

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi
