// SPDX-License-Identifier: Apache-2.0
// Runs CUDA thread blocks on the host, a block at a time: threads are fibers, and a schedule says which runs next.
#pragma once

#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/cuda/block.hpp"
#include "fsdp/error.hpp"
#include "tests/unit/kernels_support.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define EMULATED_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATED_ASAN 1
#endif
#endif
#if !defined(EMULATED_ASAN)
#define EMULATED_ASAN 0
#endif
#if EMULATED_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulated {

/// What a kernel did that a thread block may not do: a barrier that not all reach, a shuffle without the whole warp.
struct Failure : fsdp::Error {
  using fsdp::Error::Error;
};

/// [Note: Schedules]
/// A GPU runs warps in any order, so a kernel must be right in all. Forward, reverse and shuffled advance all warps
/// about evenly: each thread runs up to its next barrier or collective of its warp. Greedy runs one warp up to the
/// block's next barrier, through all its collectives, before another runs at all: the warp that is far ahead meets
/// what the others have not read yet, so that a missing trailing barrier shows.
enum class Schedule : unsigned char { forward, reverse, shuffled, greedy_forward, greedy_reverse };
inline constexpr std::array<Schedule, 5> schedules{Schedule::forward, Schedule::reverse, Schedule::shuffled,
                                                   Schedule::greedy_forward, Schedule::greedy_reverse};
constexpr std::string_view name(Schedule schedule) {
  constexpr std::array<std::string_view, 5> names{"forward", "reverse", "shuffled", "greedy forward", "greedy reverse"};
  return names[static_cast<std::size_t>(schedule)];
}

struct Options {
  Schedule schedule = Schedule::forward;
  std::uint64_t seed = 1;                      ///< of `shuffled`
  fsdp::SyncSite drop = fsdp::SyncSite::none;  ///< barriers of this site do nothing
  std::int64_t grid = std::int64_t{1} << 31;   ///< blocks at most; with more indices than that, a block runs several
  std::int64_t* dropped = nullptr;             ///< counts the threads that passed a dropped barrier
};

/// A place where a thread of the host, or a fiber, goes on.
struct Context {
  void* stack = nullptr;  ///< lowest address
  std::size_t bytes = 0;
  void* fake_stack = nullptr;  ///< AddressSanitizer's
#if defined(__x86_64__)
  void* top = nullptr;

  /// @param skip  bytes to leave free, so that the stacks' hot ends do not share cache sets
  void prepare(void (*entry)(), std::size_t skip) {
    auto* const words = reinterpret_cast<void**>(static_cast<std::byte*>(stack) + bytes - skip);
    std::fill(words - 8, words, nullptr);  // six registers, where to return to, and a return address for `entry`
    words[-2] = reinterpret_cast<void*>(entry);
    top = words - 8;
  }
  [[gnu::naked, gnu::noinline]] static void swap(void** /*from*/, void* /*to*/) {
    asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
  }
  void leave_for(Context const& to) { swap(&top, to.top); }
#else
  ucontext_t machine_state{};

  void prepare(void (*entry)(), std::size_t skip) {
    getcontext(&machine_state);
    machine_state.uc_stack.ss_sp = stack;
    machine_state.uc_stack.ss_size = bytes - skip;
    makecontext(&machine_state, entry, 0);
  }
  void leave_for(Context const& to) { swapcontext(&machine_state, &to.machine_state); }
#endif
};

/// Stacks of the fibers, below each a page that nobody may touch.
class Stacks {
 public:
  static constexpr std::size_t bytes = 124 * 1024, guard = 4 * 1024, count = 1024;
  Stacks() : memory_(mmap(nullptr, count * (bytes + guard), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    for (std::size_t i = 0; i < count; ++i) mprotect(stack(i), bytes, PROT_READ | PROT_WRITE);
  }
  Stacks(Stacks const&) = delete;
  Stacks& operator=(Stacks const&) = delete;
  ~Stacks() { munmap(memory_, count * (bytes + guard)); }
  void* stack(std::size_t i) const { return static_cast<std::byte*>(memory_) + i * (bytes + guard) + guard; }

 private:
  void* memory_;
};

/// One cp.async: 16 bytes that arrive when their thread waits for them.
struct Copy {
  void* to;
  void const* from;  ///< null: zeros
  std::int64_t group;
};

class Machine;
inline thread_local Machine* machine = nullptr;  ///< whose fibers run

/// The threads of one block, and its shared memory.
class Machine {
 public:
  Machine(int threads, std::size_t shared_bytes, Options const& options)
      : options_(options),
        random_(options.seed * 0x9e3779b97f4a7c15u | 1),
        threads_(static_cast<std::size_t>(threads)),
        warps_(static_cast<std::size_t>(threads) / 32),
        shared_bytes_(shared_bytes),
        shared_(static_cast<std::byte*>(::operator new (shared_bytes + canary, std::align_val_t{128}))) {
    FSDP_EXPECTS(threads >= 32 && threads <= 1024 && threads % 32 == 0, "a block has whole warps, not {} threads",
                 threads);
    thread_local Stacks const stacks;
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      threads_[i].context.stack = stacks.stack(i);
      threads_[i].context.bytes = Stacks::bytes;
#if EMULATED_ASAN
      __asan_unpoison_memory_region(stacks.stack(i), Stacks::bytes);  // frames of fibers that never ended
#endif
    }
  }
  Machine(Machine const&) = delete;
  Machine& operator=(Machine const&) = delete;

