// SPDX-License-Identifier: Apache-2.0
// Host streams: a worker that runs its queue in order, ordered against other streams by events alone. It may be one
// thread or a team of several.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
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

#include "fsdp/detail/base/arithmetic.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/detail/host/event.hpp"
#include "fsdp/detail/host/team.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail {

struct StreamCore;

/// A function that runs a task. @param bytes  the pushed bytes, in memory of the worker, aligned for any type
using RunTask = void (*)(void* bytes, StreamCore&);

/// An unbounded queue with one producer and one consumer. A task is a function and bytes for it, which are copied in
/// and out.
///
/// [Note: Tasks in a ring] A ring is used again and again, so that nothing is allocated once it is as large as the
/// deepest backlog that there was: one that is full is followed by one of twice its size, which stays. The queue's
/// order is one way all the same: the producer releases and the consumer acquires, but the producer learns nothing back
/// that ThreadSanitizer sees (see [Note: Events are the only order]). Words are copied one by one, relaxed. That they
/// have been read before they are overwritten is a release of the consumer's count, and on the producer's side that
/// stores which depend on a load come after it on every processor.
class TaskQueue {
 public:
  static constexpr std::size_t most_bytes = 4096;  ///< of a task

  TaskQueue() : written_to_(new Ring(first_words)), read_from_(written_to_) {}
  TaskQueue(TaskQueue const&) = delete;
  TaskQueue& operator=(TaskQueue const&) = delete;
  ~TaskQueue() {
    while (read_from_ != nullptr) drop_ring();
  }

  /// Reserves room for the next push, which then does not throw. Producer only. @pre bytes <= most_bytes
  void make_room(std::size_t bytes) {
    auto const words = words_for(bytes);
    auto const size = written_to_->size;
    auto const left = size - written_to_->place(written_);  // until the ring's end
    auto const needed = words < left ? words : left + words;
    if (needed < size - (written_ - freed_)) return;  // one word more is the next task's head
    freed_ = written_to_->read.load(std::memory_order_relaxed);
    if (needed < size - (written_ - freed_)) return;
    auto* const next = new Ring(2 * size);
    auto& full = *written_to_;
    auto const at = full.place(written_);
    full.next = next;
    written_to_ = next;
    written_ = freed_ = 0;
    full.words[at].store(next_ring, std::memory_order_release);  // the last touch: the worker may free it now
  }
  /// Appends a task: `bytes` of `task`, and behind them `more_bytes` of `more`. Producer only.
  /// @pre bytes + more_bytes <= most_bytes; bytes are whole words if there are more
  void push(RunTask run, void const* task, std::size_t bytes, void const* more = nullptr, std::size_t more_bytes = 0) {
    auto const words = words_for(bytes + more_bytes);
    make_room(bytes + more_bytes);
    auto& ring = *written_to_;
    auto const at = ring.place(written_);
    bool const begins_anew = words >= ring.size - at;
    if (begins_anew) written_ += ring.size - at;
    auto const head = ring.place(written_);
    ring.words[head + words].store(nothing, std::memory_order_relaxed);
    ring.words[head + 1].store(reinterpret_cast<std::uintptr_t>(run), std::memory_order_relaxed);
    ring.write(head + head_words, task, bytes);
    ring.write(head + words_for(bytes), more, more_bytes);
    ring.words[head].store(a_task + bytes + more_bytes, std::memory_order_release);
    if (begins_anew) ring.words[at].store(ring_begins, std::memory_order_release);
    written_ += words;
    pushed_.fetch_add(1, std::memory_order_relaxed);  // a barrier on the processor, none for ThreadSanitizer
    if (sleepers_.load(std::memory_order_relaxed) != 0) futex_wake_all(pushed_, FutexScope::process);
  }

