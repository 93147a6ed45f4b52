// SPDX-License-Identifier: Apache-2.0
// Runs CUDA thread blocks on the host, a block at a time: threads are fibers, and a schedule says which runs next.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/cuda/block.hpp"
#include "tests/support/emulated_options.hpp"
#include "tests/support/fiber.hpp"

namespace emulated {

class Machine;
namespace detail {
inline constinit thread_local Machine* machine = nullptr;
}
/// The block whose fibers run on the calling thread. ThreadSanitizer does not see that streams may share one.
EMULATED_UNSEEN inline Machine& machine() { return *detail::machine; }

/// [Note: Rows that are read together]
/// ldmatrix hands a row that one lane names to other lanes. A shuffle and a product bring lanes together too, but order
/// no memory: between such a read and a lane that overwrites the row there must be sync_warp or sync. Here a warp's
/// reads are all done when its last lane comes, so a missing barrier changes no result; the machine keeps what was
/// read, until the next barrier, and compares.

/// The threads of one block, and its shared memory.
class Machine {
 public:
  Machine(int threads, std::size_t shared_bytes, Options const& options)
      : options_(options),
        random_(static_cast<std::minstd_rand::result_type>(options.seed)),
        threads_(static_cast<std::size_t>(threads)),
        warps_(threads_.size() / 32),
        order_(threads_.size()),
        shared_bytes_(shared_bytes),
        shared_(static_cast<std::byte*>(::operator new (shared_bytes, std::align_val_t{128}))) {
    if (threads < 32 || threads > 1024 || threads % 32 != 0) fail<Failure>("a block of {} threads", threads);
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    if (is(Schedule::reverse) || is(Schedule::greedy_reverse)) std::reverse(order_.begin(), order_.end());
    std::memset(shared(), 0xff, shared_bytes);  // NaN in every type
    for (std::size_t i = 0; i < threads_.size(); ++i) {
      threads_[i].context.prepare(options.stacks != nullptr ? *options.stacks : Stacks::own(), i, &Machine::enter);
    }
  }
  Machine(Machine const&) = delete;
  Machine& operator=(Machine const&) = delete;

  /// Runs `body` in every thread, once.
  /// @throws Failure, and what a thread throws
  void run(std::function<void()> const& body) {
    body_ = &body;
    auto* const outer = exchange_machine(this);
    running_ = pick();
    main_.leave_for(self().context);
    static_cast<void>(exchange_machine(outer));
    if (error_ == nullptr) return;
    for (auto& thread : threads_) thread.context.unpoison(Stacks::stack_bytes);  // frames that nobody will leave
    std::rethrow_exception(error_);
  }

  int running() const { return static_cast<int>(running_); }
  int threads() const { return static_cast<int>(threads_.size()); }
  std::byte* shared() const { return shared_.get(); }

  void sync(fsdp::SyncSite site) {
    if (dropped(site)) return;
    if (arrived_ > 0 && !same(site, site_)) {
      fail<Failure>("thread {} reaches barrier {} while others wait at {}", running_, text(site), text(site_));
    }
    site_ = site;
    self().at = "barrier";
    self().ready = false;
    if (++arrived_ == threads_.size()) {
      arrived_ = 0;
      expect_unchanged_reads();
      for (auto& thread : threads_) thread.ready = true;
      restart_ = true;
    }
    suspend();
  }
  void sync_warp(fsdp::SyncSite site) {
    int nothing = 0;
    if (!dropped(site))
      collective(
          "sync_warp", site.line, nothing, [this](auto&) { expect_unchanged_reads(warps_[running_ / 32]); }, site.file);
  }

  /// A row of 16 bytes that the running warp's lanes have read together. See [Note: Rows that are read together].
  void note_read(void const* row) {
    Read read{row, {}};
    std::memcpy(read.content.data(), row, read.content.size());
    warps_[running_ / 32].reads.push_back(read);
  }

