// SPDX-License-Identifier: Apache-2.0
// Products of the stand-in for cuBLAS run where their stream is, and touch what cuBLAS touches: under ThreadSanitizer
// two of them that share a workspace race.
#include <cublas_v2.h>

#include <atomic>
#include <cstddef>
#include <utility>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/standin/races.hpp"
#include "tests/standin/runtime/runtime.hpp"

namespace {

using fsdp::cuda::Device;
using fsdp::cuda::Stream;

constexpr int extent = 8;
constexpr std::size_t elements = extent * extent, workspace_bytes = 1024;

/// Two streams with a handle each, and operands of zeros that both read.
struct Two {
  Device device;
  Stream first = device.make_stream("first"), second = device.make_stream("second");
  cublasHandle_t of_first = open(first), of_second = open(second);
  float* const operands = allocate(elements);
  float *const result = allocate(elements), *const other_result = allocate(elements);
  float *const workspace = allocate(workspace_bytes / 4), *const other_workspace = allocate(workspace_bytes / 4);

  Two() {
    for (auto* memory : {operands, result, other_result}) device.zero_async(first, memory, elements * sizeof(float));
    device.synchronize(first);
  }
  Two(Two const&) = delete;
  Two& operator=(Two const&) = delete;
  ~Two() {
    device.synchronize(first);
    device.synchronize(second);
    cublasDestroy(of_first);
    cublasDestroy(of_second);
    for (auto* memory : {operands, result, other_result, workspace, other_workspace}) device.deallocate(memory, 0);
  }

  static cublasHandle_t open(Stream const& stream) {
    cublasHandle_t handle = nullptr;
    REQUIRE(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasSetStream(handle, stream.get()) == CUBLAS_STATUS_SUCCESS);
    return handle;
  }
  float* allocate(std::size_t count) const { return static_cast<float*>(device.allocate(count * sizeof(float))); }
  /// to = operands operands + 2 to, in fp32.
  void multiply(cublasHandle_t handle, float* to, float* scratch) {
    float const alpha = 1, beta = 2;
    REQUIRE(cublasSetWorkspace(handle, scratch, workspace_bytes) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cublasGemmStridedBatchedEx_64(handle, CUBLAS_OP_N, CUBLAS_OP_N, extent, extent, extent, &alpha, operands,
                                          CUDA_R_32F, extent, 0, operands, CUDA_R_32F, extent, 0, &beta, to, CUDA_R_32F,
                                          extent, 0, 1, CUBLAS_COMPUTE_32F,
                                          CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  }
  void order(Stream& before, Stream& after) {
    auto event = device.make_event();
    device.record(event, before);
    device.wait(after, event);
  }
};

}  // namespace

TEST_CASE("a product runs when its stream comes to it, and not before", "[standin]") {
  Two two;
  std::atomic<bool> open{false};
  float seen = -1;
  auto const look = [&] {
    two.device.copy_async(two.second, &seen, two.result, sizeof seen);
    two.device.synchronize(two.second);
    return seen;
  };
  auto* const ones = static_cast<float*>(two.device.allocate_pinned(sizeof(float)));
  *ones = 1;
  two.device.copy_async(two.first, two.result, ones, sizeof(float));
  two.device.synchronize(two.first);
  REQUIRE(standin::enqueue(two.first.get(), "a gate", [&] { return open.load(); }) == cudaSuccess);
  two.multiply(two.of_first, two.result, two.workspace);
  CHECK(look() == 1);
  open.store(true);
  two.device.synchronize(two.first);
  CHECK(look() == 2);
  two.device.deallocate_pinned(ones);
}

#if defined(__SANITIZE_THREAD__)

namespace {

template <class Action>
int races_of(Action const& action) {
  return standin::test::races_during([&] {
    Two two;
    action(two);
    two.device.synchronize(two.first);
    two.device.synchronize(two.second);
  });
}

}  // namespace

TEST_CASE("products on two streams race in a workspace that they share", "[standin]") {
  CHECK(races_of([](Two& two) {
          two.multiply(two.of_first, two.result, two.workspace);
          two.multiply(two.of_second, two.other_result, two.workspace);
        }) > 0);
  CHECK(races_of([](Two& two) {
          two.multiply(two.of_first, two.result, two.workspace);
          two.multiply(two.of_second, two.other_result, two.other_workspace);
        }) == 0);
  CHECK(races_of([](Two& two) {
          two.multiply(two.of_first, two.result, two.workspace);
          two.order(two.first, two.second);
          two.multiply(two.of_second, two.other_result, two.workspace);
        }) == 0);
}

TEST_CASE("products on two streams race in a result that one writes and the other adds to", "[standin]") {
  CHECK(races_of([](Two& two) {
          two.multiply(two.of_first, two.result, two.workspace);
          two.multiply(two.of_second, two.result, two.other_workspace);
        }) > 0);
}

#endif
