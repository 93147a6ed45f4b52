// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU, compiled in layers_cuda.cu.
#pragma once

#include "fsdp/cuda.hpp"
#include "nanogpt/model.hpp"
#include "transformer/math/gemm_cuda.hpp"

namespace transformer {

extern template class CausalAttention<fsdp::cuda::Device, float>;
extern template class CausalAttention<fsdp::cuda::Device, fsdp::bf16>;

}  // namespace transformer

namespace nanogpt {

extern template class Embedding<fsdp::cuda::Device, float>;
extern template class Block<fsdp::cuda::Device, float>;
extern template class Head<fsdp::cuda::Device, float>;

extern template class Embedding<fsdp::cuda::Device, fsdp::bf16>;
extern template class Block<fsdp::cuda::Device, fsdp::bf16>;
extern template class Head<fsdp::cuda::Device, fsdp::bf16>;

}  // namespace nanogpt
