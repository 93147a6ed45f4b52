// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU in bf16, with fp32 gradients. See [Note: Layers are compiled once].
#include "layers_cuda.hpp"

namespace nanogpt {

NANOGPT_LAYERS(template, fsdp::cuda::Device, fsdp::bf16, fsdp::Gradient<float>)

}  // namespace nanogpt
