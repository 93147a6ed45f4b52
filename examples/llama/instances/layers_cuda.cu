// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU: fp32, and bf16 with fp32 gradients. See [Note: Layers are compiled once].
#include "llama/instances/layers_cuda.hpp"

namespace transformer {

template class CausalAttention<fsdp::cuda::Device, float>;
template class CausalAttention<fsdp::cuda::Device, fsdp::bf16>;

}  // namespace transformer

namespace llama {

template class Embedding<fsdp::cuda::Device, float>;
template class Block<fsdp::cuda::Device, float>;
template class Head<fsdp::cuda::Device, float>;
template class Embedding<fsdp::cuda::Device, fsdp::bf16>;
template class Block<fsdp::cuda::Device, fsdp::bf16>;
template class Head<fsdp::cuda::Device, fsdp::bf16>;

}  // namespace llama
