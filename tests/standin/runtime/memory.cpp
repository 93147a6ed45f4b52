// SPDX-License-Identifier: Apache-2.0
// Memory of the stand-in: allocations, what lies beside them, and what becomes of them.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tests/standin/runtime/state.hpp"
#include "tests/support/fiber.hpp"  // EMULATED_ASAN

namespace standin {

namespace {

constexpr std::size_t alignment = 256;  // of what cudaMalloc gives
constexpr unsigned char fresh = 0xff;   // NaN in every floating-point type
constexpr unsigned char beside = 0xfd;  // what lies at an allocation's edges
constexpr std::size_t most = std::size_t{1} << 46;

std::size_t rounded_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// Calls f(begin, bytes) for what lies within an allocation's pages, before and behind it.
template <class F>
void each_edge(Allocation const& allocation, F const& f) {
  auto* const end = allocation.region.begin + allocation.region.bytes;
  auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  f(allocation.pages, static_cast<std::size_t>(allocation.region.begin - allocation.pages));
  f(end, static_cast<std::size_t>(allocation.pages + allocation.page_bytes - page - end));
}

/// Maps pages so that the allocation ends, but for alignment, where a page begins that nobody may touch.
std::shared_ptr<Allocation> map(MemoryKind kind, int device, std::size_t bytes) {
  auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::size_t const whole = rounded_up(bytes, alignment), page_bytes = rounded_up(whole, page) + page;
  void* const pages = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  auto allocation = std::make_shared<Allocation>();
  allocation->pages = static_cast<std::byte*>(pages);
  allocation->page_bytes = page_bytes;
  allocation->region = {kind, device, allocation->pages + page_bytes - page - whole, bytes};
  mprotect(allocation->pages + page_bytes - page, page, PROT_NONE);
  std::memset(allocation->region.begin, fresh, bytes);
  each_edge(*allocation, [](std::byte* edge, std::size_t size) {
    std::memset(edge, beside, size);
#if defined(EMULATED_ASAN)
    __asan_poison_memory_region(edge, size);
#endif
  });
  if (kind == MemoryKind::device) protect_device_memory(allocation->pages, page_bytes - page);
  return allocation;
}

/// Takes the pages away for good: their addresses are not used again, so that a late access ends the process.
void unmap(Call& call, Allocation const& allocation) {
  bool touched = false;
  open_device_memory();
  each_edge(allocation, [&](std::byte* edge, std::size_t size) {
#if defined(EMULATED_ASAN)
    __asan_unpoison_memory_region(edge, size);
#endif
    touched = touched || !std::all_of(edge, edge + size, [](std::byte b) { return b == std::byte{beside}; });
  });
  close_device_memory();
  mmap(allocation.pages, allocation.page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
       0);
  call.runtime.freed[allocation.pages] = allocation.pages + allocation.page_bytes;
  if (touched) report(call, rule("overrun"), "something was written beside " + text_of(allocation.region));
}

cudaError_t allocate(Call& call, MemoryKind kind, void** memory, std::size_t bytes) {
  int const device = current_device();
  if (memory == nullptr) return call.result(cudaErrorInvalidValue);
  if (call.runtime.devices.empty()) return call.result(cudaErrorNoDevice);
  if (auto const status = call.result(cudaSuccess, device); status != cudaSuccess) return status;
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  auto& used = call.runtime.devices[static_cast<std::size_t>(device)].used;
  if (bytes > most) return call.result(cudaErrorMemoryAllocation);
  bool const counted = kind == MemoryKind::device;
  if (counted && rounded_up(bytes, alignment) > call.runtime.memory_bytes - used)
    return call.result(cudaErrorMemoryAllocation);
  auto allocation = map(kind, device, bytes);
  if (allocation == nullptr) return call.result(cudaErrorMemoryAllocation);
  if (counted) used += rounded_up(bytes, alignment);
  *memory = allocation->region.begin;
  call.runtime.memory[allocation->region.begin] = std::move(allocation);
  return cudaSuccess;
}

/// The allocation that begins at an address; reports if there is none, or one of another kind.
std::shared_ptr<Allocation> allocation_at(Call& call, MemoryKind kind, void* memory, std::string_view function) {
  auto const found = call.runtime.memory.find(static_cast<std::byte*>(memory));
  if (found != call.runtime.memory.end() && found->second->region.kind == kind) return found->second;
  auto const place = place_of(call.runtime, memory);
  std::string why = "which no allocation gave";
  if (place.kind == Place::Kind::freed) why = "which was freed";
  if (place.kind == Place::Kind::allocated) why = "which is in " + text_of(place.allocation->region);
  report(call, rule("wild_free"), std::string(function) + " of " + hex(memory) + ", " + why);
  return nullptr;
}

/// Gives memory back that no stream of its device uses any more.
cudaError_t release_memory(Call& call, std::shared_ptr<Allocation> const& allocation) {
  auto const& region = allocation->region;
  bool const pending = allocation->pending > 0;
  if (pending) {
    report(call, rule("freed_while_pending"),
           std::to_string(allocation->pending) + " operations still use " + text_of(region));
  }
  call.runtime.memory.erase(region.begin);
  if (region.kind == MemoryKind::device)
    call.runtime.devices[static_cast<std::size_t>(region.device)].used -= rounded_up(region.bytes, alignment);
  if (!pending) unmap(call, *allocation);  // else a test goes on, and the operations too
  return call.result(cudaSuccess, region.device);
}

/// cudaFree: waits for all streams of the memory's device. That is what it has always done, and what NCCL's users are
/// warned of, but cuda::Device::deallocate promises it to nobody: without favours it does not.
cudaError_t free_after_device(Call& call, void* memory, std::string_view function) {
  if (memory == nullptr) return call.result(cudaSuccess, current_device());
  auto const allocation = allocation_at(call, MemoryKind::device, memory, function);
  if (allocation == nullptr) return call.result(cudaErrorInvalidValue);
  int const device = allocation->region.device;
  std::string pending;
  for (auto const& stream : call.runtime.all_streams) {
    if (stream->device != device) continue;
    for (auto const& operation : stream->queue) {
      if (operation->kind == WorkKind::collective) pending = operation->what + " on " + text_of(stream.get());
    }
  }
  if (!pending.empty())
    report(call, rule("free_waits_for_collective"),
           std::string(function) + " waits for the device, and so for " + pending);
  if (!call.runtime.no_favours) wait_for_device(call, device, std::string(function));
  return release_memory(call, allocation);
}

}  // namespace

Place place_of(Runtime& runtime, void const* address) {
  auto* const byte = static_cast<std::byte const*>(address);
  auto const next = runtime.memory.upper_bound(byte);
  for (auto candidate = next;
       ;) {  // the allocation before, whose page behind it may be; and the one whose begin follows
    if (candidate != runtime.memory.end()) {
      auto const& allocation = candidate->second;
      auto const& region = allocation->region;
      if (byte >= region.begin && byte < region.begin + region.bytes) return {Place::Kind::allocated, allocation};
      if (byte >= allocation->pages && byte < allocation->pages + allocation->page_bytes)
        return {Place::Kind::edge, allocation};
    }
    if (candidate != next || next == runtime.memory.begin()) break;
    candidate = std::prev(next);
  }
  auto const freed = runtime.freed.upper_bound(byte);
  if (freed != runtime.freed.begin() && byte < std::prev(freed)->second) return {Place::Kind::freed, nullptr};
  return {};
}

std::optional<Region> region_of(void const* address) {
  Call call("standin::region_of");
  auto const place = place_of(call.runtime, address);
  if (place.kind != Place::Kind::allocated) return std::nullopt;
  return place.allocation->region;
}

std::shared_ptr<Allocation> device_operand(Call& call, int device, void const* begin, std::size_t bytes,
                                           std::string_view what) {
  auto const place = place_of(call.runtime, begin);
  auto const complain = [&](std::string_view rule, std::string const& why) {
    report(call, rule, std::string(what) + ": " + std::to_string(bytes) + " bytes at " + hex(begin) + " " + why);
    return nullptr;
  };
  if (place.kind == Place::Kind::freed) return complain(rule("freed_memory"), "were freed");
  if (place.kind != Place::Kind::allocated) return complain(rule("device_operand"), "are of no allocation");
  auto const& region = place.allocation->region;
  auto const behind = region.bytes - static_cast<std::size_t>(static_cast<std::byte const*>(begin) - region.begin);
  if (bytes > behind)
    return complain(rule("out_of_range"), "go " + std::to_string(bytes - behind) + " bytes beyond " + text_of(region));
  auto const& peers = call.runtime.devices[static_cast<std::size_t>(device)].peers;
  if (region.kind == MemoryKind::device && region.device != device && peers.count(region.device) == 0)
    return complain(rule("device_operand"), "are " + text_of(region) + ", no peer of device " + std::to_string(device));
  return place.allocation;
}

void expect_device_operand(int device, void const* begin, std::size_t bytes, std::string_view what) {
  if (bytes == 0) return;
  Call call("standin::expect_device_operand");
  static_cast<void>(device_operand(call, device, begin, bytes, what));
}

cudaError_t allocate_device(void** memory, std::size_t bytes) {
  Call call("standin::allocate_device");
  return allocate(call, MemoryKind::device, memory, bytes);
}
cudaError_t free_device(void* memory) {
  Call call("standin::free_device");
  return free_after_device(call, memory, "freeing");
}

}  // namespace standin

