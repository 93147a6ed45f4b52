// SPDX-License-Identifier: Apache-2.0
// An engine with layers, an optimizer and a batch; statements stand inside a function.
#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <utility>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "examples/mlp/regression.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/simulate.hpp"
#include "fsdp/trace.hpp"

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm>;
using Layers = std::vector<fsdp::ShardedModule<mlp::Mlp<Device>, Engine>>;

void step(fsdp::Mesh<Comm>& mesh, Engine& engine, Layers& layers, fsdp::AdamW<Engine>& adamw,
          mlp::Regression<Engine>& batch, int count) {
  auto const forward_and_backward = [&](int) {};
  // BLOCK
}
