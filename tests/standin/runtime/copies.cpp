// SPDX-License-Identifier: Apache-2.0
// Copies of the stand-in.
#include <cstring>
#include <vector>

#include "tests/standin/runtime/state.hpp"

namespace standin {

namespace {

/// An end of a copy: device memory, pinned memory, or (without an allocation) the host's own.
struct End {
  bool valid = true;
  std::shared_ptr<Allocation> allocation;
  bool device() const { return allocation != nullptr && allocation->region.kind == MemoryKind::device; }
  bool pageable() const { return allocation == nullptr; }
};

End end_of(Call& call, void const* begin, std::size_t bytes, std::string_view which) {
  auto const place = place_of(call.runtime, begin);
  auto const what = std::string(which) + " of a copy: " + std::to_string(bytes) + " bytes at " + hex(begin) + " ";
  switch (place.kind) {
    case Place::Kind::elsewhere: return {};
    case Place::Kind::freed: report(call, rule("freed_memory"), what + "were freed"); return {false, nullptr};
    case Place::Kind::edge:
      report(call, rule("out_of_range"), what + "lie beside " + text_of(place.allocation->region));
      return {false, nullptr};
    case Place::Kind::allocated: break;
  }
  auto const& region = place.allocation->region;
  auto const before = static_cast<std::size_t>(static_cast<std::byte const*>(begin) - region.begin);
  if (bytes <= region.bytes - before) return {true, place.allocation};
  report(call, rule("out_of_range"), what + "go beyond the end of " + text_of(region));
  return {false, nullptr};
}

bool fits(cudaMemcpyKind kind, End const& to, End const& from) {
  switch (kind) {
    case cudaMemcpyHostToHost: return !to.device() && !from.device();
    case cudaMemcpyHostToDevice: return to.device() && !from.device();
    case cudaMemcpyDeviceToHost: return !to.device() && from.device();
    case cudaMemcpyDeviceToDevice: return to.device() && from.device();
    case cudaMemcpyDefault: return true;
  }
  return false;
}

}  // namespace

/// [Note: When copies happen]
/// Pinned memory is read and written when the stream comes to the copy. Pageable memory is read while the call lasts,
/// into a buffer; and a copy into pageable memory is done when the call returns. A copy between two places of the host,
/// one of them pageable, waits for the stream. (API, API Synchronization Behavior, Memcpy, Asynchronous.) That copies
/// between a device and pageable memory wait is no promise ("might", since CUDA 12): with FSDP_STANDIN_NO_FAVOURS they
/// are as those of pinned memory.
static cudaError_t copy(Call& call, void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind,
                        cudaStream_t stream) {
  if (!usable(call, stream, "cudaMemcpyAsync")) return call.result(cudaErrorInvalidResourceHandle);
  int const device = stream->device;
  if (bytes == 0) return call.result(cudaSuccess, device);
  if (to == nullptr || from == nullptr) return call.result(cudaErrorInvalidValue, device);
  auto const target = end_of(call, to, bytes, "target"), source = end_of(call, from, bytes, "source");
  if (!target.valid || !source.valid) return call.result(cudaErrorInvalidValue, device);
  if (!fits(kind, target, source)) {
    report(call, rule("copy_kind"),
           "cudaMemcpyKind " + std::to_string(kind) + " is not where the ends of the copy are");
    return call.result(cudaErrorInvalidMemcpyDirection, device);
  }
  auto const distance = static_cast<std::byte const*>(to) - static_cast<std::byte const*>(from);
  if (static_cast<std::size_t>(distance < 0 ? -distance : distance) < bytes) {
    report(call, rule("overlapping_copy"), std::to_string(bytes) + " bytes, " + std::to_string(distance) + " apart");
    return call.result(cudaErrorInvalidValue, device);
  }
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;

  if (target.pageable() || source.pageable()) count_locked(call.runtime, pageable_copies);
  auto operation = std::make_unique<Operation>();
  operation->what = "a copy of " + std::to_string(bytes) + " bytes";
  for (auto const& end : {target, source}) {
    if (end.allocation != nullptr) operation->uses.push_back(end.allocation);
  }
  bool const late = call.runtime.no_favours && (source.device() || target.device());
  if (source.pageable() && !late) {
    auto const buffer = std::make_shared<std::vector<std::byte>>();
    call.lock.unlock();
    see([&] {
      auto const* const begin = static_cast<std::byte const*>(from);
      buffer->assign(begin, begin + bytes);
    });
    call.lock.lock();
    operation->work = [buffer, to, bytes] { return std::memcpy(to, buffer->data(), bytes) != nullptr; };
  } else {
    operation->work = [from, to, bytes] { return std::memcpy(to, from, bytes) != nullptr; };
  }
  RecordPointer done;
  if (target.pageable() && !late) done = operation->reaches = std::make_shared<Record>();
  if (done != nullptr) done->device = device;
  push_locked(stream, std::move(operation));
  if (done != nullptr) wait_on_host(call, done);
  return call.result(cudaSuccess, device);
}

static cudaError_t set(Call& call, void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (!usable(call, stream, "cudaMemsetAsync")) return call.result(cudaErrorInvalidResourceHandle);
  int const device = stream->device;
  if (device != current_device())
    report(
        call, rule("set_device"),
        "cudaMemsetAsync on " + text_of(stream) + " while device " + std::to_string(current_device()) + " is current");
  if (bytes == 0) return call.result(cudaSuccess, device);
  auto const allocation = device_operand(call, device, to, bytes, "cudaMemsetAsync");
  if (allocation == nullptr) return call.result(cudaErrorInvalidValue, device);
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;
  auto operation = std::make_unique<Operation>();
  operation->what = "cudaMemsetAsync of " + std::to_string(bytes) + " bytes";
  operation->uses.push_back(allocation);
  operation->work = [to, value, bytes] { return std::memset(to, value, bytes) != nullptr; };
  push_locked(stream, std::move(operation));
  return cudaSuccess;
}

}  // namespace standin

extern "C" {

cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  standin::Call call("cudaMemcpyAsync");
  return standin::copy(call, to, from, bytes, kind, stream);
}
cudaError_t CUDARTAPI cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  standin::Call call("cudaMemsetAsync");
  return standin::set(call, to, value, bytes, stream);
}

}  // extern "C"
