// SPDX-License-Identifier: Apache-2.0
// Counts what is allocated by operator new, in all threads of the process: what C libraries take by malloc is not ours.
// Can make one of the calling thread's allocations fail. Replaces the operators, so one source of a program includes
// it, and shares the program with no other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace fsdp::testing {

inline std::atomic<bool> allocations_count{false};
inline std::atomic<long> allocations{0};
inline std::atomic<long> allocated_bytes{0};  ///< of these, whether or not they were freed

inline void begin_counting() {
  allocations.store(0);
  allocated_bytes.store(0);
  allocations_count.store(true);
}
/// @return how many there were since begin_counting()
inline long end_counting() {
  allocations_count.store(false);
  return allocations.load();
}

/// The calling thread's allocations until one fails, once; negative: none does.
inline thread_local constinit long allocations_until_failure = -1;

inline void* counted_allocation(std::size_t bytes, std::size_t alignment) noexcept {
  if (allocations_until_failure >= 0 && allocations_until_failure-- == 0) return nullptr;
  if (allocations_count.load(std::memory_order_relaxed)) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    allocated_bytes.fetch_add(static_cast<long>(bytes), std::memory_order_relaxed);
  }
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

}  // namespace fsdp::testing

// The other forms of new and delete call these; under AddressSanitizer, those without exceptions would not.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (void* const memory = fsdp::testing::counted_allocation(bytes, alignof(std::max_align_t))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  if (void* const memory = fsdp::testing::counted_allocation(bytes, static_cast<std::size_t>(alignment))) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
  return fsdp::testing::counted_allocation(bytes, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment, std::nothrow_t const&) noexcept {
  return fsdp::testing::counted_allocation(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
