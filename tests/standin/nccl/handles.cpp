// SPDX-License-Identifier: Apache-2.0
#include "tests/standin/nccl/handles.hpp"

#include <fmt/format.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/standin/nccl/rules.hpp"
#include "tests/standin/runtime/runtime.hpp"

struct ncclComm {};
struct ncclWindow_vidmem {};

namespace standin::nccl {
namespace {

/// Never destroyed, and no handle is given twice, so that a late use is recognised.
struct Table {
  std::mutex mutex;
  std::deque<ncclComm> handles;
  std::deque<ncclWindow_vidmem> window_handles;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> communicators;  // empty: dead
  std::map<void*, std::size_t> memory;
};
Table& table() {
  static auto* const instance = new Table;
  return *instance;
}

}  // namespace

ncclComm_t make_handle(std::shared_ptr<Communicator> communicator) {
  std::scoped_lock const lock(table().mutex);
  auto* const handle = &table().handles.emplace_back();
  table().communicators.emplace(handle, std::move(communicator));
  return handle;
}

void kill_handle(ncclComm_t handle) {
  std::scoped_lock const lock(table().mutex);
  table().communicators[handle].reset();
}

void for_each_communicator(std::function<void(Communicator&)> const& action) {
  std::vector<std::shared_ptr<Communicator>> alive;
  {
    std::scoped_lock const lock(table().mutex);
    for (auto const& [handle, communicator] : table().communicators) {
      if (communicator != nullptr) alive.push_back(communicator);
    }
  }
  for (auto const& communicator : alive) action(*communicator);
}

Entry::Entry(ncclComm_t handle, std::string_view call, Use use) {
  count_call(call);
  auto const refuse = [&](std::string_view broken, ncclResult_t status, std::string_view reason) {
    auto const text = fmt::format("{}: {}", call, reason);
    status_ = failed(status, text);
    if (!broken.empty()) report(broken, text);
  };
  use_current_device();
  bool known = false;
  {
    std::scoped_lock const lock(table().mutex);
    auto const entry = table().communicators.find(handle);
    known = entry != table().communicators.end();
    if (known) communicator_ = entry->second;
  }
  if (!known) {
    refuse("", ncclInvalidArgument, "not a communicator");
  } else if (communicator_ == nullptr) {
    refuse(rule("dead_communicator"), ncclInvalidArgument, "the communicator was destroyed or aborted");
  } else if (use == Use::state) {
    return;
  } else if (communicator_->is_in_progress()) {
    refuse(rule("call_in_progress"), ncclInvalidArgument, "the communicator's state is ncclInProgress");
  } else if (use == Use::query) {
    return;
  } else if (communicator_->calling.exchange(true)) {
    refuse(rule("concurrent_calls"), ncclInvalidUsage, "another thread is in a call for this communicator");
  } else {
    exclusive_ = true;
    if (use == Use::last_work) return;
    status_ = communicator_->state.load();
    if (communicator_->finalized.load())
      refuse(rule("dead_communicator"), ncclInvalidUsage, "the communicator was finalized");
  }
}

Entry::~Entry() {
  if (exclusive_) communicator_->calling = false;
}

ncclResult_t allocate(void** memory, std::size_t bytes) {
  constexpr std::size_t page = NCCL_WIN_REQUIRED_ALIGNMENT;
  if (memory == nullptr || bytes == 0) return failed(ncclInvalidArgument, "ncclMemAlloc of nothing");
  auto const rounded = (bytes + page - 1) / page * page;
  if (auto const status = allocate_device(memory, rounded); status != cudaSuccess)
    return failed(ncclUnhandledCudaError,
                  fmt::format("ncclMemAlloc of {} bytes: {}", bytes, cudaGetErrorString(status)));
  std::scoped_lock const lock(table().mutex);
  table().memory.emplace(*memory, rounded);
  return ncclSuccess;
}

ncclResult_t release_memory(void* memory) {
  std::size_t bytes = 0;
  {
    std::scoped_lock const lock(table().mutex);
    auto const entry = table().memory.find(memory);
    if (entry != table().memory.end()) {
      bytes = entry->second;
      table().memory.erase(entry);
    }
  }
  if (bytes == 0) {
    report(rule("wild_free"), fmt::format("ncclMemFree of {}", memory));
    return failed(ncclInvalidArgument, "ncclMemFree of what ncclMemAlloc did not give");
  }
  for_each_communicator([&](Communicator& communicator) {
    std::scoped_lock const lock(communicator.windows_mutex);
    auto* const begin = static_cast<std::byte*>(memory);
    for (auto const& [handle, window] : communicator.windows) {
      if (window.begin < begin + bytes && begin < window.begin + window.bytes)
        report(rule("window_freed"), fmt::format("rank {} of {} frees memory that is a window of its communicator",
                                                 communicator.rank, communicator.size));
    }
  });
  if (auto const status = free_device(memory); status != cudaSuccess)
    return failed(ncclUnhandledCudaError, fmt::format("ncclMemFree: {}", cudaGetErrorString(status)));
  return ncclSuccess;
}

bool expect_window_memory(Communicator const& communicator, void const* begin, std::size_t bytes) {
  auto const region = region_of(begin);
  auto const* const first = static_cast<std::byte const*>(begin);
  bool ours = false;
  if (region) {
    std::scoped_lock const lock(table().mutex);
    ours = table().memory.count(region->begin) > 0;
  }
  if (!ours || region->device != communicator.device || first + bytes > region->begin + region->bytes) {
    report(rule("window_memory"),
           fmt::format("rank {} of {}: {} bytes at {} are not within memory that ncclMemAlloc gave on device {}",
                       communicator.rank, communicator.size, bytes, begin, communicator.device));
    return false;
  }
  if (reinterpret_cast<std::uintptr_t>(begin) % NCCL_WIN_REQUIRED_ALIGNMENT != 0 ||
      bytes % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
    report(rule("window_alignment"),
           fmt::format("rank {} of {}: {} bytes at {}: expected multiples of {}", communicator.rank, communicator.size,
                       bytes, begin, NCCL_WIN_REQUIRED_ALIGNMENT));
    return false;
  }
  return true;
}

ncclWindow_t make_window_handle() {
  std::scoped_lock const lock(table().mutex);
  return &table().window_handles.emplace_back();
}

}  // namespace standin::nccl
