// SPDX-License-Identifier: Apache-2.0
// A thread that finds NCCL collectives that fail or do not complete; owners of NCCL communicators, and a macro that
// checks NCCL calls.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/cuda/handles.hpp"
#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl {

namespace detail {

/// Waits while a call on a non-blocking communicator is in progress (an adopted one may be), and gives its result.
inline ncclResult_t settle(ncclResult_t status, ncclComm_t comm) {
  while (status == ncclInProgress && comm != nullptr) {
    std::this_thread::yield();
    if (auto const query = ncclCommGetAsyncError(comm, &status); query != ncclSuccess) return query;
  }
  return status;
}

[[noreturn]] inline void throw_nccl_error(ncclResult_t status, ncclComm_t comm, char const* call, char const* file,
                                          int line) {
  static_cast<void>(cudaGetLastError());
  char const* const last = ncclGetLastError(comm);
  auto* const work = cuda::detail::work_of_failed_device.load();
  fail<VendorError>("{} failed: {}; {} [{}:{}]{}", call, ncclGetErrorString(status), last == nullptr ? "" : last, file,
                    line, work == nullptr ? std::string() : work());
}

}  // namespace detail

struct CommTraits {
  using value_type = ncclComm_t;
  static void destroy(value_type comm) noexcept {
    auto const status = detail::settle(ncclCommDestroy(comm), nullptr);
    if (status != ncclSuccess && status != ncclInProgress)
      cuda::detail::log_failure("ncclCommDestroy", ncclGetErrorString(status));
  }
};
using UniqueComm = cuda::UniqueHandle<CommTraits>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl

