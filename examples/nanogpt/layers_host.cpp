// SPDX-License-Identifier: Apache-2.0
// The layers on the host in fp32. See [Note: Layers are compiled once].
#include "layers_host.hpp"

namespace nanogpt {

NANOGPT_LAYERS(template, fsdp::host::Device, float, fsdp::Gradient<float>)

}  // namespace nanogpt