  /// An operation that all lanes of a warp reach together: the last one runs `complete` on everybody's data.
  /// @param file  of a barrier, whose line is the argument
  template <class Data, class Complete>
  void collective(char const* operation, int argument, Data& data, Complete complete, char const* file = "") {
    auto& warp = warps_[running_ / 32];
    if (warp.arrived == 0) {
      warp.operation = operation;
      warp.argument = {file, argument};
    } else if (!same(warp.argument, {file, argument}) ||
               (warp.operation != operation && std::strcmp(warp.operation, operation) != 0)) {
      fail<Failure>("thread {} reaches {} ({}) while its warp waits at {} ({})", running_, operation,
                    text({file, argument}), warp.operation, text(warp.argument));
    }
    warp.data[running_ % 32] = &data;
    if (++warp.arrived < 32) {
      self().at = operation;
      self().ready = false;
      return suspend();
    }
    std::array<Data*, 32> lanes;
    for (std::size_t i = 0; i < 32; ++i) lanes[i] = static_cast<Data*>(warp.data[i]);
    complete(lanes);
    warp.arrived = 0;
    for (std::size_t i = 0; i < 32; ++i) threads_[running_ / 32 * 32 + i].ready = true;
  }

  /// @throws Failure unless [place, place + bytes) is shared memory, aligned to 16
  void expect_shared(void const* place, std::size_t bytes, char const* operation) const {
    auto const offset = reinterpret_cast<std::uintptr_t>(place) - reinterpret_cast<std::uintptr_t>(shared());
    if (offset % 16 != 0) fail<Failure>("thread {}: {} at an address that is not aligned to 16", running_, operation);
    if (offset > shared_bytes_ || shared_bytes_ - offset < bytes) {
      fail<Failure>("thread {}: {} outside shared memory", running_, operation);
    }
  }

  // cp.async of the running thread: null copies zeros. What is overwritten is lost at once; the data come at the wait.
  void copy_async(void* to, void const* from) {
    expect_shared(to, 16, "cp.async");
    if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0)
      fail<Failure>("thread {}: cp.async from off 16 bytes", running_);
    std::memset(to, 0xff, 16);
    self().copies.push_back({to, from, self().groups});
  }
  void commit() { ++self().groups; }
  void wait(std::int64_t pending) {
    auto& copies = self().copies;
    auto copy = copies.begin();
    for (; copy != copies.end() && copy->group + pending < self().groups; ++copy) {
      static constexpr std::byte zeros[16] = {};
      std::memcpy(copy->to, copy->from == nullptr ? &zeros[0] : copy->from, 16);
    }
    copies.erase(copies.begin(), copy);
  }

