// SPDX-License-Identifier: Apache-2.0
// Torch modules on CUDA: include it beside fsdp/libtorch.hpp, before the first Sharder. It needs a torch with CUDA.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <string_view>

#include "fsdp/cuda.hpp"
#include "fsdp/detail/libtorch/device.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

/// Torch's current stream of the current device, to be an engine's compute stream:
///
/// ```
/// c10::cuda::CUDAStreamGuard guard{c10::cuda::getStreamFromPool()};  // the default stream works too
/// auto compute = fsdp::libtorch::current_stream();
/// fsdp::Engine engine{mesh, fsdp::FullShard{}, {}, compute};
/// fsdp::libtorch::Sharder sharder{engine};
/// ```
/// The stream stays torch's. The program keeps it current while it calls sharded modules, backward() and optimizers;
/// autograd makes it current on its own threads, because forward ran on it. A use that finds another one current
/// throws.
inline cuda::Stream current_stream() { return cuda::Stream::adopt(c10::cuda::getCurrentCUDAStream().stream()); }

namespace detail {

template <>
struct TorchDevice<cuda::Device> {
  static c10::Device of(cuda::Device const& device) {
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.ordinal()));
  }
  static void expect_compute(cuda::Stream const&, int) {}
  static void expect_current(cuda::Device const& device, cuda::Stream const& compute, int rank, std::string_view unit) {
    auto const current = c10::cuda::getCurrentCUDAStream(of(device).index()).stream();
    FSDP_EXPECTS(current == compute.get(),
                 "rank {}: unit '{}': torch's current stream is not the engine's compute stream, so its kernels could "
                 "start before the parameters are there; make the stream of fsdp::libtorch::current_stream() current "
                 "(c10::cuda::CUDAStreamGuard), in forward, in backward and in optimizers",
                 rank, unit);
  }
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