  /// Runs `body` in every thread of a fresh block.
  /// @throws Failure, and what a thread throws
  void run(std::function<void()> const& body);

  int running() const { return running_; }
  int threads() const { return static_cast<int>(threads_.size()); }
  std::byte* shared() const { return shared_.get(); }

  void sync(fsdp::SyncSite site) {
    if (dropped(site)) return;
    auto& thread = threads_[static_cast<std::size_t>(running_)];
    if (arrived_ == 0) site_ = site;
    if (site != site_) {
      fail("thread {} reaches barrier {} while others wait at {}", running_, text(site), text(site_));
    }
    thread.at = "barrier";
    thread.site = site;
    if (++arrived_ == threads()) {
      arrived_ = 0;
      for (auto& warp : warps_) warp.ready = ~0u;
      restart_ = true;
    } else {
      ready(false);
    }
    suspend();
  }
  void sync_warp(fsdp::SyncSite site) {
    int nothing = 0;
    if (!dropped(site)) collective("sync_warp", static_cast<int>(site), nothing, [](auto&) {});
  }

  /// An operation that all lanes of a warp reach together: the last one runs `complete` on everybody's data.
  template <class Data, class Complete>
  void collective(char const* operation, int argument, Data& data, Complete complete) {
    auto const lane = static_cast<std::size_t>(running_) % 32;
    auto& warp = warps_[static_cast<std::size_t>(running_) / 32];
    if (warp.arrived == 0) {
      warp.operation = operation;
      warp.argument = argument;
    } else if (warp.argument != argument || std::strcmp(warp.operation, operation) != 0) {
      fail("thread {} reaches {} ({}) while its warp waits at {} ({})", running_, operation, argument, warp.operation,
           warp.argument);
    }
    warp.data[lane] = &data;
    if (++warp.arrived == 32) {
      std::array<Data*, 32> lanes;
      for (std::size_t i = 0; i < 32; ++i) lanes[i] = static_cast<Data*>(warp.data[i]);
      complete(lanes);
      warp.arrived = 0;
      warp.ready = ~0u;
    } else {
      threads_[static_cast<std::size_t>(running_)].at = operation;
      ready(false);
      suspend();
    }
  }

  /// @throws Failure unless [place, place + bytes) is shared memory, aligned to 16
  void expect_shared(void const* place, std::size_t bytes, char const* operation) const {
    auto const offset = reinterpret_cast<std::uintptr_t>(place) - reinterpret_cast<std::uintptr_t>(shared_.get());
    if (offset % 16 != 0) fail("thread {}: {} at an address that is not aligned to 16", running_, operation);
    if (offset > shared_bytes_ || shared_bytes_ - offset < bytes) {
      fail("thread {}: {} outside shared memory", running_, operation);
    }
  }