 private:
  struct Copy {
    void* to;
    void const* from;
    std::int64_t group;
  };
  struct Thread {
    Context context;
    bool ready = true;    ///< can run
    char const* at = "";  ///< what it waits for
    std::vector<Copy> copies;
    std::int64_t groups = 0;  ///< committed so far
  };
  struct Read {
    void const* row;
    std::array<std::byte, 16> content;
  };
  struct Warp {
    std::vector<Read> reads;  ///< of shared memory by all lanes together, since the last barrier
    int arrived = 0;          ///< at the collective that its lanes wait in
    char const* operation = nullptr;
    fsdp::SyncSite argument;  ///< a number alone has no file
    std::array<void*, 32> data{};
  };
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{128}); }
  };

  bool is(Schedule schedule) const { return options_.schedule == schedule; }
  Thread& self() { return threads_[running_]; }
  bool dropped(fsdp::SyncSite const& site) const {
    if (options_.met != nullptr) options_.met->insert(site);
    if (!options_.drop || !same(site, *options_.drop)) return false;
    if (options_.dropped != nullptr) ++*options_.dropped;
    return true;
  }

  /// @throws Failure if rows that were read together have changed since; forgets them otherwise
  void expect_unchanged_reads(Warp& warp) {
    for (auto const& read : warp.reads) {
      if (std::memcmp(read.row, read.content.data(), read.content.size()) == 0) continue;
      fail<Failure>("rows that warp {} read with ldmatrix were overwritten without a barrier in between",
                    &warp - warps_.data());
    }
    warp.reads.clear();
  }
  void expect_unchanged_reads() {
    for (auto& warp : warps_) expect_unchanged_reads(warp);
  }

  /// The thread that runs next, by the schedule.
  std::size_t pick() {
    std::size_t const count = order_.size();
    bool const restart = std::exchange(restart_, false);
    if (!restart && (is(Schedule::greedy_forward) || is(Schedule::greedy_reverse))) {
      for (std::size_t k = 1; k <= 32; ++k) {  // places of the same warp
        std::size_t const place = place_ / 32 * 32 + (place_ + k) % 32;
        if (threads_[order_[place]].ready) return order_[place_ = place];
      }
      place_ = count - 1;
    }
    if (restart || place_ + 1 == count) {
      place_ = count - 1;
      if (is(Schedule::shuffled)) std::shuffle(order_.begin(), order_.end(), random_);
    }
    for (std::size_t k = 1; k <= count; ++k) {
      std::size_t const place = place_ + k < count ? place_ + k : place_ + k - count;
      if (threads_[order_[place]].ready) return order_[place_ = place];
    }
    std::map<std::string, int> waiting;
    for (auto const& thread : threads_) {
      bool const barrier = std::string_view(thread.at) == "barrier";
      ++waiting[barrier ? "at barrier " + text(site_) : *thread.at == 0 ? "done" : "in " + std::string(thread.at)];
    }
    std::string list;
    for (auto const& [at, threads] : waiting) list += fsdp::formatted("; {} threads {}", threads, at);
    fail<Failure>("no thread can go on{}", list);
  }

  void suspend() {
    auto& thread = self();
    running_ = pick();
    if (&thread != &self()) thread.context.leave_for(self().context);
    thread.at = "";
  }

  EMULATED_UNSEEN static Machine* exchange_machine(Machine* next) {
    auto* const before = detail::machine;
    detail::machine = next;
    return before;
  }

  /// Where every fiber begins and ends.
  EMULATED_UNSEEN static void enter() {
    Machine& block = machine();
#if defined(EMULATED_ASAN)
    void const* stack = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (block.main_.stack == nullptr) {
      block.main_.stack = static_cast<std::byte*>(const_cast<void*>(stack));
      block.main_.bytes = bytes;
    }
#endif
    auto& own = block.self();
    Context const* next = &block.main_;
    try {
      (*block.body_)();
      own.ready = false;
      if (++block.done_ < block.threads_.size()) {
        block.running_ = block.pick();
        next = &block.self().context;
      } else {
        block.expect_unchanged_reads();
      }
    } catch (...) {
      block.error_ = std::current_exception();
    }
    own.context.leave_for(*next, true);
  }

  Options options_;
  std::minstd_rand random_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::size_t> order_;  ///< of threads, in the schedule
  std::size_t shared_bytes_;
  std::unique_ptr<std::byte, Free> shared_;
  Context main_;
  std::function<void()> const* body_ = nullptr;
  std::exception_ptr error_;
  fsdp::SyncSite site_{};                             ///< that threads wait at
  std::size_t running_ = 0, arrived_ = 0, done_ = 0;  ///< thread; threads at the barrier; threads that have ended
  std::size_t place_ = 0;                             ///< of the running thread in the order
  bool restart_ = true;                               ///< the schedule begins anew
};

/// Implements the functions that ThreadBlock asks of a GPU.
struct Lanes {
  static int thread() { return machine().running(); }
  static int threads() { return machine().threads(); }
  static void sync(fsdp::SyncSite site) { machine().sync(site); }
  static void sync_warp(fsdp::SyncSite site) { machine().sync_warp(site); }
  template <class T>
  static T shuffle_xor(T value, int mask) {
    struct {
      T given, got;
    } both{value, value};
    machine().collective("shuffle_xor", mask, both, [mask](auto& lanes) {
      for (std::size_t i = 0; i < 32; ++i) lanes[i]->got = lanes[i ^ static_cast<std::size_t>(mask)]->given;
    });
    return both.got;
  }
  static std::byte* shared() { return machine().shared(); }
};

/// Runs every index of a kernel in emulated thread blocks, one block after another.
/// @throws Failure, and what the kernel throws
template <class Kernel, class... Args>
void launch(Options const& options, std::int64_t blocks, Args... args) {
  namespace kernel = fsdp::cuda::detail;
  for (std::int64_t i = 0; i < blocks; ++i) {
    std::int64_t const index = options.schedule == Schedule::reverse ? blocks - 1 - i : i;
    Machine block(kernel::threads_per_block<Kernel>, kernel::shared_bytes_per_block<Kernel>, options);
    block.run([&] { Kernel{}(fsdp::cuda::ThreadBlock<Lanes>{}, index, args...); });
  }
}

}  // namespace emulated
