// SPDX-License-Identifier: Apache-2.0
// Layers, some of them frozen; statements stand inside a function.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "examples/mlp/regression.hpp"
#include "fsdp/checkpoint/load.hpp"
#include "fsdp/checkpoint/module_buffers.hpp"
#include "fsdp/checkpoint/save.hpp"
#include "fsdp/comm/local.hpp"
#include "fsdp/host/device.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/optim/ema.hpp"
#include "fsdp/optim/muon.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/recompute.hpp"

using namespace mlp;
using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
void train(fsdp::Mesh<Comm>& mesh, Mlp<Device> const& layer, std::int64_t rows, std::int64_t width) {
  // BLOCK
}