  // cp.async of the running thread. What is overwritten is lost at once; what arrives is there at the wait alone.
  void copy_async(void* to, void const* from) {
    expect_shared(to, 16, "cp.async");
    if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) fail("thread {}: cp.async from off 16 bytes", running_);
    std::memset(to, 0xff, 16);
    auto& thread = threads_[static_cast<std::size_t>(running_)];
    thread.copies.push_back({to, from, thread.groups});
  }
  void commit() { ++threads_[static_cast<std::size_t>(running_)].groups; }
  void wait(std::int64_t pending) {
    auto& thread = threads_[static_cast<std::size_t>(running_)];
    auto const rest = std::find_if(thread.copies.begin(), thread.copies.end(),
                                   [&](Copy const& copy) { return copy.group + pending >= thread.groups; });
    for (auto copy = thread.copies.begin(); copy != rest; ++copy) {
      if (copy->from == nullptr) {
        std::memset(copy->to, 0, 16);
      } else {
        std::memcpy(copy->to, copy->from, 16);
      }
    }
    thread.copies.erase(thread.copies.begin(), rest);
  }

 private:
  struct Thread {
    Context context;
    char const* at = "";  ///< what it waits for, "" when it runs or is done
    fsdp::SyncSite site{};
    std::vector<Copy> copies;
    std::int64_t groups = 0;  ///< committed so far
  };
  struct Warp {
    std::uint32_t ready = ~0u;  ///< lanes that can run
    int arrived = 0;            ///< at the collective that its lanes wait in
    char const* operation = "";
    int argument = 0;
    std::array<void*, 32> data{};
  };
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{128}); }
  };
  /// Bytes behind shared memory that must stay as they are; AddressSanitizer has its own.
  static constexpr std::size_t canary = EMULATED_ASAN ? 0 : 128;

  template <class... Args>
  [[noreturn]] static void fail(fmt::format_string<Args...> format, Args&&... args) {
    fsdp::fail<Failure>(format, std::forward<Args>(args)...);
  }
  static std::string text(fsdp::SyncSite site) {
    return fmt::format("{} ({})", static_cast<int>(site), fsdp::name(site));
  }
  bool dropped(fsdp::SyncSite site) const {
    if (site == fsdp::SyncSite::none || site != options_.drop) return false;
    if (options_.dropped != nullptr) ++*options_.dropped;
    return true;
  }
  void ready(bool value) {
    auto const bit = std::uint32_t{1} << (running_ % 32);
    auto& lanes = warps_[static_cast<std::size_t>(running_) / 32].ready;
    lanes = value ? lanes | bit : lanes & ~bit;
  }

  int pick();
  static void enter();
  static void leave(Context& from, Context const& to, [[maybe_unused]] bool for_good) {
#if EMULATED_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack, to.bytes);
#endif
    from.leave_for(to);
#if EMULATED_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
  }
  void suspend() {
    int const from = running_;
    int const to = pick();
    if (to < 0) fail("no thread can go on: {}", waiting());
    running_ = to;
    if (to != from) {
      leave(threads_[static_cast<std::size_t>(from)].context, threads_[static_cast<std::size_t>(to)].context, false);
    }
    threads_[static_cast<std::size_t>(from)].at = "";
  }
  std::string waiting() const {
    std::map<std::string, int> counts;
    for (auto const& thread : threads_) {
      std::string const at = thread.at;
      ++counts[at.empty() ? "done" : at == "barrier" ? "at barrier " + text(thread.site) : "in " + at];
    }
    std::string list;
    for (auto const& [at, count] : counts) list += fmt::format("{}{} threads {}", list.empty() ? "" : ", ", count, at);
    return list;
  }

  Options options_;
  std::uint64_t random_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::size_t shared_bytes_;
  std::unique_ptr<std::byte, Free> shared_;
  Context main_;
  std::function<void()> const* body_ = nullptr;
  std::exception_ptr error_;
  fsdp::SyncSite site_{};
  int running_ = 0, arrived_ = 0, done_ = 0;
  bool restart_ = true;  ///< the schedule begins anew
};

/// The thread that runs next, by the schedule; -1: none can.
inline int Machine::pick() {
  auto const schedule = options_.schedule;
  bool const backward = schedule == Schedule::reverse || schedule == Schedule::greedy_reverse;
  bool const greedy = schedule == Schedule::greedy_forward || schedule == Schedule::greedy_reverse;
  bool const shuffled = schedule == Schedule::shuffled;
  int const count = static_cast<int>(warps_.size()), step = backward ? -1 : 1, first_lane = backward ? 31 : 0;
  auto const warp_of = [this](int i) -> Warp const& { return warps_[static_cast<std::size_t>(i)]; };
  // The first of these lanes from `lane` on, around the warp in the schedule's direction.
  auto const nearest = [=](std::uint32_t lanes, int lane) {
    return (backward ? lane - std::countl_zero(std::rotl(lanes, 31 - lane))
                     : lane + std::countr_zero(std::rotr(lanes, lane))) &
           31;
  };

  int warp = running_ / 32, lane = running_ % 32 + step;
  if (shuffled) {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;  // Marsaglia's xorshift64
    warp = static_cast<int>((random_ >> 32) % static_cast<std::uint64_t>(count));
    lane = static_cast<int>(random_ >> 20 & 31);
  } else if (restart_) {
    warp = backward ? count - 1 : 0;
    lane = first_lane;
  }
  restart_ = false;
  std::uint32_t onward = ~0u;  // lanes of this warp that come before other warps
  if (!greedy && !shuffled) onward = lane < 0 || lane > 31 ? 0 : backward ? ~0u >> (31 - lane) : ~0u << lane;
  if (auto const lanes = warp_of(warp).ready & onward; lanes != 0) return warp * 32 + nearest(lanes, lane & 31);
  for (int k = 1; k <= count; ++k) {
    int const other = greedy ? (backward ? count - k : k - 1) : (warp + step * k + count) % count;
    if (auto const lanes = warp_of(other).ready; lanes != 0) {
      return other * 32 + nearest(lanes, shuffled ? lane : first_lane);
    }
  }
  return -1;
}

