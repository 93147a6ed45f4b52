// SPDX-License-Identifier: Apache-2.0
// A kernel that carries state is refused: what it needs are arguments.
// expect: kernels are stateless functors
#include "fsdp/host.hpp"

struct Fill {
#ifndef CONTROL
  float value = 1.0f;
#endif
  template <class Block>
  void operator()(Block const&, std::int64_t i, float* out) const {
    out[i] = 1.0f;
  }
};
void use(fsdp::host::Device device, fsdp::host::Stream& stream, float* out) { device.launch(stream, 8, Fill{}, out); }
