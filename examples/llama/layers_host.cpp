// SPDX-License-Identifier: Apache-2.0
// The layers on the host in fp32. See [Note: Layers are compiled once].
#include "layers_host.hpp"

namespace transformer {
template class CausalAttention<fsdp::host::Device, float>;
}  // namespace transformer

namespace llama {

template class Embedding<fsdp::host::Device, float>;
template class Block<fsdp::host::Device, float>;
template class Head<fsdp::host::Device, float>;

}  // namespace llama
