// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU in fp32. See [Note: Layers are compiled once].
#include "layers_cuda.hpp"

namespace nanogpt {

NANOGPT_LAYERS(template, fsdp::cuda::Device, float, fsdp::Gradient<float>)

}  // namespace nanogpt
