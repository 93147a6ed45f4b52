// SPDX-License-Identifier: Apache-2.0
// Tasks of host streams, and the state shared by a stream's worker and its owner.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>

#include "fsdp/arithmetic.hpp"
#include "fsdp/error.hpp"
#include "fsdp/failure.hpp"
#include "fsdp/host/backoff.hpp"
#include "fsdp/host/event.hpp"
#include "fsdp/host/failure_text.hpp"
#include "fsdp/host/task_queue.hpp"
#include "fsdp/host/team.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail {

/// State shared by a stream's worker and its owner.
struct StreamCore {
  explicit StreamCore(std::string_view label) : name(label) {}
  StreamCore(StreamCore const&) = delete;
  ~StreamCore() { FailureTexts::give(failure_text); }

  /// Fails the stream for good: later tasks are skipped. Records and waits are not: who waits for a later record fails
  /// too. Called by the worker.
  [[gnu::cold]] void fail(Failure why, std::exception_ptr thrown = nullptr) {
    if (has_failed()) return;
    failure = std::move(why);
    error = std::move(thrown);
    failure_text->write(failure);
    failed.store(true, std::memory_order_release);
  }
  /// Whether the stream has failed, for the worker.
  bool has_failed() const { return failed.load(std::memory_order_relaxed); }
  /// Whether the stream has failed and the host sees the failure.
  bool is_known_failed() const { return has_failed() && failed.load(std::memory_order_acquire); }
  void rethrow() const {
    if (is_known_failed()) rethrow_error();
  }
  [[noreturn, gnu::cold, gnu::noinline]] void rethrow_error() const {
    failure_text->tell();
    if (error != nullptr) std::rethrow_exception(error);
    failure.raise();
  }
  void await(EventState& state, std::uint32_t ticket, WaitSite site) {
    if (!state.reached(ticket, std::memory_order_relaxed)) {
      auto const start = std::chrono::steady_clock::now();
      state.await(ticket, Backoff{}, [&] {
        return formatted("stream '{}' waits at site '{}' for an event of another stream", name, fsdp::name(site));
      });
      auto const waited = std::chrono::nanoseconds{std::chrono::steady_clock::now() - start}.count();
      blocked_ns[static_cast<std::size_t>(site)].fetch_add(static_cast<std::uint64_t>(waited),
                                                           std::memory_order_relaxed);
    } else {
      static_cast<void>(state.reached(ticket, std::memory_order_acquire));
    }
  }

  std::string const name;
  TaskQueue queue;
  std::atomic<bool> failed{false};
  Failure failure;           // if so
  std::exception_ptr error;  // what a task of this stream threw; none: it waited for the failure of another one
  FailureText* const failure_text = FailureTexts::take();  // the failure, for events
  std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(WaitSite::count_)> blocked_ns{};
  bool stopping = false;       // the worker's
  Event finished;              // for synchronize
  std::unique_ptr<Team> team;  // of the worker and its helpers; none: it works alone
  std::thread worker;          // none: an inline stream
};

/// Runs the parts of a callable unless the stream has failed; if one throws, the stream fails.
inline void run_call(StreamCore& core, Team::Range call, void* callable, std::int64_t parts) {
  if (core.has_failed()) return;
  try {
    if (parts > 1 && core.team != nullptr) return core.team->run(parts, call, callable);
    IeeeArithmetic const arithmetic;
    call(callable, 0, parts, 0);
  } catch (...) {
    core.fail(current_failure(), std::current_exception());
  }
}
/// A callable without parts.
template <class F>
void call_as(void* callable, std::int64_t, std::int64_t, int) {
  (*static_cast<F*>(callable))();
}
/// A callable of a part, or of a part and the lane that runs it.
template <class F>
void call_parts(void* callable, std::int64_t part, std::int64_t end, [[maybe_unused]] int lane) {
  F const& call = *static_cast<F const*>(callable);
  for (; part < end; ++part) {
    if constexpr (requires { call(part, lane); }) {
      call(part, lane);
    } else {
      call(part);
    }
  }
}

/// A callable that may be copied as bytes, as kernels with their arguments are. It lies behind this.
struct alignas(std::max_align_t) BytesTask {
  Team::Range call;
  std::int64_t parts;

  static void run(void* task, StreamCore& core) {
    auto& bytes = *static_cast<BytesTask*>(task);
    run_call(core, bytes.call, &bytes + 1, bytes.parts);
  }
};
/// A callable that is told why it is skipped.
template <class F>
concept HearsFailure = requires(F& function, Failure const& why) {
  { function.skip(why) }
  noexcept;
};

/// Any other callable, which is destroyed right after it ran or was skipped. In the queue, if it says that its bytes
/// may be moved instead of it; else in memory of its own.
template <class F>
struct CallTask {
  static void run(void* task, StreamCore& core) {
    auto& function = *static_cast<F*>(task);
    call(function, core);
    function.~F();
  }
  static void run_owned(void* task, StreamCore& core) {
    std::unique_ptr<F> const function(*static_cast<F**>(task));
    call(*function, core);
  }

 private:
  static void call(F& function, StreamCore& core) {
    if constexpr (HearsFailure<F>) {
      if (core.has_failed()) return function.skip(core.failure);
    }
    run_call(core, call_as<F>, &function, 1);
  }
};

template <class F>
inline constexpr bool is_bytes =
    std::is_trivially_copyable_v<F> && !HearsFailure<F> && alignof(F) <= alignof(std::max_align_t) &&
    sizeof(F) + sizeof(BytesTask) <= TaskQueue::most_bytes;
template <class F>
concept MovesAsBytes = F::moves_as_bytes && sizeof(F) <= TaskQueue::most_bytes &&
                       alignof(F) <= alignof(std::max_align_t);

struct RecordTask {
  EventState* state;
  std::uint32_t ticket;

  static void run(void* task, StreamCore& core) {
    auto const& record = *static_cast<RecordTask const*>(task);
    if (core.has_failed()) record.state->fail(record.ticket, *core.failure_text);
    record.state->complete(record.ticket);
    record.state->leave();
  }
};
struct WaitTask {
  EventState* state;
  std::uint32_t ticket;
  WaitSite site;
  int rank;  // that the event belongs to

  static void run(void* task, StreamCore& core) {
    auto const& wait = *static_cast<WaitTask const*>(task);
    core.await(*wait.state, wait.ticket, wait.site);
    if (wait.state->has_failed(wait.ticket)) core.fail(wait.state->failure_of_rank(wait.rank));
    wait.state->leave();
  }
};
template <class T>
void push_task(TaskQueue& queue, T const& task) {
  static_assert(std::is_trivially_copyable_v<T>);
  queue.push(T::run, &task, sizeof task);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail
