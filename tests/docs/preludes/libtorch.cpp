// SPDX-License-Identifier: Apache-2.0
// Sharded modules of torch; statements stand inside a function.
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "examples/libtorch/gpt.hpp"
#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/local.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/safetensors.hpp"

using Mesh = fsdp::Mesh<fsdp::local::Communicator<fsdp::host::Device>>;
void train(Mesh& mesh, torch::Tensor const& ids, torch::Tensor const& targets) {
  auto compute = fsdp::host::Stream::inline_stream("compute");
  fsdp::Engine engine{mesh, fsdp::FullShard{}, {.prefetch = 1}, compute};
  fsdp::libtorch::Sharder sharder{engine};
  example::Sizes const sizes;
  auto embed = sharder.shard(example::Embed(sizes), "embed");
  auto head = sharder.shard(example::Head(sizes), "head");
  // BLOCK
}
