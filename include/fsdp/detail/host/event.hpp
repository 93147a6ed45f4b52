// SPDX-License-Identifier: Apache-2.0
// Events of host streams: a flag in memory that outlives every task which still refers to it, and the failure of the
// stream.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail {

/// A Failure in memory that flags of several events share. It outlives the stream. Written once by the stream's worker,
/// before the first flag refers to it. As in [Note: Events are the only order], everything is relaxed, and the memory
/// is used again and never freed. Texts are cut to 1,000 characters.
class FailureText {
 public:
  /// Writes the failure. The worker calls it: nothing is allocated.
  [[gnu::cold]] void write(Failure const& failure) {
    auto const size = std::min(failure.text.size(), most_text);
    for (std::size_t at = 0; at < size; at += sizeof(Word)) {
      Word word = 0;
      std::memcpy(&word, failure.text.data() + at, std::min(sizeof word, size - at));
      words_[at / sizeof(Word)].store(word, std::memory_order_relaxed);
    }
    size_.store(size, std::memory_order_relaxed);
    kind_.store(failure.kind, std::memory_order_relaxed);
  }
  [[gnu::cold]] Failure read() const {
    Failure failure{kind_.load(std::memory_order_relaxed), std::string(size_.load(std::memory_order_relaxed), '\0')};
    for (std::size_t at = 0; at < failure.text.size(); at += sizeof(Word)) {
      auto const word = words_[at / sizeof(Word)].load(std::memory_order_relaxed);
      std::memcpy(failure.text.data() + at, &word, std::min(sizeof word, failure.text.size() - at));
    }
    return failure;
  }
  /// Records that a call has thrown it.
  void mark_reported() { reported_.store(true, std::memory_order_relaxed); }
  bool was_reported() const { return reported_.load(std::memory_order_relaxed); }
  void share() { shares_.fetch_add(1, std::memory_order_relaxed); }

 private:
  friend class FailureTexts;
  using Word = std::uint64_t;
  static constexpr std::size_t most_text = 1000;

  std::atomic<std::uint32_t> shares_{0};
  std::atomic<ErrorKind> kind_{};
  std::atomic<bool> reported_{false};
  std::atomic<std::size_t> size_{0};
  std::array<std::atomic<Word>, most_text / sizeof(Word)> words_{};
  FailureText* next_ = nullptr;  // in the pool; host threads only
};

/// Texts for reuse. Host threads only: a stream takes one when it is made.
class FailureTexts {
 public:
  [[gnu::cold]] static FailureText* take() {
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    auto* const text = pool.free_ == nullptr ? new FailureText : std::exchange(pool.free_, pool.free_->next_);
    text->reported_.store(false, std::memory_order_relaxed);
    text->share();
    return text;
  }
  [[gnu::cold]] static void give(FailureText* text) noexcept {
    if (text->shares_.fetch_sub(1, std::memory_order_release) != 1) return;
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    text->next_ = std::exchange(pool.free_, text);
  }

 private:
  static FailureTexts& instance() {
    static auto& pool = *new FailureTexts;  // outlives every stream and event of the process
    return pool;
  }
  std::mutex mutex_;
  FailureText* free_ = nullptr;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

namespace detail {
/// The flag of an event. Streams store the ticket of the record that they have reached; waiters compare.
/// [Note: Events are the only order] Workers release into and acquire from `completed` and nothing else, so that
/// ThreadSanitizer sees exactly the order that the schedule asked for. All other counters are relaxed, and the memory
/// of a flag is never freed: giving it back to an allocator from another thread would itself need an order.
///
/// [Note: Events carry failures] A record that a failed stream reaches completes as any other, and says why the stream
/// has failed: first which ticket is the first one with a failure, then `completed`. So a wait fails or not by its
/// ticket alone, whenever the worker comes to it.
struct alignas(64) EventState {
  std::atomic<std::uint32_t> completed{0};  // the latest ticket reached, modulo 2^32
  std::atomic<std::uint32_t> sleepers{0};
  std::atomic<std::uint32_t> pending{0};       // tasks enqueued that still refer to this flag
  std::uint32_t base = 0;                      // the last ticket of the previous owner; host threads only
  EventState* next = nullptr;                  // in the pool's lists; host threads only
  std::atomic<std::uint64_t> failed_since{0};  // 0: no failure; else the first ticket that has one, plus 2^32
  std::atomic<FailureText*> failure{nullptr};  // a share in it

