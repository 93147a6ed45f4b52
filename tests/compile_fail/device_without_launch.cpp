// SPDX-License-Identifier: Apache-2.0
// A device that cannot launch kernels is no Device.
// expect: device\.launch\(
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

struct Incomplete : compile_fail::Device {
#ifndef CONTROL
  void launch() = delete;
#endif
};
template <fsdp::Device D>
struct NeedsDevice {};
using Refused = NeedsDevice<Incomplete>;