/// Throws fsdp::VendorError with the call's text and NCCL's words unless `call` succeeds. `comm` may be null.
#define FSDP_NCCL_CHECK(comm, call)                                                                \
  do {                                                                                             \
    ::ncclResult_t const fsdp_nccl_status = ::fsdp::nccl::detail::settle((call), (comm));          \
    if (fsdp_nccl_status != ::ncclSuccess)                                                         \
      ::fsdp::nccl::detail::throw_nccl_error(fsdp_nccl_status, (comm), #call, __FILE__, __LINE__); \
  } while (false)

namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl {

/// Watches one communicator: its asynchronous errors, and that its collectives and blocking calls end in time. On
/// failure it says which rank waits in what and since when, aborts the communicator, and ends the process: nothing else
/// frees a host thread that waits for a device that waits for a lost peer.
class Watch {
 public:
  using Clock = AwakeClock;

  /// @param who "rank 2 of 8 (cuda:2)"
  Watch(std::string who, int device, std::chrono::milliseconds timeout)
      : who_(std::move(who)), device_(device), timeout_(timeout), thread_([this] { run(); }) {
    std::lock_guard const lock(all().mutex);
    all().watches.push_back(this);
    cuda::detail::work_of_failed_device.store(&undone);
  }
  Watch(Watch const&) = delete;
  Watch& operator=(Watch const&) = delete;
  ~Watch() {
    {
      std::lock_guard const lock(all().mutex);
      all().watches.erase(std::find(all().watches.begin(), all().watches.end(), this));
    }
    {
      auto const lock = enter();
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  /// Names the communicator whose errors are polled; nullptr: none, as before it is made and while it is destroyed.
  void attach(ncclComm_t comm) {
    auto const lock = enter();
    comm_ = comm;
  }

  /// The calling thread is about to block in `operation`, until the object ends. The texts live as long. See [Note:
  /// Aborts and calls]: after a wait for the device, no call of NCCL's follows in the same phase.
  class Phase {
   public:
    /// @param watch may be null: then nothing is watched
    Phase(Watch* watch, comm::CallDescription const& operation) : watch_(watch) {
      if (watch_ == nullptr) return;
      auto const lock = watch_->enter();
      watch_->phases_.push_back({operation, Clock::now()});
    }
    Phase(Phase const&) = delete;
    Phase& operator=(Phase const&) = delete;
    ~Phase() {
      if (watch_ == nullptr) return;
      {
        std::lock_guard const lock(watch_->mutex_);
        watch_->phases_.pop_back();
      }
      static_cast<void>(watch_->enter());
    }

   private:
    Watch* watch_;
  };

  /// Records that the collective was enqueued on `stream`. Nothing is tracked while the stream is captured into a
  /// graph.
  /// @pre the stream's device is current
  void enqueued(cudaStream_t stream, comm::CallDescription operation) {
    auto capture = cudaStreamCaptureStatusNone;
    FSDP_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) return;
    FSDP_CUDA_CHECK(record_behind(stream, operation));
  }

  /// Blocks until every collective that was enqueued is done.
  /// @pre the communicator's device is current, here and in pending(): asking events makes a context on it
  void drain() {
    while (true) {
      auto lock = enter();
      auto const status = forget_completed();
      bool const done = pending_.empty();
      lock.unlock();
      FSDP_CUDA_CHECK(status);
      if (done) return;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  /// The collective in which this rank waits now; "" if nothing is pending.
  std::string pending() {
    auto const lock = enter();
    static_cast<void>(forget_completed());
    if (!phases_.empty()) return describe(phases_.back().operation, Clock::now() - phases_.back().since);
    if (!pending_.empty()) return describe(pending_.front().named(), Clock::now() - pending_.front().since);
    return {};
  }

 private:
  struct Blocked {
    comm::CallDescription operation;
    Clock::time_point since;
  };
  struct Enqueued {
    comm::CallDescription operation;
    Clock::time_point since;  // when it was enqueued, or the one before it was seen to be done
    cuda::UniqueEvent done;
    comm::Text unit, pass;  // of whoever may be gone when the device fails

    comm::CallDescription named() const {
      auto copy = operation;
      copy.label = {unit.view(), pass.view()};
      return copy;
    }
  };

  /// Takes the lock. Once the run is being ended, only the watching thread goes on.
  std::unique_lock<std::mutex> enter() {
    std::unique_lock lock(mutex_);
    while (ending_) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::seconds(1));
      lock.lock();
    }
    return lock;
  }

  /// Drops what is done. An error is the device's: the host thread also gets it from its own calls.
  cudaError_t forget_completed() {
    while (!pending_.empty()) {
      auto const status = cudaEventQuery(pending_.front().done.get());
      if (status != cudaSuccess) {
        static_cast<void>(cudaGetLastError());
        return status == cudaErrorNotReady ? cudaSuccess : status;
      }
      spare_.push_back(std::move(pending_.front().done));
      pending_.pop_front();
      if (!pending_.empty()) pending_.front().since = Clock::now();
    }
    return cudaSuccess;
  }

  /// Makes events spare. They are made many at a time, and only where so many collectives are under way: steps after
  /// the first make none unless the host is further ahead than ever.
  cudaError_t find_events() {
    auto mode = cudaStreamCaptureModeRelaxed;  // queries must not break a capture of another stream
    if (auto const status = cudaThreadExchangeStreamCaptureMode(&mode); status != cudaSuccess) return status;
    static_cast<void>(forget_completed());  // the record reports an error of the device
    if (auto const status = cudaThreadExchangeStreamCaptureMode(&mode); status != cudaSuccess) return status;
    for (auto more = spare_.empty() ? std::max(least_events, pending_.size()) : 0; more > 0; --more) {
      cudaEvent_t made = nullptr;
      if (auto const status = cudaEventCreateWithFlags(&made, cudaEventDisableTiming); status != cudaSuccess)
        return status;
      spare_.emplace_back(made);
    }
    return cudaSuccess;
  }
  /// Records an event behind a collective. Throws nothing: see undone().
  cudaError_t record_behind(cudaStream_t stream, comm::CallDescription const& operation) {
    auto const lock = enter();
    if (spare_.empty()) {
      if (auto const status = find_events(); status != cudaSuccess) return status;
    }
    if (auto const status = cudaEventRecord(spare_.back().get(), stream); status != cudaSuccess) return status;
    pending_.push_back({operation, Clock::now(), std::move(spare_.back()), comm::Text(operation.label.unit),
                        comm::Text(operation.label.pass)});
    spare_.pop_back();
    return cudaSuccess;
  }

  /// The first collective of each watch that was not seen to be done when its device failed. Called while an error is
  /// made into a message: whoever holds a watch's lock makes none.
  static std::string undone() {
    std::string text;
    std::lock_guard const lock(all().mutex);
    for (auto* const watch : all().watches) {
      std::lock_guard const own_lock(watch->mutex_);
      if (watch->forget_completed() == cudaSuccess || watch->pending_.empty()) continue;
      text +=
          formatted("; {}: {} was not known to be complete", watch->who_, watch->pending_.front().named().describe());
    }
    return text;
  }

  std::string describe(comm::CallDescription const& operation, Clock::duration waited) const {
    auto text = comm::waiting_text(who_, operation, waited);
    if (pending_.size() > 1) text += formatted("; {} collectives are enqueued", pending_.size());
    return text;
  }

  /// The reason why the run must end, or "".
  std::string verdict(bool& terminated) {
    static_cast<void>(forget_completed());
    ncclResult_t error = ncclSuccess;
    if (comm_ != nullptr && ncclCommGetAsyncError(comm_, &error) == ncclSuccess && error != ncclSuccess &&
        error != ncclInProgress) {
      char const* const last = ncclGetLastError(comm_);
      auto const where =
          pending_.empty() ? who_ : describe(pending_.front().named(), Clock::now() - pending_.front().since);
      return formatted("{}: NCCL reports: {}; {}", where, ncclGetErrorString(error), last == nullptr ? "" : last);
    }
    bool const sigterm = host::termination_requested();
    auto const now = Clock::now();
    auto const check = [&](comm::CallDescription const& operation, Clock::time_point since) -> std::string {
      if (!sigterm && now - since <= timeout_) return {};
      terminated = sigterm;
      return formatted("{}; {}", describe(operation, now - since), comm::reason_to_end(sigterm));
    };
    if (!phases_.empty()) {
      if (auto text = check(phases_.back().operation, phases_.back().since); !text.empty()) return text;
    }
    if (!pending_.empty()) return check(pending_.front().named(), pending_.front().since);
    return {};
  }

  void run() {
    // A thread that has chosen no device would make a context on the first one.
    if (cudaSetDevice(device_) != cudaSuccess) static_cast<void>(cudaGetLastError());
    // Queries from this thread must not break a graph capture in another.
    auto mode = cudaStreamCaptureModeRelaxed;
    if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) static_cast<void>(cudaGetLastError());
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      wake_.wait_for(lock, std::chrono::milliseconds(100));
      if (stopping_) return;
      bool terminated = false;
      auto const text = verdict(terminated);
      if (text.empty()) continue;
      ending_ = true;
      ending_since_ = !phases_.empty()    ? phases_.back().since
                      : !pending_.empty() ? pending_.front().since
                                          : Clock::now();
      auto const comm = comm_;
      lock.unlock();
      std::fprintf(stderr, "fsdp: %s%s\n", text.c_str(), others_wait().c_str());
      std::fflush(stderr);
      leave_calls();
      end_run(comm, terminated ? host::wait_terminated_exit_code : host::wait_expired_exit_code);
    }
  }

  /// A text of the operations in which other communicators of this rank wait, and whether they wait longer. Called
  /// without the lock: theirs are taken.
  std::string others_wait() {
    std::string text;
    std::lock_guard const lock(all().mutex);
    for (auto* const other : all().watches) {
      if (other == this || other->device_ != device_) continue;
      std::lock_guard const their_lock(other->mutex_);
      if (other->forget_completed() != cudaSuccess || other->pending_.empty()) continue;
      auto const& first = other->pending_.front();
      text += formatted("; this rank also waits {} in {}", first.since < ending_since_ ? "for longer" : "since then",
                        first.named().describe());
    }
    return text;
  }

  /// [Note: Aborts and calls] ncclCommAbort frees the communicator, and lets go whoever waits in NCCL or for the
  /// device. No thread may call NCCL for it any more: none begins a phase, nor passes the end of one, and calls that
  /// end by themselves are given the time to.
  void leave_calls() {
    for (int wait = 0; wait < 100; ++wait) {
      {
        std::lock_guard const lock(mutex_);
        if (phases_.empty()) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  [[noreturn]] static void end_run(ncclComm_t comm, int code) {
    host::detail::giving_up.store(true);  // the abort lets the host go on, with what no collective has written
    static std::atomic<bool> aborted{false};
    if (comm != nullptr) {
      std::thread([comm] {  // it frees this rank's kernels, but may itself wait
        static_cast<void>(ncclCommAbort(comm));
        aborted.store(true);
      })
          .detach();
      for (int wait = 0; wait < 50 && !aborted.load(); ++wait)
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    std::_Exit(code);
  }

  /// The watches of this process.
  struct Register {
    std::mutex mutex;
    std::vector<Watch*> watches;
  };
  static Register& all() {
    static auto& only = *new Register;  // outlives static communicators
    return only;
  }

  static constexpr std::size_t least_events = 64;  // made at once: more than passes over a small model enqueue

  std::string const who_;
  int const device_;
  std::chrono::milliseconds const timeout_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  bool ending_ = false;
  Clock::time_point ending_since_;  // of what this rank waits in while the run is being ended
  ncclComm_t comm_ = nullptr;
  std::vector<Blocked> phases_;
  std::deque<Enqueued> pending_;
  std::vector<cuda::UniqueEvent> spare_;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::nccl
