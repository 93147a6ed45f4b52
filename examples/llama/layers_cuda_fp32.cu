// SPDX-License-Identifier: Apache-2.0
// The layers on a GPU in fp32. See [Note: Layers are compiled once].
#include "layers_cuda.hpp"

namespace transformer {
template class CausalAttention<fsdp::cuda::Device, float>;
}  // namespace transformer

namespace llama {

template class Embedding<fsdp::cuda::Device, float>;
template class Block<fsdp::cuda::Device, float>;
template class Head<fsdp::cuda::Device, float>;

}  // namespace llama
