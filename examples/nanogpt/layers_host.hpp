// SPDX-License-Identifier: Apache-2.0
// The layers on the host, compiled in layers_host.cpp.
#pragma once

#include "fsdp/host/device.hpp"
#include "gemm_host.hpp"
#include "layers.hpp"

namespace nanogpt {

NANOGPT_LAYERS(extern template, fsdp::host::Device, float, fsdp::Gradient<float>)

}  // namespace nanogpt
