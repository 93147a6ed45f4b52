// SPDX-License-Identifier: Apache-2.0
// Which device of torch an engine's device is, and what an engine's compute stream must be for torch's kernels.
#pragma once

#include <c10/core/Device.h>
#include <string_view>

#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail {

/// Streams that can run inline: those of host devices.
template <class S>
concept HostStream = requires(S const& stream) {
  stream.runs_inline();
};

/// For devices of the host. fsdp/libtorch_cuda.hpp has the one for fsdp::cuda::Device.
/// @tparam D  the engine's device
template <class D>
struct TorchDevice {
  static_assert(HostStream<typename D::Stream>,
                "fsdp: for modules on this device include fsdp/libtorch_cuda.hpp beside fsdp/libtorch.hpp");

  static c10::Device of(D const&) { return c10::Device(c10::kCPU); }
  /// Torch computes on the calling thread.
  /// @throws UsageError if the engine's compute stream is a worker thread
  static void expect_compute(typename D::Stream const& compute, int rank) {
    FSDP_EXPECTS(compute.runs_inline(),
                 "rank {}: Sharder: the engine's compute stream is a worker thread, and torch computes on the calling "
                 "thread, so kernels could start before the parameters are there; give the engine a "
                 "host::Stream::inline_stream",
                 rank);
  }
  /// @throws UsageError if torch's current stream is not the engine's compute stream
  static void expect_current(D const&, typename D::Stream const&, int, std::string_view) {}
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch::detail
