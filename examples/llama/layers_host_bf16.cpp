// SPDX-License-Identifier: Apache-2.0
// The layers on the host in bf16, with fp32 gradients. See [Note: Layers are compiled once].
#include "layers_host.hpp"

namespace transformer {
template class CausalAttention<fsdp::host::Device, fsdp::bf16>;
}  // namespace transformer

namespace llama {

template class Embedding<fsdp::host::Device, fsdp::bf16>;
template class Block<fsdp::host::Device, fsdp::bf16>;
template class Head<fsdp::host::Device, fsdp::bf16>;

}  // namespace llama
