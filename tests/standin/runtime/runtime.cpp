// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/runtime/runtime.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "tests/standin/runtime/state.hpp"

namespace standin {

/// Writes how often each function was called to the file that FSDP_STANDIN_COUNTS names.
static void write_counts();

namespace {

std::atomic<Handler> handler{nullptr};
thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local Counts* calls_of_this_thread = nullptr;  // the runtime's, which is never destroyed

/// Whether a function of CUDA's makes a context on the device that is current. Those that tell what devices there are
/// do not; cudaSetDevice makes one on the device that it chooses.
bool needs_context(std::string_view function) {
  constexpr std::array without{
      "cudaGetDeviceCount",     "cudaGetDevice",           "cudaSetDevice",
      "cudaDriverGetVersion",   "cudaRuntimeGetVersion",   "cudaGetDeviceProperties",
      "cudaDeviceGetAttribute", "cudaDeviceCanAccessPeer", "cudaThreadExchangeStreamCaptureMode",
      "cudaGetLastError",       "cudaPeekAtLastError"};
  return function.substr(0, 4) == "cuda" && std::find(without.begin(), without.end(), function) == without.end();
}
void make_context_locked(Runtime& runtime) {
  auto const device = static_cast<std::size_t>(device_of_thread);
  if (device < runtime.devices.size()) runtime.devices[device].context = true;
}

std::uint64_t from_environment(char const* name, std::uint64_t otherwise) {
  char const* const text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  auto const value = std::strtoull(text, &end, 10);
  if (*end == 0) return value;
  std::fprintf(stderr, "standin: %s is '%s'; it must be a number\n", name, text);
  std::abort();
}

/// "DEVICE:OPERATION" of FSDP_STANDIN_FAIL.
void read_failure(std::vector<DeviceState>& devices) {
  char const* const text = std::getenv("FSDP_STANDIN_FAIL");
  if (text == nullptr || *text == 0) return;
  std::size_t device = 0;
  unsigned long operation = 0;
  int read = 0;
  if (std::sscanf(text, "%zu:%lu%n", &device, &operation, &read) == 2 && text[read] == 0 && operation > 0 &&
      device < devices.size()) {
    devices[device].fails_at = operation;
    return;
  }
  std::fprintf(stderr, "standin: FSDP_STANDIN_FAIL is '%s'; it must be DEVICE:OPERATION, the first of %zu devices\n",
               text, devices.size());
  std::abort();
}

}  // namespace

Runtime::Runtime()
    : devices(from_environment("FSDP_STANDIN_DEVICES", 1)),
      memory_bytes(from_environment("FSDP_STANDIN_MEMORY", std::uint64_t{16} << 30)),
      seed(from_environment("FSDP_STANDIN_SEED", 0)),
      delay_us(static_cast<std::int64_t>(from_environment("FSDP_STANDIN_DELAY_US", 0))),
      no_favours(from_environment("FSDP_STANDIN_NO_FAVOURS", 0) != 0) {
  read_failure(devices);
  if (char const* const name = std::getenv("FSDP_STANDIN_NAME"); name != nullptr) device_name = name;
  std::atexit(list_leaks);
  if (std::getenv("FSDP_STANDIN_COUNTS") != nullptr) std::atexit(write_counts);
}

Runtime& Runtime::instance() {
  static auto& runtime = *new Runtime;  // streams still run while the process ends
  return runtime;
}

void count_locked(Runtime& runtime, std::string_view what) {
  if (calls_of_this_thread == nullptr) calls_of_this_thread = &runtime.calls_of_threads.emplace_back();
  ++runtime.calls[what];
  ++(*calls_of_this_thread)[what];
}

Call::Call(std::string_view name) : runtime(Runtime::instance()), lock(runtime.mutex) {
  count_locked(runtime, name);
  if (needs_context(name)) make_context_locked(runtime);
}

cudaError_t Call::result(cudaError_t status, int device) {
  if (device >= 0 && device < static_cast<int>(runtime.devices.size())) {
    auto const sticky = runtime.devices[static_cast<std::size_t>(device)].error;
    if (sticky != cudaSuccess) status = sticky;
  }
  if (status != cudaSuccess) last_error = status;
  return status;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) {
  device_of_thread = device;
  make_context_locked(Runtime::instance());
}

void use_current_device() {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  make_context_locked(runtime);
}
bool has_context(int device) {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  return runtime.devices.at(static_cast<std::size_t>(device)).context;
}

void report(std::string_view rule, std::string const& text) {
  if (auto* const taken = handler.load()) return taken(rule, text);
  std::fprintf(stderr, "standin: %.*s: %s\n", static_cast<int>(rule.size()), rule.data(), text.c_str());
  std::abort();
}
void report(Call& call, std::string_view rule, std::string const& text) {
  call.lock.unlock();
  report(rule, text);
  call.lock.lock();
}
Handler set_handler(Handler next) { return handler.exchange(next); }

void fail_device(int device, cudaError_t error) {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  fail_device_locked(runtime, device, error);
}
void fail_device_locked(Runtime& runtime, int device, cudaError_t error) {
  runtime.devices.at(static_cast<std::size_t>(device)).error = error;
  for (auto* const stream : runtime.streams) wake_locked(*stream);
  runtime.host_changed.notify_all();
}

std::int64_t calls(std::string_view function) {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  auto const found = runtime.calls.find(function);
  return found == runtime.calls.end() ? 0 : found->second;
}
std::int64_t synchronizations() { return calls(host_waits); }
Counts calls_of_thread() {
  Unseen const unseen;
  std::lock_guard const lock{Runtime::instance().mutex};
  return calls_of_this_thread == nullptr ? Counts() : *calls_of_this_thread;
}
void count_call(std::string_view function) {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  count_locked(runtime, function);
}
Allocated allocated() {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  Allocated sum{};
  for (auto const& [begin, allocation] : runtime.memory) {
    auto const bytes = static_cast<std::int64_t>(allocation->region.bytes);
    bool const device = allocation->region.kind == MemoryKind::device;
    (device ? sum.device : sum.pinned) += 1;
    (device ? sum.device_bytes : sum.pinned_bytes) += bytes;
  }
  return sum;
}
std::int64_t handles() {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  return static_cast<std::int64_t>(runtime.streams.size() + runtime.events.size());
}

void release([[maybe_unused]] void* tag) {
#if STANDIN_TSAN
  __tsan_release(tag);
#endif
}
void acquire([[maybe_unused]] void* tag) {
#if STANDIN_TSAN
  __tsan_acquire(tag);
#endif
}

void write_counts() {
  auto& runtime = Runtime::instance();
  Unseen const unseen;
  std::lock_guard const lock{runtime.mutex};
  char const* const path = std::getenv("FSDP_STANDIN_COUNTS");
  auto* const file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "standin: FSDP_STANDIN_COUNTS: %s cannot be written\n", path);
    return;
  }
  for (auto const& [name, count] : runtime.calls)
    std::fprintf(file, "%lld %.*s\n", static_cast<long long>(count), static_cast<int>(name.size()), name.data());
  std::fclose(file);
}

