// SPDX-License-Identifier: Apache-2.0
// Handles of programs: communicators and memory, and checks of their use.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include "tests/standin/nccl/communicator.hpp"

namespace standin::nccl {

ncclComm_t make_handle(std::shared_ptr<Communicator> communicator);
/// The handle is dead afterwards.
void kill_handle(ncclComm_t handle);
/// Calls `action` with all communicators that are alive.
void for_each_communicator(std::function<void(Communicator&)> const& action);

/// How a call concerns a communicator.
enum class Use : unsigned char {
  state,      ///< ncclCommGetAsyncError, ncclCommAbort: in any state, from any thread
  query,      ///< its rank and such: not while it is in progress
  work,       ///< and from one thread at a time
  last_work,  ///< and also after ncclCommFinalize
};

/// A call of NCCL's for a communicator, which it holds while it lives.
class Entry {
 public:
  Entry(ncclComm_t handle, std::string_view call, Use use);
  Entry(Entry const&) = delete;
  Entry& operator=(Entry const&) = delete;
  ~Entry();
  /// Whether the call may go on; otherwise it returns status().
  explicit operator bool() const { return status_ == ncclSuccess; }
  ncclResult_t status() const { return status_; }
  Communicator* operator->() const { return communicator_.get(); }
  std::shared_ptr<Communicator> const& communicator() const { return communicator_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  ncclResult_t status_ = ncclSuccess;
  bool exclusive_ = false;
};

/// Memory of ncclMemAlloc.
ncclResult_t allocate(void** memory, std::size_t bytes);
ncclResult_t release_memory(void* memory);
/// Reports memory that can be no window of `communicator`.
bool expect_window_memory(Communicator const& communicator, void const* begin, std::size_t bytes);
ncclWindow_t make_window_handle();

}  // namespace standin::nccl
