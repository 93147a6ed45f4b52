// SPDX-License-Identifier: Apache-2.0
// The queue between a host stream's owner and its worker: tasks lie in a ring, as bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "fsdp/host/backoff.hpp"

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
  /// Release keeps this after the loads of what was read; nobody acquires it.
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

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host::detail