using standin::Call;
using standin::MemoryKind;

extern "C" {

cudaError_t CUDARTAPI cudaMalloc(void** memory, std::size_t bytes) {
  Call call("cudaMalloc");
  return standin::allocate(call, MemoryKind::device, memory, bytes);
}
cudaError_t CUDARTAPI cudaFree(void* memory) {
  Call call("cudaFree");
  return standin::free_after_device(call, memory, "cudaFree");
}

cudaError_t CUDARTAPI cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  Call call("cudaHostAlloc");
  constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
  if ((flags & ~known) != 0) return call.result(cudaErrorInvalidValue);
  return standin::allocate(call, MemoryKind::pinned, memory, bytes);
}
cudaError_t CUDARTAPI cudaMallocHost(void** memory, std::size_t bytes) {
  Call call("cudaMallocHost");
  return standin::allocate(call, MemoryKind::pinned, memory, bytes);
}
cudaError_t CUDARTAPI cudaFreeHost(void* memory) {
  Call call("cudaFreeHost");
  if (memory == nullptr) return call.result(cudaSuccess, standin::current_device());
  auto const allocation = standin::allocation_at(call, MemoryKind::pinned, memory, "cudaFreeHost");
  if (allocation == nullptr) return call.result(cudaErrorInvalidValue);
  return standin::release_memory(call, allocation);
}

}  // extern "C"
