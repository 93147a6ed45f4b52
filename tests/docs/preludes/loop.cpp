// SPDX-License-Identifier: Apache-2.0
// Around the loop of README.md.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "examples/mlp/mlp.hpp"
#include "examples/mlp/regression.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

using namespace mlp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
void train(Comm comm, int steps, std::int64_t rows, std::int64_t width, std::size_t depth) {
  // BLOCK
}
