// SPDX-License-Identifier: Apache-2.0
// Streams of the stand-in, and what runs them.
#include <algorithm>
#include <chrono>
#include <exception>
#include <random>
#include <thread>

#include "tests/standin/runtime/fiber_of_stream.hpp"
#include "tests/standin/runtime/grid.hpp"
#include "tests/standin/runtime/state.hpp"

namespace standin {

namespace {

using Clock = std::chrono::steady_clock;

/// Does an operation's work, or goes on with it. @return whether it is done
bool work_on(CUstream_st& stream, Operation& operation) {
  if (!operation.work) return true;
#if !STANDIN_TSAN
  RunningOperation const running(operation);
#endif
  open_device_memory();
  bool done = true;
  try {
    done = operation.work();
  } catch (BlockFailure const& failure) {
    report(rule("kernel_failure"), operation.what + ": " + failure.what());
  } catch (std::exception const& error) {
    report(rule("throwing_work"), operation.what + " on " + text_of(&stream) + ": " + error.what());
  }
  close_device_memory();
  return done;
}

/// The stream has come to its first operation: its device fails if that is the one to fail at.
void fail_if_told(Runtime& runtime, CUstream_st const& stream) {
  if (stream.queue.front()->fails) fail_device_locked(runtime, stream.device, cudaErrorLaunchFailure);
}

bool device_failed(Runtime const& runtime, CUstream_st const& stream) {
  return runtime.devices[static_cast<std::size_t>(stream.device)].error != cudaSuccess;
}

/// Whether the first operation may run; else the stream is woken when it may.
bool is_ready(Runtime const& runtime, CUstream_st& stream) {
  auto& operation = *stream.queue.front();
  if (operation.awaits == nullptr || operation.awaits->reached || device_failed(runtime, stream)) return true;
  auto& waiting = operation.awaits->waiting;
  if (std::find(waiting.begin(), waiting.end(), &stream) == waiting.end()) waiting.push_back(&stream);
  return false;
}

/// Takes the first operation off the queue, done. @return it, to be destroyed without the mutex
std::unique_ptr<Operation> finish(Runtime& runtime, CUstream_st& stream) {
  auto operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  for (auto const& used : operation->uses) --used->pending;
  if (auto const& record = operation->reaches; record != nullptr) {
    record->reached = true;
    record->at = Clock::now();
    for (auto* const waiting : record->waiting) wake_locked(*waiting);
    record->waiting.clear();
    runtime.host_changed.notify_all();
  }
  return operation;
}

/// How long work that waits for a peer is left alone: longer and longer, so that the peer can run.
Clock::duration pause_after(int attempts) {
  return std::chrono::microseconds{attempts < 20 ? 0 : std::min(1000, attempts)};
}

#if STANDIN_TSAN

/// The thread that runs all streams.
class Executor {
 public:
  explicit Executor(Runtime& runtime) : runtime_(runtime) {
    std::thread([this] { run(); }).detach();
  }
  void wake() { changed_.notify_all(); }

 private:
  void run() {
    Unseen const unseen;
    own_ = __tsan_get_current_fiber();
    std::minstd_rand random(static_cast<std::minstd_rand::result_type>(runtime_.seed + 1));
    std::unique_lock lock(runtime_.mutex);
    for (int idle = 0;;) {
      auto const streams = candidates();
      bool some_wait = false, progress = false;
      for (std::size_t i = 0, first = streams.empty() ? 0 : random() % streams.size(); i < streams.size(); ++i) {
        auto& stream = *streams[(first + i) % streams.size()];
        if (end_if_destroyed(stream) || stream.queue.empty() || !is_ready(runtime_, stream)) continue;
        fail_if_told(runtime_, stream);
        bool const skipped = device_failed(runtime_, stream);
        lock.unlock();
        bool const done = run_on_fiber(stream, skipped);
        lock.lock();
        if (done) {
          auto gone = finish(runtime_, stream);
          lock.unlock();
          gone.reset();  // unseen: what the last owner of something shared does orders no streams
          lock.lock();
        }
        (done ? progress : some_wait) = true;
      }
      idle = progress ? 0 : idle + 1;
      if (progress) continue;
      if (some_wait) {
        changed_.wait_for(lock, pause_after(idle));
      } else if (candidates().empty() || idle > 1) {
        changed_.wait(lock, [&] { return anything_to_do(); });
      }
    }
  }

  std::vector<CUstream_st*> candidates() const {
    std::vector<CUstream_st*> result;
    for (auto const& stream : runtime_.all_streams) {
      if (stream->fiber != nullptr && (!stream->queue.empty() || stream->destroyed)) result.push_back(stream.get());
    }
    return result;
  }
  bool anything_to_do() const {
    for (auto* const stream : candidates()) {
      if (stream->queue.empty() || is_ready(runtime_, *stream)) return true;
    }
    return false;
  }
  static bool end_if_destroyed(CUstream_st& stream) {
    if (!stream.destroyed || !stream.queue.empty()) return false;
    stream.fiber.reset();
    return true;
  }

