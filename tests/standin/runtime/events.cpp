// SPDX-License-Identifier: Apache-2.0
// Events of the stand-in.
#include <algorithm>
#include <chrono>

#include "tests/standin/runtime/state.hpp"

namespace standin {

bool usable(Call& call, cudaEvent_t event, std::string_view function) {
  if (call.runtime.events.count(event) != 0) return true;
  bool const known = std::any_of(call.runtime.all_events.begin(), call.runtime.all_events.end(),
                                 [&](auto const& own) { return own.get() == event; });
  report(call, rule("dead_handle"),
         std::string(function) + (known ? ": the event was destroyed" : ": this is no event"));
  return false;
}

namespace {

/// Whether the event was recorded; reports otherwise.
bool was_recorded(Call& call, cudaEvent_t event, std::string_view function) {
  if (event->latest != nullptr) return true;
  report(call, rule("unrecorded_event"), std::string(function) + " of an event that was never recorded");
  return false;
}

cudaError_t create(std::string_view function, cudaEvent_t* made, unsigned flags) {
  Call call(function);
  constexpr unsigned known = cudaEventBlockingSync | cudaEventDisableTiming;
  if (made == nullptr || (flags & ~known) != 0) return call.result(cudaErrorInvalidValue);
  if (call.runtime.devices.empty()) return call.result(cudaErrorNoDevice);
  auto& event = *call.runtime.all_events.emplace_back(std::make_unique<CUevent_st>());
  event.device = current_device();
  event.timed = (flags & cudaEventDisableTiming) == 0;
  call.runtime.events.insert(&event);
  *made = &event;
  return call.result(cudaSuccess, event.device);
}

}  // namespace

}  // namespace standin

using standin::Call;
using standin::rule;
using standin::usable;

extern "C" {

cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* event) {
  return standin::create("cudaEventCreate", event, cudaEventDefault);
}
cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return standin::create("cudaEventCreateWithFlags", event, flags);
}

/// Does not wait: streams may still have to reach it (API, cudaEventDestroy).
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  Call call("cudaEventDestroy");
  if (!usable(call, event, "cudaEventDestroy")) return call.result(cudaErrorInvalidResourceHandle);
  event->latest.reset();
  call.runtime.events.erase(event);
  return call.result(cudaSuccess, event->device);
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Call call("cudaEventRecord");
  if (!usable(call, event, "cudaEventRecord") || !usable(call, stream, "cudaEventRecord"))
    return call.result(cudaErrorInvalidResourceHandle);
  if (event->device != stream->device) {
    report(
        call, rule("record_device"),
        "cudaEventRecord of an event of device " + std::to_string(event->device) + " on " + standin::text_of(stream));
    return call.result(cudaErrorInvalidResourceHandle);
  }
  if (auto const status = call.result(cudaSuccess, stream->device); status != cudaSuccess) return status;
  event->latest = standin::record_locked(stream, "cudaEventRecord");
  return cudaSuccess;
}

/// Means the latest record before the call; event and stream may be of different devices (Guide, Stream and Event
/// Behavior).
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  Call call("cudaStreamWaitEvent");
  if (!usable(call, event, "cudaStreamWaitEvent") || !usable(call, stream, "cudaStreamWaitEvent"))
    return call.result(cudaErrorInvalidResourceHandle);
  if (flags != 0) return call.result(cudaErrorInvalidValue);
  if (!standin::was_recorded(call, event, "cudaStreamWaitEvent")) return call.result(cudaSuccess, stream->device);
  if (auto const status = call.result(cudaSuccess, stream->device); status != cudaSuccess) return status;
  auto operation = std::make_unique<standin::Operation>();
  operation->what = "cudaStreamWaitEvent";
  operation->awaits = event->latest;
  standin::push_locked(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  Call call("cudaEventSynchronize");
  if (!usable(call, event, "cudaEventSynchronize")) return call.result(cudaErrorInvalidResourceHandle);
  int const device = event->device;
  if (standin::was_recorded(call, event, "cudaEventSynchronize"))
    standin::wait_on_host(call,
                          standin::RecordPointer(event->latest));  // which another thread may record again meanwhile
  return call.result(cudaSuccess, device);
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  Call call("cudaEventQuery");
  if (!usable(call, event, "cudaEventQuery")) return call.result(cudaErrorInvalidResourceHandle);
  if (!standin::was_recorded(call, event, "cudaEventQuery")) return call.result(cudaSuccess, event->device);
  if (!event->latest->reached) return call.result(cudaErrorNotReady, event->device);
  standin::acquire_unseen(event->latest.get());
  return call.result(cudaSuccess, event->device);
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  Call call("cudaEventElapsedTime");
  if (!usable(call, start, "cudaEventElapsedTime") || !usable(call, stop, "cudaEventElapsedTime"))
    return call.result(cudaErrorInvalidResourceHandle);
  if (milliseconds == nullptr) return call.result(cudaErrorInvalidValue);
  bool const recorded = start->latest != nullptr && stop->latest != nullptr;
  if (!start->timed || !stop->timed || !recorded || start->device != stop->device) {
    report(call, rule("untimed_event"),
           !recorded                       ? "an event was never recorded"
           : start->device != stop->device ? "the events are of different devices"
                                           : "an event keeps no time");
    return call.result(cudaErrorInvalidResourceHandle);
  }
  if (!start->latest->reached || !stop->latest->reached) return call.result(cudaErrorNotReady, start->device);
  *milliseconds = std::chrono::duration<float, std::milli>(stop->latest->at - start->latest->at).count();
  return call.result(cudaSuccess, start->device);
}

}  // extern "C"
