// SPDX-License-Identifier: Apache-2.0
// The queue between a host stream's owner and its worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "fsdp/host/backoff.hpp"

namespace fsdp::host::detail {

struct StreamCore;

/// A node of the queue. The producer makes it, the worker frees it. Two functions instead of a vtable: a program has a
/// task for every kernel that it launches, and each would be compiled with a class's table and destructors.
struct Task {
  using Run = void (*)(Task&, StreamCore&);
  using Free = void (*)(Task*) noexcept;

  Task(Run how, Free end) : run(how), free(end) {}
  Task(Task const&) = delete;
  Task& operator=(Task const&) = delete;

  std::atomic<Task*> next{nullptr};
  Run run;
  Free free;
};

template <class T>
void free_task(Task* task) noexcept {
  delete static_cast<T*>(task);
}

/// An unbounded queue with one producer and one consumer, one way: the producer releases and the consumer acquires; the
/// producer learns nothing back (see [Note: Events are the only order]).
class TaskQueue {
 public:
  TaskQueue() : head_(new Task(nullptr, free_task<Task>)), tail_(head_) {}
  TaskQueue(TaskQueue const&) = delete;
  TaskQueue& operator=(TaskQueue const&) = delete;
  ~TaskQueue() {
    while (head_ != nullptr) drop_head(head_->next.load(std::memory_order_relaxed));
  }

  void push(Task* task) {
    tail_->next.store(task, std::memory_order_release);  // the last touch: the worker may free the old tail now
    tail_ = task;
    pushed_.fetch_add(1, std::memory_order_relaxed);  // a barrier on the processor, none for ThreadSanitizer
    if (sleepers_.load(std::memory_order_relaxed) != 0) futex_wake_all(pushed_, FutexScope::process);
  }
  /// The next task, which stays owned by the queue until the next pop. Waits for one.
  Task* pop() {
    Backoff backoff{Backoff::Limit::none};
    for (;;) {
      auto const seen = pushed_.load(std::memory_order_relaxed);
      if (Task* const next = head_->next.load(std::memory_order_acquire); next != nullptr) {
        drop_head(next);
        return next;
      }
      backoff.pause(pushed_, seen, sleepers_, [] { return std::string{}; });
    }
  }

 private:
  void drop_head(Task* next) {
    auto* const done = head_;
    head_ = next;
    done->free(done);
  }

  alignas(64) Task* head_;  // the worker's: the task that ran last
  alignas(64) Task* tail_;  // the producer's
  alignas(64) std::atomic<std::uint32_t> pushed_{0};
  std::atomic<std::uint32_t> sleepers_{0};
};

}  // namespace fsdp::host::detail