  /// Not for ThreadSanitizer, whose stack of calls changes within.
  [[gnu::no_sanitize("thread"), gnu::noinline]] bool run_on_fiber(CUstream_st& stream, bool skipped) {
    running_ = &stream;
    executor_ = this;
    skipped_ = skipped;
    auto& fiber = *stream.fiber;
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
    context_.leave_for(fiber.context);
    return fiber.done;
  }
  [[gnu::no_sanitize("thread"), gnu::noinline]] static void back_to_executor() {
    auto& executor = *executor_;
    auto& fiber = *executor.running_->fiber;
    __tsan_switch_to_fiber(executor.own_, __tsan_switch_to_fiber_no_sync);
    fiber.context.leave_for(executor.context_);
  }
  [[gnu::no_sanitize("thread"), gnu::noinline]] static CUstream_st& running() { return *executor_->running_; }
  [[gnu::no_sanitize("thread"), gnu::noinline]] static bool skips() { return executor_->skipped_; }
  [[gnu::no_sanitize("thread"), gnu::noinline]] static void set_done(Fiber& fiber, bool done) { fiber.done = done; }

  /// A fiber: operation after operation of its stream. Orders are told here and nowhere else.
  static void run_stream() {
    for (;;) {
      auto& stream = running();
      auto& operation = *stream.queue.front();
      acquire(&operation);
      if (operation.awaits != nullptr) acquire(operation.awaits.get());
      bool const done = skips() || work_on(stream, operation);
      if (done && operation.reaches != nullptr) release(operation.reaches.get());
      set_done(*stream.fiber, done);
      back_to_executor();
    }
  }

 public:
  static void start(CUstream_st& stream) { stream.fiber = std::make_shared<Fiber>(run_stream); }

 private:
  static inline Executor* executor_ = nullptr;
  Runtime& runtime_;
  std::condition_variable changed_;
  CUstream_st* running_ = nullptr;
  bool skipped_ = false;
  void* own_ = nullptr;
  emulated::Context context_;
};

Executor& executor() {
  static auto& only = *new Executor(Runtime::instance());
  return only;
}

#else

/// A stream's thread. Ends when the stream was destroyed and is done.
void run(Runtime& runtime, CUstream_st& stream) {
  std::mt19937_64 random(runtime.seed + stream.number);
  std::uniform_int_distribution<std::int64_t> delay(0, runtime.delay_us);
  std::unique_lock lock(runtime.mutex);
  for (;;) {
    stream.changed.wait(lock, [&] { return stream.queue.empty() ? stream.destroyed : is_ready(runtime, stream); });
    if (stream.queue.empty()) return;
    auto& operation = *stream.queue.front();
    fail_if_told(runtime, stream);
    for (int attempts = 0; !device_failed(runtime, stream); ++attempts) {
      lock.unlock();
      if (attempts == 0 && runtime.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds{delay(random)});
      bool const done = work_on(stream, operation);
      if (!done) std::this_thread::yield();
      lock.lock();
      if (done) break;
      if (auto const pause = pause_after(attempts); pause.count() > 0) stream.changed.wait_for(lock, pause);
    }
    auto gone = finish(runtime, stream);
    lock.unlock();
    gone.reset();
    lock.lock();
  }
}

#endif

}  // namespace

void start_locked(CUstream_st& stream) {
#if STANDIN_TSAN
  executor();
  Executor::start(stream);
#else
  std::thread([&runtime = Runtime::instance(), &stream] { run(runtime, stream); }).detach();
#endif
}
void wake_locked([[maybe_unused]] CUstream_st& stream) {
#if STANDIN_TSAN
  executor().wake();
#else
  stream.changed.notify_all();
#endif
}

bool usable(Call& call, cudaStream_t stream, std::string_view function) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    report(call, rule("default_stream"), std::string(function) + " names the default stream");
    return false;
  }
  if (call.runtime.streams.count(stream) != 0) return true;
  bool const known = std::any_of(call.runtime.all_streams.begin(), call.runtime.all_streams.end(),
                                 [&](auto const& own) { return own.get() == stream; });
  report(call, rule("dead_handle"),
         std::string(function) + (known ? ": " + text_of(stream) + " was destroyed" : ": this is no stream"));
  return false;
}

void push_locked(cudaStream_t stream, std::unique_ptr<Operation> operation) {
  for (auto const& used : operation->uses) ++used->pending;
  auto& device = Runtime::instance().devices[static_cast<std::size_t>(stream->device)];
  operation->fails = ++device.operations == device.fails_at;
  release_unseen(operation.get());
  stream->queue.push_back(std::move(operation));
  wake_locked(*stream);
}

RecordPointer record_locked(cudaStream_t stream, std::string what) {
  auto operation = std::make_unique<Operation>();
  operation->what = std::move(what);
  operation->reaches = std::make_shared<Record>();
  operation->reaches->device = stream->device;
  auto record = operation->reaches;
  push_locked(stream, std::move(operation));
  return record;
}

