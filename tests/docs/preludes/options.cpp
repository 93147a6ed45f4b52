// SPDX-License-Identifier: Apache-2.0
// Statements that make an engine.
#include <cstddef>
#include <utility>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/optimizers.hpp"

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
void make(Comm comm, std::vector<mlp::Mlp<fsdp::host::Device>> blocks) {
  // BLOCK
}
