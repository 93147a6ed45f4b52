// SPDX-License-Identifier: Apache-2.0
// How streams run under ThreadSanitizer: as fibers of one thread.
#pragma once

#include "tests/standin/runtime/unseen.hpp"
#if STANDIN_TSAN

#include <sys/mman.h>

#include <cstddef>
#include <new>

#include "tests/standin/runtime/state.hpp"
#include "tests/support/fiber.hpp"

namespace standin {

/// [Note: Streams are fibers]
/// A missing wait is a race only where ThreadSanitizer sees two parties without an order. Threads would do, but which
/// accesses it remembers depends on who runs when. So a single thread runs all streams, each as a fiber of
/// ThreadSanitizer's with a stack of its own, and changes between them without telling of an order
/// (__tsan_switch_to_fiber_no_sync). What orders streams is then what CUDA promises and nothing else: a stream's own
/// operations, the call that enqueued one (release, acquire), and events. The report comes in every run, whatever the
/// order in which the streams ran.
struct Fiber {
  static constexpr std::size_t stack_bytes = std::size_t{1} << 20;

  explicit Fiber(void (*entry)()) : tsan(__tsan_create_fiber(0)) {
    void* const memory = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stack = static_cast<std::byte*>(memory);
    context.prepare(stack, stack_bytes, 0, entry);
  }
  ~Fiber() {
    __tsan_destroy_fiber(tsan);
    munmap(stack, stack_bytes);
  }
  Fiber(Fiber const&) = delete;
  Fiber& operator=(Fiber const&) = delete;

  void* tsan;
  std::byte* stack = nullptr;
  emulated::Context context;
  emulated::Stacks stacks;  ///< of the threads of its kernels
  bool done = false;        ///< whether its operation is
};

}  // namespace standin

#endif
