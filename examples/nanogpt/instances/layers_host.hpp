// SPDX-License-Identifier: Apache-2.0
// The layers on the host, compiled in layers_host.cpp.
#pragma once

#include "fsdp/host.hpp"
#include "nanogpt/model.hpp"
#include "transformer/math/gemm_host.hpp"

/// [Note: Layers are compiled once]
/// Layers do not depend on the strategy, but their kernels take most of a minute to compile. Therefore layers are
/// classes whose parameters are the device and the element type alone, and layers_host.cpp and layers_cuda.cu
/// instantiate them. Trainers include layers_host.hpp or layers_cuda.hpp, whose `extern template` lines say that
/// another source has the instances; only `describe`, a template of its own, is compiled with the trainers. A new layer
/// needs its line in each of these files: without it, trainers compile the layer too, and nothing else changes. Tests
/// that instantiate layers of their own include model.hpp alone.

namespace transformer {

extern template class CausalAttention<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
extern template class CausalAttention<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace transformer

namespace nanogpt {

extern template class Embedding<fsdp::host::Device, float>;
extern template class Block<fsdp::host::Device, float>;
extern template class Head<fsdp::host::Device, float>;
#if TRANSFORMER_HAVE_ONEDNN
extern template class Embedding<fsdp::host::Device, fsdp::bf16>;
extern template class Block<fsdp::host::Device, fsdp::bf16>;
extern template class Head<fsdp::host::Device, fsdp::bf16>;
#endif

}  // namespace nanogpt