  /// Waits for the next task, and takes it out. Consumer only.
  /// @param bytes  set to the pushed bytes, which stays there until the next pop
  RunTask pop(void*& bytes) {
    Backoff backoff{Backoff::Limit::none};
    for (;;) {
      auto const seen = pushed_.load(std::memory_order_relaxed);
      auto& ring = *read_from_;
      auto const at = ring.place(read_);
      auto const head = ring.words[at].load(std::memory_order_acquire);
      if (head == nothing) {
        backoff.pause(pushed_, seen, sleepers_, [] { return std::string{}; });
      } else if (head == next_ring) {
        drop_ring();
        read_ = 0;
      } else if (head == ring_begins) {
        advance(ring.size - at);
      } else {
        bytes = task_;
        return take(at, static_cast<std::size_t>(head - a_task));
      }
    }
  }

 private:
  using Word = std::uint64_t;

  // Values of a head.
  static constexpr Word nothing = 0;      // yet
  static constexpr Word next_ring = 1;    // there is one, where the next task is
  static constexpr Word ring_begins = 2;  // anew: the next task is at its beginning
  static constexpr Word a_task = 3;       // and how many bytes it has

  static constexpr std::size_t head_words = 2;      // what it says; the task's function
  static constexpr std::size_t first_words = 4096;  // of the first ring: 32 KiB
  static_assert(head_words + most_bytes / sizeof(Word) < first_words && (first_words & (first_words - 1)) == 0);

  static std::size_t words_for(std::size_t bytes) { return head_words + (bytes + sizeof(Word) - 1) / sizeof(Word); }

  struct Ring {
    explicit Ring(std::size_t count) : size(count), words(new std::atomic<Word>[count]()) {}

    std::size_t place(std::uint64_t word) const { return static_cast<std::size_t>(word) & (size - 1); }
    void write(std::size_t at, void const* from, std::size_t bytes) {
      auto const* next_byte = static_cast<std::byte const*>(from);
      for (Word word = 0; bytes > 0; ++at) {
        auto const count = bytes < sizeof word ? bytes : sizeof word;
        std::memcpy(&word, next_byte, count);
        words[at].store(word, std::memory_order_relaxed);
        next_byte += count;
        bytes -= count;
      }
    }

    std::size_t const size;  // a power of two, and room for any task
    std::unique_ptr<std::atomic<Word>[]> const words;
    Ring* next = nullptr;                            // written before next_ring is
    alignas(64) std::atomic<std::uint64_t> read{0};  // words that may be overwritten, all rounds counted
  };

  RunTask take(std::size_t at, std::size_t bytes) {
    auto const& words = read_from_->words;
    auto const run = reinterpret_cast<RunTask>(words[at + 1].load(std::memory_order_relaxed));
    auto const count = words_for(bytes);
    for (std::size_t i = head_words; i < count; ++i) {
      auto const word = words[at + i].load(std::memory_order_relaxed);
      std::memcpy(task_ + (i - head_words) * sizeof(Word), &word, sizeof(Word));
    }
    advance(count);
    return run;
  }
  /// Frees words that were read. The release store keeps their loads before it; no thread needs to acquire it.
  void advance(std::size_t words) {
    read_ += words;
    read_from_->read.store(read_, std::memory_order_release);
  }
  void drop_ring() {
    auto* const done = read_from_;
    read_from_ = done->next;
    delete done;
  }

  // Members of the producer.
  alignas(64) Ring* written_to_;
  std::uint64_t written_ = 0;  // words, all rounds counted
  std::uint64_t freed_ = 0;    // of them may be overwritten, as far as is known
  // Members of the consumer.
  alignas(64) Ring* read_from_;
  std::uint64_t read_ = 0;
  alignas(64) std::byte task_[most_bytes];
  // Members of both.
  alignas(64) std::atomic<std::uint32_t> pushed_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

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
    failure_text->mark_reported();
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
  /// The callable computes as IEEE 754 says, whatever the calling thread's modes are (IeeeArithmetic).
  /// If the stream has failed before it, a callable with a member `void skip(Failure const& why) noexcept` gets that
  /// call instead.
  /// Memory is allocated for a callable that is larger than TaskQueue::most_bytes, or can neither be copied
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
  bool was_reported() const { return core().is_known_failed() && core_->failure_text->was_reported(); }

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
    event.state_->mark_failure_reported();
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
