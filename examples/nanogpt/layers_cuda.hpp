// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU, compiled in layers_cuda_*.cu.
#pragma once

#include "fsdp/cuda/device.hpp"
#include "gemm_cuda.hpp"
#include "layers.hpp"

namespace nanogpt {

NANOGPT_LAYERS(extern template, fsdp::cuda::Device, float, fsdp::Gradient<float>)
NANOGPT_LAYERS(extern template, fsdp::cuda::Device, fsdp::bf16, fsdp::Gradient<float>)

}  // namespace nanogpt