/// Where every fiber begins and ends.
inline void Machine::enter() {
  Machine& self = *machine;
#if EMULATED_ASAN
  void const* stack = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (self.main_.stack == nullptr) {
    self.main_.stack = const_cast<void*>(stack);
    self.main_.bytes = bytes;
  }
#endif
  int next = -1;
  try {
    (*self.body_)();
    self.ready(false);
    if (++self.done_ < self.threads()) {
      next = self.pick();
      if (next < 0) fail("no thread can go on: {}", self.waiting());
    }
  } catch (...) {
    self.error_ = std::current_exception();
  }
  auto& ended = self.threads_[static_cast<std::size_t>(self.running_)].context;
  if (next < 0) leave(ended, self.main_, true);
  self.running_ = next;
  leave(ended, self.threads_[static_cast<std::size_t>(next)].context, true);
}

inline void Machine::run(std::function<void()> const& body) {
  std::memset(shared_.get(), 0xff, shared_bytes_);  // NaN in every type
  std::memset(shared_.get() + shared_bytes_, 0xa5, canary);
  for (std::size_t i = 0; i < threads_.size(); ++i) {
    auto& thread = threads_[i];
#if EMULATED_ASAN
    __asan_unpoison_memory_region(static_cast<std::byte*>(thread.context.stack) + Stacks::bytes - 8192, 8192);
#endif
    thread.context.prepare(&Machine::enter, i % 64 * 64);
    thread.copies.clear();
    thread.groups = 0;
    thread.at = "";
  }
  std::fill(warps_.begin(), warps_.end(), Warp{});
  body_ = &body;
  error_ = nullptr;
  arrived_ = done_ = 0;
  restart_ = true;
  auto* const outer = std::exchange(machine, this);
  running_ = pick();
  leave(main_, threads_[static_cast<std::size_t>(running_)].context, false);
  machine = outer;
  if (error_ != nullptr) std::rethrow_exception(error_);
  for (std::size_t i = 0; i < canary; ++i) {
    if (shared_.get()[shared_bytes_ + i] != std::byte{0xa5}) fail("a write behind shared memory");
  }
}

/// What ThreadBlock asks of a GPU.
struct Lanes {
  static int thread() { return machine->running(); }
  static int threads() { return machine->threads(); }
  static void sync(fsdp::SyncSite site) { machine->sync(site); }
  static void sync_warp(fsdp::SyncSite site) { machine->sync_warp(site); }
  template <class T>
  static T shuffle_xor(T value, int mask) {
    struct {
      T given, got;
    } both{value, value};
    machine->collective("shuffle_xor", mask, both, [mask](auto& lanes) {
      for (std::size_t i = 0; i < 32; ++i) lanes[i]->got = lanes[i ^ static_cast<std::size_t>(mask)]->given;
    });
    return both.got;
  }
  static std::byte* shared() { return machine->shared(); }
};

/// Runs every index of a kernel in emulated thread blocks, one block after another.
/// @throws Failure, and what the kernel throws
template <class Kernel, class... Args>
void launch(Options const& options, std::int64_t blocks, Args... args) {
  Machine block(fsdp::cuda::detail::threads_per_block<Kernel>, fsdp::cuda::detail::shared_bytes_per_block<Kernel>,
                options);
  std::int64_t const grid = std::min(blocks, options.grid);
  for (std::int64_t i = 0; i < grid; ++i) {
    std::int64_t const first = options.schedule == Schedule::reverse ? grid - 1 - i : i;
    block.run([&] { fsdp::cuda::run_indices<Lanes, Kernel>(first, grid, blocks, args...); });
  }
}

/// A device that runs kernels so, at once.
struct Device : kernel_test::LoopDevice {
  static constexpr std::string_view name = "emulated";
  Options options;

  template <class Kernel, class... Args>
  void launch(Stream&, std::int64_t blocks, Kernel, Args... args) const {
    emulated::launch<Kernel>(options, blocks, args...);
  }
};
static_assert(fsdp::Device<Device>);

}  // namespace emulated
