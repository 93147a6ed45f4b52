// SPDX-License-Identifier: Apache-2.0
// Fibers: stacks that one thread runs in turn. x86-64 by a few instructions, elsewhere by ucontext; AddressSanitizer is
// told.
#pragma once

#include <sys/mman.h>
#if !defined(__x86_64__) || defined(EMULATED_UCONTEXT)
#include <ucontext.h>
#if !defined(EMULATED_UCONTEXT)
#define EMULATED_UCONTEXT
#endif
#endif

#include <algorithm>
#include <cstddef>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATED_ASAN
#elif defined(__SANITIZE_THREAD__)
#define EMULATED_TSAN
#elif defined(__has_feature)  // clang++
#if __has_feature(address_sanitizer)
#define EMULATED_ASAN
#elif __has_feature(thread_sanitizer)
#define EMULATED_TSAN
#endif
#endif
#if defined(EMULATED_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Not for ThreadSanitizer, in whose eyes a function that changes stacks returns to where it was not called.
#if defined(EMULATED_TSAN)
#define EMULATED_UNSEEN [[gnu::no_sanitize("thread"), gnu::noinline]]
#else
#define EMULATED_UNSEEN
#endif

namespace emulated {

/// Stacks of fibers. They stay for the next fiber; below each is a page that nobody may touch.
class Stacks {
 public:
  static constexpr std::size_t stack_bytes = 124 * 1024, guard_bytes = 4 * 1024, count = 1024;

  Stacks() = default;
  Stacks(Stacks const&) = delete;
  Stacks& operator=(Stacks const&) = delete;
  ~Stacks() {
    if (memory_ == nullptr) return;
#if defined(EMULATED_ASAN)
    __asan_unpoison_memory_region(memory_, used_ * stride);
#endif
    munmap(memory_, count * stride);
  }

  /// The lowest address of stack i of 1024.
  std::byte* of(std::size_t i) {
    if (memory_ == nullptr) {
      void* const all =
          mmap(nullptr, count * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (all == MAP_FAILED) throw std::bad_alloc();
      memory_ = static_cast<std::byte*>(all);
    }
    for (; used_ <= i; ++used_) mprotect(memory_ + used_ * stride, guard_bytes, PROT_NONE);
    return memory_ + i * stride + guard_bytes;
  }

  /// Fibers of the calling thread.
  static Stacks& own() {
    thread_local Stacks stacks;
    return stacks;
  }

 private:
  static constexpr std::size_t stride = stack_bytes + guard_bytes;
  std::byte* memory_ = nullptr;
  std::size_t used_ = 0;  // that have their guards
};

/// A place where the calling thread, or a fiber, goes on.
struct Context {
  std::byte* stack = nullptr;  ///< lowest address
  std::size_t bytes = 0;
  void* fake_stack = nullptr;  ///< AddressSanitizer's

  /// Makes this the begin of fiber i. Stacks begin at different places, so that their hot ends do not share cache sets.
  void prepare(Stacks& stacks, std::size_t i, void (*entry)()) {
    prepare(stacks.of(i), Stacks::stack_bytes, i % 64 * 64, entry);
  }
  /// The same, on any memory. @param unused  bytes at its end
  void prepare(std::byte* memory, std::size_t size, std::size_t unused, void (*entry)()) {
    stack = memory;
    bytes = size;
    unpoison(8192);
    std::byte* const end = stack + bytes - unused;
#if defined(EMULATED_UCONTEXT)
    getcontext(&place);
    place.uc_stack.ss_sp = stack;
    place.uc_stack.ss_size = static_cast<std::size_t>(end - stack);
    makecontext(&place, entry, 0);
#else
    place = reinterpret_cast<void**>(end) - 8;
    std::fill(place, place + 8, nullptr);  // six registers, where to return to, and a return address for `entry`
    place[6] = reinterpret_cast<void*>(entry);
#endif
  }
  /// Goes to `to`, for good or until somebody comes back.
  EMULATED_UNSEEN void leave_for(Context const& to, [[maybe_unused]] bool for_good = false) {
#if defined(EMULATED_ASAN)
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack, to.stack, to.bytes);
#endif
    swap(&place, &to.place);
#if defined(EMULATED_ASAN)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }
  /// Lets the last bytes of the stack be written again.
  void unpoison([[maybe_unused]] std::size_t last) const {
#if defined(EMULATED_ASAN)
    __asan_unpoison_memory_region(stack + bytes - last, last);
#endif
  }

 private:
#if defined(EMULATED_UCONTEXT)
  ucontext_t place{};  // slower: every swap is a system call
  static void swap(ucontext_t* from, ucontext_t const* to) { swapcontext(from, to); }
#else
  void** place = nullptr;  // top of the stack, where registers are kept
  [[gnu::naked, gnu::noinline]] static void swap(void*** /*from*/, void** const* /*to*/) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq (%rsi), %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
  }
#endif
};

}  // namespace emulated
