// SPDX-License-Identifier: Apache-2.0
// Handles of both libraries: which live, and on which device; and what tests have set.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>
#include <string_view>

#include "cublas.hpp"
#include "fsdp/detail/base/format.hpp"
#include "problem.hpp"
#include "rules.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace standin::cublas {

/// State of the whole process.
struct Shared {
  std::mutex mutex;
  Settings settings;
  Calls calls;
  std::set<void const*> handles;
};
inline Shared& shared() {
  static Shared all;
  return all;
}
inline Settings settings() {
  std::lock_guard const lock(shared().mutex);
  return shared().settings;
}
inline void count(std::int64_t Calls::*what) {
  std::lock_guard const lock(shared().mutex);
  ++(shared().calls.*what);
}

/// The calling thread's device; -1: the runtime has failed.
inline int current_device() {
  int device = -1;
  return cudaGetDevice(&device) == cudaSuccess ? device : -1;
}

template <class Context>
cublasStatus_t create(std::string_view call, Context** handle) {
  standin::count_call(call);
  if (handle == nullptr) return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::handle, fsdp::formatted("{}: null", call));
  int const device = current_device();
  if (device < 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new Context{};
  (*handle)->device = device;
  std::lock_guard const lock(shared().mutex);
  shared().handles.insert(*handle);
  return CUBLAS_STATUS_SUCCESS;
}

/// Whether a handle may be used now: it lives. @return success, or what the call returns, reported
template <class Context>
cublasStatus_t expect_alive(std::string_view call, Context const* handle) {
  {
    std::lock_guard const lock(shared().mutex);
    if (shared().handles.count(handle) != 0) return CUBLAS_STATUS_SUCCESS;
  }
  return refuse(CUBLAS_STATUS_NOT_INITIALIZED, rule::handle,
                fsdp::formatted("{}: {}", call, handle == nullptr ? "no handle" : "a handle that does not exist"));
}
/// ... and its device is current.
template <class Context>
cublasStatus_t expect_usable(std::string_view call, Context const* handle) {
  if (auto const status = expect_alive(call, handle); status != CUBLAS_STATUS_SUCCESS) return status;
  if (int const current = current_device(); current != handle->device)
    return refuse(CUBLAS_STATUS_INVALID_VALUE, rule::device,
                  fsdp::formatted("{}: a handle of device {} while {} is current", call, handle->device, current));
  return CUBLAS_STATUS_SUCCESS;
}

template <class Context>
cublasStatus_t destroy(std::string_view call, Context* handle) {
  if (auto const status = expect_alive(call, handle); status != CUBLAS_STATUS_SUCCESS) return status;
  {
    std::lock_guard const lock(shared().mutex);
    shared().handles.erase(handle);
  }
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace standin::cublas
