// SPDX-License-Identifier: Apache-2.0
// Host streams: a worker that runs its queue in order, ordered against other streams by events alone. It may be one
// thread or a team of several.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
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
#include "fsdp/host/stream_tasks.hpp"
#include "fsdp/host/task_queue.hpp"
#include "fsdp/host/team.hpp"
#include "fsdp/host/thread.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

/// A queue of work with CUDA's semantics: in order within a stream, unordered across streams except through events.
///
/// Work is enqueued by one host thread at a time. A task that throws fails the stream, for good: later tasks are
/// skipped, and every later enqueue, record, wait and synchronize throws the same exception. Records that were enqueued
/// before still complete, with the failure: a stream that waits for one fails, and so does a host thread, with an
/// exception of the same type and text (of type fsdp::Error if the first was none of the library's). See [Note: Events
/// carry failures]. The destructor finishes the queue.
class Stream {
 public:
  /// @param name appears in reports of waits and, cut to 15 characters, as the name of the worker thread
  /// @param threads the worker and its helpers, which share the parts of a task (enqueue_parts)
  /// @throws ResourceError if a thread cannot be started; UsageError if there is no such team
  [[gnu::cold]] explicit Stream(std::string_view name, int threads = 1)
      : core_(std::make_unique<detail::StreamCore>(name)) {
    if (threads != 1) core_->team = std::make_unique<Team>(name, threads);
    try {
      core_->worker = start_thread(work, core_.get());
    } catch (std::exception const& error) {
      fail<ResourceError>("stream '{}': cannot start its worker thread: {}", name, error.what());
    }
  }
  /// A stream without a worker: tasks run at once on the calling thread, waits block it, exceptions pass to the caller.
  static Stream inline_stream(std::string_view name) { return Stream{std::make_unique<detail::StreamCore>(name)}; }
  /// The inline stream of all threads: parts of a task enqueue their own work on it, and nothing else. It knows neither
  /// events nor waits.
  /// @pre first called by a host thread, not by a task
  static Stream& of_calling_thread() {
    static auto stream = inline_stream("calling thread");
    return stream;
  }

  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&& other) noexcept {
    Stream finished(std::move(*this));
    core_ = std::move(other.core_);
    return *this;
  }
  [[gnu::cold]] ~Stream() {
    if (core_ == nullptr || !core_->worker.joinable()) return;
    core_->queue.push([](void*, detail::StreamCore& core) { core.stopping = true; }, nullptr, 0);
    core_->worker.join();
  }

  /// Appends a callable, as a copy of its own, or moved. The worker destroys it right after it ran or was skipped;
  /// without a worker it runs and is destroyed before this returns. Its destructor must not throw, and it must not
  /// enqueue on its own stream.
  /// It computes as IEEE 754 says, whatever the calling thread's modes are (IeeeArithmetic).
  /// If the stream has failed before it, a callable with a member `void skip(Failure const& why) noexcept` gets that
  /// call instead.
  /// Memory of its own is allocated for a callable that is larger than TaskQueue::most_bytes, or can neither be copied
  /// as bytes nor says `static constexpr bool moves_as_bytes = true`: that a copy of its bytes is as good as a move of
  /// it whose source is then destroyed.
  /// @throws what an earlier task threw
  template <class F>
  void enqueue(F&& task) {
    using Callable = std::decay_t<F>;
    if constexpr (detail::is_bytes<Callable>) {
      Callable bytes(std::forward<F>(task));
      enqueue_bytes(detail::call_as<Callable>, 1, &bytes, sizeof bytes);
    } else if (runs_inline()) {
      Callable callable(std::forward<F>(task));
      IeeeArithmetic const arithmetic;
      callable();
    } else if constexpr (detail::MovesAsBytes<Callable>) {
      core().rethrow();
      core().queue.make_room(sizeof(Callable));
      alignas(Callable) std::byte bytes[sizeof(Callable)];
      ::new (static_cast<void*>(bytes)) Callable(std::forward<F>(task));  // the worker destroys it
      core().queue.push(detail::CallTask<Callable>::run, bytes, sizeof bytes);
    } else {
      core().rethrow();
      auto callable = std::make_unique<Callable>(std::forward<F>(task));
      auto* const bytes = callable.get();
      core().queue.push(detail::CallTask<Callable>::run_owned, &bytes, sizeof bytes);
      static_cast<void>(callable.release());
    }
  }

  /// Appends one task that calls `f(part)` for every part in [0, parts), in no order and on all threads of the stream
  /// at once; or `f(part, lane)`, where no two calls that run at a time have one lane, in [0, threads()). A part is to
  /// be worth a microsecond or more. It must not enqueue on its own stream; what it computes by kernels it enqueues on
  /// of_calling_thread(). After a part that throws, parts that have not begun are skipped.
  /// @param f  is copied as bytes, 4 KiB less two words at most, and called as const by several threads
  /// @throws what an earlier task threw
  template <class F>
  void enqueue_parts(std::int64_t parts, F f) {
    static_assert(detail::is_bytes<F>,
                  "what is called by several threads is copied as bytes, as kernels' arguments are");
    enqueue_bytes(detail::call_parts<F>, parts, &f, sizeof f);
  }

  /// Lets `event` stand for all work enqueued so far.
  [[gnu::noinline]] void record(Event& event) {
    core().rethrow();
    push_record(event);
  }

  /// Later work of this stream waits until the latest record of `event` is reached.
  /// @throws UsageError if `event` was never recorded
  [[gnu::noinline]] void wait(Event const& event, WaitSite site = WaitSite::none) {
    FSDP_EXPECTS(event.recorded(), "stream '{}' waits at site '{}' for an event that was never recorded", name(),
                 fsdp::name(site));
    core().rethrow();
    if (runs_inline()) {
      core().await(*event.state_, event.ticket_, site);
      return raise_failure(event);
    }
    event.state_->enter();
    detail::push_task(core().queue, detail::WaitTask{event.state_, event.ticket_, site, event.rank_});
  }

  /// Blocks the calling thread until all enqueued work is done.
  /// @throws what a task threw; UsageError from inside a task of this stream
  void synchronize() {
    if (runs_inline()) return;
    FSDP_EXPECTS(std::this_thread::get_id() != core().worker.get_id(),
                 "stream '{}': a task cannot synchronize its own stream", name());
    finish();
    core().rethrow();
  }
  /// Blocks the calling thread until all enqueued work is done, or skipped because the stream has failed. Not from
  /// inside a task of this stream.
  void finish() {
    if (runs_inline()) return;
    Event& done = core().finished;
    push_record(done);
    done.state_->await(done.ticket_, Backoff{Backoff::Limit::termination},
                       [&] { return formatted("the host waits for stream '{}'", name()); });
  }

  /// The failure of the stream, as far as the worker has come; nullptr: none. Lives as long as the stream.
  Failure const* failure() const { return core().is_known_failed() ? &core_->failure : nullptr; }

  /// Throws the stream's failure, if it has failed.
  void rethrow() const { core().rethrow(); }
  /// Whether a call has thrown the failure, of this stream or of an event of it.
  bool was_told() const { return core().is_known_failed() && core_->failure_text->was_told(); }

  /// Blocks the calling thread until the latest record of `event` is reached, on whichever stream.
  /// @throws why that stream had failed before the record; UsageError if `event` was never recorded
  static void await(Event const& event) {
    FSDP_EXPECTS(event.recorded(), "the host waits for an event that was never recorded");
    event.state_->await(event.ticket_, Backoff{Backoff::Limit::termination},
                        [] { return std::string{"the host waits for an event"}; });
    raise_failure(event);
  }

  /// Nanoseconds that the stream has spent blocked at `site`, so far.
  std::uint64_t blocked_ns(WaitSite site) const {
    return core().blocked_ns[static_cast<std::size_t>(site)].load(std::memory_order_relaxed);
  }
  std::string_view name() const { return core().name; }
  /// Threads that share the parts of a task.
  int threads() const { return core().team == nullptr ? 1 : core().team->threads(); }
  bool runs_inline() const { return !core().worker.joinable(); }
  /// Identifies the stream; unchanged by moves.
  void const* id() const { return core_.get(); }

 private:
  explicit Stream(std::unique_ptr<detail::StreamCore> core) : core_(std::move(core)) {}

  detail::StreamCore& core() const {
    FSDP_EXPECTS(core_ != nullptr, "this stream was moved from; use the object to which it was moved");
    return *core_;
  }

  static void raise_failure(Event const& event) {
    if (!event.state_->has_failed(event.ticket_)) return;
    event.state_->tell_failure();
    event.state_->failure_of_rank(event.rank_).raise();
  }
  /// A callable that may be copied as bytes, by the function that calls it.
  [[gnu::noinline]] void enqueue_bytes(Team::Range call, std::int64_t parts, void* callable, std::size_t bytes) {
    auto& own = core();
    FSDP_EXPECTS(parts >= 0, "stream '{}': expected 0 or more parts for a task, got {}", own.name, parts);
    if (parts == 0) return;
    if (!own.worker.joinable()) {
      IeeeArithmetic const arithmetic;
      call(callable, 0, parts, 0);
      return;
    }
    own.rethrow();
    detail::BytesTask const task{call, parts};
    own.queue.push(detail::BytesTask::run, &task, sizeof task, callable, bytes);
  }
  /// Main function of the worker. @param stream  its StreamCore
  static void work(void* stream) {
    auto& core = *static_cast<detail::StreamCore*>(stream);
    ::pthread_setname_np(::pthread_self(), core.name.substr(0, 15).c_str());
    while (!core.stopping) {
      void* bytes = nullptr;
      auto const run = core.queue.pop(bytes);
      run(bytes, core);
    }
  }
  void push_record(Event& event) {
    auto const ticket = event.next_ticket(core_.get());
    if (runs_inline()) {
      event.state_->complete(ticket);
      return;
    }
    event.state_->enter();
    detail::push_task(core_->queue, detail::RecordTask{event.state_, ticket});
  }

  std::unique_ptr<detail::StreamCore> core_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