void list_leaks() {
  auto& runtime = Runtime::instance();
  Unseen const unseen;
  std::lock_guard const lock{runtime.mutex};
  for (auto const& [begin, allocation] : runtime.memory)
    std::fprintf(stderr, "standin: never freed: %s\n", text_of(allocation->region).c_str());
  for (auto* const stream : runtime.streams)
    std::fprintf(stderr, "standin: never destroyed: %s\n", text_of(stream).c_str());
  if (!runtime.events.empty()) std::fprintf(stderr, "standin: never destroyed: %zu events\n", runtime.events.size());
}

std::string hex(void const* address) {
  char text[32];
  std::snprintf(text, sizeof text, "%p", address);
  return text;
}
std::string text_of(Region const& region) {
  return std::to_string(region.bytes) + " bytes of " +
         (region.kind == MemoryKind::device ? "device " + std::to_string(region.device) : "pinned memory") + " at " +
         hex(region.begin);
}
std::string text_of(cudaStream_t stream) {
  return "stream " + std::to_string(stream->number) + " of device " + std::to_string(stream->device);
}

}  // namespace standin

using standin::Call;

extern "C" {

cudaError_t CUDARTAPI cudaGetLastError() {
  Call call("cudaGetLastError");
  auto const sticky = call.result(cudaSuccess, standin::current_device());
  auto const error = standin::last_error;
  standin::last_error = cudaSuccess;
  return sticky != cudaSuccess ? sticky : error;
}
cudaError_t CUDARTAPI cudaPeekAtLastError() {
  Call call("cudaPeekAtLastError");
  auto const sticky = call.result(cudaSuccess, standin::current_device());
  return sticky != cudaSuccess ? sticky : standin::last_error;
}

#define STANDIN_ERRORS(X)                                                     \
  X(cudaSuccess, "no error")                                                  \
  X(cudaErrorInvalidValue, "invalid argument")                                \
  X(cudaErrorMemoryAllocation, "out of memory")                               \
  X(cudaErrorInitializationError, "initialization error")                     \
  X(cudaErrorCudartUnloading, "driver shutting down")                         \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")          \
  X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")     \
  X(cudaErrorInvalidDeviceFunction, "invalid device function")                \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                  \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                         \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                \
  X(cudaErrorNotReady, "device not ready")                                    \
  X(cudaErrorIllegalAddress, "an illegal memory access was encountered")      \
  X(cudaErrorLaunchOutOfResources, "too many resources requested for launch") \
  X(cudaErrorLaunchTimeout, "the launch timed out and was terminated")        \
  X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")      \
  X(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")        \
  X(cudaErrorPeerAccessUnsupported, "peer access is not supported")           \
  X(cudaErrorAssert, "device-side assert triggered")                          \
  X(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered")         \
  X(cudaErrorLaunchFailure, "unspecified launch failure")                     \
  X(cudaErrorNotSupported, "operation not supported")                         \
  X(cudaErrorUnknown, "unknown error")

char const* CUDARTAPI cudaGetErrorName(cudaError_t error) {
#define STANDIN_NAME(code, words) \
  if (error == code) return #code;
  STANDIN_ERRORS(STANDIN_NAME)
#undef STANDIN_NAME
  return "unrecognized error code";
}
char const* CUDARTAPI cudaGetErrorString(cudaError_t error) {
#define STANDIN_WORDS(code, words) \
  if (error == code) return words;
  STANDIN_ERRORS(STANDIN_WORDS)
#undef STANDIN_WORDS
  return "unrecognized error code";
}

}  // extern "C"
