// SPDX-License-Identifier: Apache-2.0
// State of the stand-in for the CUDA runtime: devices, streams, events, memory. One mutex guards it all; functions
// whose names end in `_locked`, and members without a word of their own, are used with it held.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/standin/runtime/rules.hpp"
#include "tests/standin/runtime/runtime.hpp"
#include "tests/standin/runtime/unseen.hpp"

namespace standin {

/// An allocation. `begin` and the end, rounded up to 256 bytes, lie within whole pages; the page behind is out of
/// bounds.
struct Allocation {
  Region region;
  std::byte* pages = nullptr;
  std::size_t page_bytes = 0;  ///< with the page that is out of bounds
  int pending = 0;             ///< operations enqueued that use it
};
using Allocations = std::vector<std::shared_ptr<Allocation>>;

/// A point in a stream's work.
struct Record {
  bool reached = false;
  int device = 0;
  std::chrono::steady_clock::time_point at;
  std::vector<cudaStream_t> waiting;  ///< streams to wake
};
using RecordPointer = std::shared_ptr<Record>;

/// A task of a stream: it waits, works, and records, in this order; any of them may be missing.
struct Operation {
  std::string what;
  Work work;
  RecordPointer awaits, reaches;
  Allocations uses;
  WorkKind kind = WorkKind::local;
  bool fails = false;  ///< the device fails at it
};

struct Fiber;  // that runs a stream under ThreadSanitizer

}  // namespace standin

/// A stream. What is destroyed stays in memory, so that a late use is recognised.
struct CUstream_st {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t number = 0;  ///< counted over the process, for reports
  bool destroyed = false;
  std::deque<std::unique_ptr<standin::Operation>> queue;  ///< the first one runs
  std::condition_variable changed;
  std::shared_ptr<standin::Fiber> fiber;
  std::chrono::steady_clock::time_point again{};  ///< when work that waits for a peer is called again
};

struct CUevent_st {
  int device = 0;
  bool timed = false;
  bool destroyed = false;
  standin::RecordPointer latest;
};

namespace standin {

struct DeviceState {
  cudaError_t error = cudaSuccess;  ///< sticky
  std::size_t used = 0;             ///< bytes
  std::set<int> peers;              ///< whose memory it may touch
  std::uint64_t operations = 0;     ///< that its streams were given
  std::uint64_t fails_at = 0;       ///< of these; 0: none
  bool context = false;             ///< something was done while it was current
};

struct Runtime {
  std::mutex mutex;
  std::condition_variable host_changed;  ///< a record was reached, or a device failed

  std::vector<DeviceState> devices;
  std::string device_name = "stand-in";
  std::size_t memory_bytes = 0;  ///< of each device
  std::uint64_t seed = 0;
  std::int64_t delay_us = 0;  ///< most that a stream sleeps before an operation
  bool no_favours = false;    ///< calls wait for work only where that is promised

  std::set<cudaStream_t> streams;                         ///< that are not destroyed
  std::vector<std::unique_ptr<CUstream_st>> all_streams;  ///< and those that are
  std::vector<std::unique_ptr<CUevent_st>> all_events;
  std::set<CUevent_st*> events;                                    ///< that are not destroyed
  std::map<std::byte const*, std::shared_ptr<Allocation>> memory;  ///< by first byte
  std::map<std::byte const*, std::byte const*> freed;              ///< pages: begin and end
  std::map<std::pair<int, void const*>, int> shared_limits;  ///< of (device, kernel) that asked for more than 48 KiB
  Counts calls;
  std::deque<Counts> calls_of_threads;  ///< in the order of their first calls

  /// Made by the first call, with what the environment says, and never destroyed.
  static Runtime& instance();

 private:
  Runtime();
};

/// A call of CUDA's: counts it, holds the mutex, hides the bookkeeping from ThreadSanitizer, and remembers the error.
class Call {
 public:
  explicit Call(std::string_view name);
  /// The result of the function. Gives the sticky error of `device`, if there is one, instead of success.
  cudaError_t result(cudaError_t status, int device = -1);

 private:
  Unseen unseen_;

 public:
  Runtime& runtime;
  std::unique_lock<std::mutex> lock;
};

/// Counts for the process and the calling thread.
void count_locked(Runtime& runtime, std::string_view what);

int current_device();
void set_current_device(int device);

/// Reports and returns false unless the stream may be used. Unlocks while it reports.
bool usable(Call& call, cudaStream_t stream, std::string_view function);
bool usable(Call& call, cudaEvent_t event, std::string_view function);
/// standin::report for a caller that holds the mutex.
void report(Call& call, std::string_view rule, std::string const& text);

/// The device's error is sticky from now on; its streams go through what they were given and do nothing of it.
void fail_device_locked(Runtime& runtime, int device, cudaError_t error);

/// Appends to a stream; the caller's accesses until now come before it.
void push_locked(cudaStream_t stream, std::unique_ptr<Operation> operation);
/// A record behind all that the stream was given.
RecordPointer record_locked(cudaStream_t stream, std::string what);
/// Waits until a record is reached or its device fails; then the caller sees what came before the record.
void wait_on_host(Call& call, RecordPointer const& record);
void wait_on_host(Call& call, std::vector<RecordPointer> const& records);
/// The same, behind all that the device's streams were given, those too that are destroyed but not done.
void wait_for_device(Call& call, int device, std::string const& what);
/// Starts what runs a stream.
void start_locked(CUstream_st& stream);
/// Wakes what runs a stream that was destroyed.
void wake_locked(CUstream_st& stream);

/// Where an address lies.
struct Place {
  enum class Kind : unsigned char { allocated, edge, freed, elsewhere } kind = Kind::elsewhere;
  std::shared_ptr<Allocation> allocation;  ///< of allocated memory, and of the bytes and the page at its edges
};
Place place_of(Runtime& runtime, void const* address);
/// Reports an operand that device code may not touch. @return its allocation, or nothing
std::shared_ptr<Allocation> device_operand(Call& call, int device, void const* begin, std::size_t bytes,
                                           std::string_view what);

/// Rights of the calling thread on device memory, where the processor has protection keys. See [Note: Protection keys].
void open_device_memory();
void close_device_memory();
/// Puts pages out of the host's reach.
void protect_device_memory(std::byte* pages, std::size_t bytes);
/// For tests. @return whether the processor, and the system, have protection keys
bool device_memory_is_protected();

/// While it lives, a fault of the calling thread is the operation's.
class [[nodiscard]] RunningOperation {
 public:
  explicit RunningOperation(Operation const& operation);
  ~RunningOperation();
  RunningOperation(RunningOperation const&) = delete;
  RunningOperation& operator=(RunningOperation const&) = delete;
};
/// Has bad accesses named: again and again, for others handle signals too.
void watch_faults();

void list_leaks();
std::string text_of(Region const& region);
std::string text_of(cudaStream_t stream);
std::string hex(void const* address);

}  // namespace standin
