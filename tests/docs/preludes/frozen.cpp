// SPDX-License-Identifier: Apache-2.0
// Layers, some of them frozen; statements stand inside a function.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "examples/mlp/regression.hpp"
#include "fsdp/checkpoint.hpp"
#include "fsdp/ema.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/muon.hpp"
#include "fsdp/offload.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/recompute.hpp"

using namespace mlp;
using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
void train(fsdp::Mesh<Comm>& mesh, Mlp<Device> const& layer, std::int64_t rows, std::int64_t width) {
  // BLOCK
}
