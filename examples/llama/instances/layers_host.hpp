// SPDX-License-Identifier: Apache-2.0
// The layers on the host, compiled in layers_host.cpp.
#pragma once

#include "fsdp/host.hpp"
#include "llama/model.hpp"
#include "transformer/math/gemm_host.hpp"

namespace transformer {

extern template class CausalAttention<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
extern template class CausalAttention<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace transformer

namespace llama {

extern template class Embedding<fsdp::host::Device, float>;
extern template class Block<fsdp::host::Device, float>;
extern template class Head<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
extern template class Embedding<fsdp::host::Device, fsdp::bf16>;
extern template class Block<fsdp::host::Device, fsdp::bf16>;
extern template class Head<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace llama
