// SPDX-License-Identifier: Apache-2.0
// The layers on the host: fp32, and bf16 with fp32 gradients. See [Note: Layers are compiled once].
#include "nanogpt/instances/layers_host.hpp"

namespace transformer {

template class CausalAttention<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
template class CausalAttention<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace transformer

namespace nanogpt {

template class Embedding<fsdp::host::Device, float>;
template class Block<fsdp::host::Device, float>;
template class Head<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
template class Embedding<fsdp::host::Device, fsdp::bf16>;
template class Block<fsdp::host::Device, fsdp::bf16>;
template class Head<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace nanogpt
