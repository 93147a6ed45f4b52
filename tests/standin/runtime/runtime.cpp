// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/runtime/runtime.hpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "tests/standin/runtime/state.hpp"

namespace standin {

namespace {

std::atomic<Handler> handler{nullptr};
thread_local int device_of_thread = 0;
thread_local cudaError_t last_error = cudaSuccess;

std::uint64_t from_environment(char const* name, std::uint64_t otherwise) {
  char const* const text = std::getenv(name);
  if (text == nullptr || *text == 0) return otherwise;
  char* end = nullptr;
  auto const value = std::strtoull(text, &end, 10);
  if (*end == 0) return value;
  std::fprintf(stderr, "standin: %s is '%s'; it must be a number\n", name, text);
  std::abort();
}

}  // namespace

Runtime::Runtime()
    : devices(from_environment("FSDP_STANDIN_DEVICES", 1)),
      memory_bytes(from_environment("FSDP_STANDIN_MEMORY", std::uint64_t{16} << 30)),
      seed(from_environment("FSDP_STANDIN_SEED", 0)),
      delay_us(static_cast<std::int64_t>(from_environment("FSDP_STANDIN_DELAY_US", 0))) {
  std::atexit(list_leaks);
}

Runtime& Runtime::instance() {
  static auto& runtime = *new Runtime;  // streams still run while the process ends
  return runtime;
}

Call::Call(std::string_view name) : runtime(Runtime::instance()), lock(runtime.mutex) { ++runtime.calls[name]; }

cudaError_t Call::result(cudaError_t status, int device) {
  if (device >= 0 && device < static_cast<int>(runtime.devices.size())) {
    auto const sticky = runtime.devices[static_cast<std::size_t>(device)].error;
    if (sticky != cudaSuccess) status = sticky;
  }
  if (status != cudaSuccess) last_error = status;
  return status;
}

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

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
std::int64_t synchronizations() {
  Unseen const unseen;
  auto& runtime = Runtime::instance();
  std::lock_guard const lock{runtime.mutex};
  return runtime.synchronizations;
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