/// Waits, uncounted.
static void wait_quietly(Call& call, std::vector<RecordPointer> const& records) {
  for (auto const& record : records) {
    auto const& device = call.runtime.devices[static_cast<std::size_t>(record->device)];
    call.runtime.host_changed.wait(call.lock, [&] { return record->reached || device.error != cudaSuccess; });
    if (record->reached) acquire_unseen(record.get());
  }
}
void wait_on_host(Call& call, std::vector<RecordPointer> const& records) {
  count_locked(call.runtime, host_waits);
  wait_quietly(call, records);
}
void wait_on_host(Call& call, RecordPointer const& record) { wait_on_host(call, std::vector<RecordPointer>{record}); }

void wait_for_device(Call& call, int device, std::string const& what) {
  std::vector<RecordPointer> records;
  for (auto const& stream : call.runtime.all_streams) {
    if (stream->device == device && (!stream->destroyed || !stream->queue.empty()))
      records.push_back(record_locked(stream.get(), what));
  }
  wait_on_host(call, records);
}

cudaError_t enqueue(cudaStream_t stream, std::string what, Work work, WorkKind kind) {
  Call call("standin::enqueue");
  if (!usable(call, stream, what)) return call.result(cudaErrorInvalidResourceHandle);
  if (auto const status = call.result(cudaSuccess, stream->device); status != cudaSuccess) return status;
  auto operation = std::make_unique<Operation>();
  operation->what = std::move(what);
  operation->work = std::move(work);
  operation->kind = kind;
  push_locked(stream, std::move(operation));
  return cudaSuccess;
}

int device_of(cudaStream_t stream) {
  Call call("standin::device_of");
  return usable(call, stream, "device_of") ? stream->device : -1;
}

}  // namespace standin

using standin::Call;
using standin::usable;

namespace {

cudaError_t create(std::string_view function, cudaStream_t* made, unsigned flags, int priority) {
  Call call(function);
  int const device = standin::current_device();
  if (made == nullptr || (flags & ~static_cast<unsigned>(cudaStreamNonBlocking)) != 0)
    return call.result(cudaErrorInvalidValue);
  if (call.runtime.devices.empty()) return call.result(cudaErrorNoDevice);
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;
  auto& stream = *call.runtime.all_streams.emplace_back(std::make_unique<CUstream_st>());
  stream.device = device;
  stream.flags = flags;
  stream.priority = priority;
  stream.number = call.runtime.all_streams.size();
  call.runtime.streams.insert(&stream);
  standin::start_locked(stream);
  *made = &stream;
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t* stream) { return create("cudaStreamCreate", stream, 0, 0); }
cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create("cudaStreamCreateWithFlags", stream, flags, 0);
}
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return create("cudaStreamCreateWithPriority", stream, flags, priority);
}

/// Does not wait: what was enqueued still runs (API, cudaStreamDestroy).
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  Call call("cudaStreamDestroy");
  if (!usable(call, stream, "cudaStreamDestroy")) return call.result(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;
  call.runtime.streams.erase(stream);
  standin::wake_locked(*stream);
  return call.result(cudaSuccess, stream->device);
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  Call call("cudaStreamSynchronize");
  if (!usable(call, stream, "cudaStreamSynchronize")) return call.result(cudaErrorInvalidResourceHandle);
  int const device = stream->device;
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;
  standin::wait_on_host(call, standin::record_locked(stream, "cudaStreamSynchronize"));
  return call.result(cudaSuccess, device);
}

cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  Call call("cudaStreamQuery");
  if (!usable(call, stream, "cudaStreamQuery")) return call.result(cudaErrorInvalidResourceHandle);
  if (!stream->queue.empty()) return call.result(cudaErrorNotReady, stream->device);
  // Done, but the caller has yet to see what came before.
  standin::wait_quietly(call, {standin::record_locked(stream, "cudaStreamQuery")});
  return call.result(cudaSuccess, stream->device);
}

cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  Call call("cudaDeviceSynchronize");
  int const device = standin::current_device();
  standin::wait_for_device(call, device, "cudaDeviceSynchronize");
  return call.result(cudaSuccess, device);
}

/// Graphs are not known here: no stream is ever captured.
cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Call call("cudaStreamIsCapturing");
  if (!usable(call, stream, "cudaStreamIsCapturing")) return call.result(cudaErrorInvalidResourceHandle);
  if (status == nullptr) return call.result(cudaErrorInvalidValue);
  *status = cudaStreamCaptureStatusNone;
  return call.result(cudaSuccess, stream->device);
}
cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  Call call("cudaThreadExchangeStreamCaptureMode");
  thread_local cudaStreamCaptureMode own = cudaStreamCaptureModeGlobal;
  if (mode == nullptr) return call.result(cudaErrorInvalidValue);
  std::swap(own, *mode);
  return call.result(cudaSuccess);
}

}  // extern "C"