  bool reached(std::uint32_t ticket, std::memory_order order) const {
    return static_cast<std::int32_t>(completed.load(order) - ticket) >= 0;
  }
  void complete(std::uint32_t ticket) {
    completed.store(ticket, std::memory_order_release);
    wake_sleepers(completed, sleepers);
  }
  /// Returns once `ticket` is reached, with what its recorder did before visible.
  template <class Describe>
  void await(std::uint32_t ticket, Backoff backoff, Describe const& describe) {
    while (!reached(ticket, std::memory_order_relaxed)) {
      auto const seen = completed.load(std::memory_order_relaxed);
      if (static_cast<std::int32_t>(seen - ticket) < 0) backoff.pause(completed, seen, sleepers, describe);
    }
    static_cast<void>(reached(ticket, std::memory_order_acquire));
  }
  /// Sets a failure for tickets from `ticket` on. Before complete().
  [[gnu::cold]] void fail(std::uint32_t ticket, FailureText& why) {
    if (failed_since.load(std::memory_order_relaxed) != 0) return;  // of an earlier ticket
    why.share();
    failure.store(&why, std::memory_order_relaxed);
    failed_since.store(has_failure + ticket, std::memory_order_relaxed);
  }
  /// Whether the record of `ticket` has a failure. @pre await(ticket) has returned
  bool has_failed(std::uint32_t ticket) const {
    auto const since = failed_since.load(std::memory_order_relaxed);
    return since != 0 && static_cast<std::int32_t>(ticket - static_cast<std::uint32_t>(since)) >= 0;
  }
  /// The failure for a waiting stream or thread. @param rank  owner of the event; negative: the waiter's own
  /// @pre has_failed
  [[gnu::cold]] Failure failure_of_rank(int rank) const {
    auto const why = failure.load(std::memory_order_relaxed)->read();
    return rank < 0 ? why : peer_failure(rank, why);
  }
  /// Records that a call has thrown the failure. @pre has_failed
  [[gnu::cold]] void mark_failure_reported() { failure.load(std::memory_order_relaxed)->mark_reported(); }
  /// Removes the failure before another stream records. Host threads only. @pre idle
  void forget_failure() noexcept {
    if (failed_since.load(std::memory_order_relaxed) == 0) return;
    failed_since.store(0, std::memory_order_relaxed);
    FailureTexts::give(failure.exchange(nullptr, std::memory_order_relaxed));
  }
  static constexpr std::uint64_t has_failure = std::uint64_t{1} << 32;

  void enter() { pending.fetch_add(1, std::memory_order_relaxed); }
  // Release keeps this after the store to `completed`; nobody acquires it.
  void leave() { pending.fetch_sub(1, std::memory_order_release); }
  bool idle() const { return pending.load(std::memory_order_relaxed) == 0; }
};

/// Flags for reuse. Host threads only: workers never come here.
class EventPool {
 public:
  [[gnu::noinline]] static EventState* take() {
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    pool.reclaim();
    if (pool.free_ == nullptr) return new EventState;
    return pop(pool.free_);
  }
  [[gnu::noinline]] static void give(EventState* state, std::uint32_t last_ticket) noexcept {
    auto& pool = instance();
    std::lock_guard const lock{pool.mutex_};
    state->base = last_ticket;
    if (state->idle()) {
      push_free(pool, state);
    } else {
      push(pool.busy_, state);
    }
  }

 private:
  static EventPool& instance() {
    static auto& pool = *new EventPool;  // outlives every stream and event of the process
    return pool;
  }
  static EventState* pop(EventState*& list) { return std::exchange(list, list->next); }
  static void push(EventState*& list, EventState* state) { state->next = std::exchange(list, state); }
  static void push_free(EventPool& pool, EventState* state) {
    state->forget_failure();
    push(pool.free_, state);
  }
  void reclaim() {
    for (EventState** link = &busy_; *link != nullptr;) {
      if ((*link)->idle()) {
        push_free(*this, pop(*link));
      } else {
        link = &(*link)->next;
      }
    }
  }

  std::mutex mutex_;
  EventState* free_ = nullptr;
  EventState* busy_ = nullptr;  // given back while tasks still refer to them
};
}  // namespace detail

class Stream;

/// A point in a stream's work, recorded by Stream::record and awaited by Stream::wait. Move-only. May be destroyed
/// while streams still have to reach it.
class Event {
 public:
  Event() : state_(detail::EventPool::take()), ticket_(state_->base) {}
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    Event moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~Event() {
    if (state_ != nullptr) detail::EventPool::give(state_, ticket_);
  }

  /// Whether record was ever called.
  bool recorded() const { return stream_ != nullptr; }

  /// Sets the rank of the event, for which other ranks wait: they fail with a PeerError that names it.
  void set_rank(int rank) { rank_ = rank; }

 private:
  friend class Stream;

  void swap(Event& other) noexcept {
    std::swap(state_, other.state_);
    std::swap(ticket_, other.ticket_);
    std::swap(stream_, other.stream_);
    std::swap(rank_, other.rank_);
  }
  /// Takes the next ticket for a record on the stream with identity `stream`.
  std::uint32_t next_ticket(void const* stream) {
    // Tickets of one flag must be reached in order: another stream gets another flag while the first is in use.
    if (recorded() && stream != stream_) {
      if (state_->idle()) {
        state_->forget_failure();
      } else {
        auto* const fresh = detail::EventPool::take();
        detail::EventPool::give(state_, ticket_);
        state_ = fresh;
        ticket_ = fresh->base;
      }
    }
    stream_ = stream;
    return ++ticket_;
  }

  detail::EventState* state_ = nullptr;
  std::uint32_t ticket_ = 0;      // of the latest record
  void const* stream_ = nullptr;  // where the latest record was made
  int rank_ = no_rank;
  static constexpr int no_rank = -1;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
