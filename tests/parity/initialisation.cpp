// SPDX-License-Identifier: Apache-2.0
// Initial parameters depend on seed, tensor name and index alone; no rank holds more of the model than its strategy
// says.
//
// skip-sanitizers
#include <cmath>
#include <cstring>

#include "tests/catch.hpp"
#include "tests/support/local_run.hpp"

namespace {

toy::Run untrained(std::uint64_t seed = 1337) {
  toy::Run run;
  run.steps = 0;
  run.options.seed = seed;
  return run;
}

}  // namespace

TEST_CASE("every world size and strategy starts from the same bits") {
  auto run = untrained();
  auto const one = toy::train_local(fsdp::FullShard{}, 1, run);
  REQUIRE(!one.empty());
  for (int const ranks : {2, 3, 4, 7}) {
    CHECK(toy::train_local(fsdp::FullShard{}, ranks, run) == one);
    CHECK(toy::train_local(fsdp::ShardGradOp{}, ranks, run) == one);
    CHECK(toy::train_local(fsdp::NoShard{}, ranks, run) == one);
  }
  run.shard_group = 2;
  CHECK(toy::train_local(fsdp::HybridShard<>{}, 4, run) == one);
  CHECK(toy::train_local(fsdp::FullShard{}, 4, untrained(1)) != one);
}

TEST_CASE("tensors of equal shape and different names start differently, as asked for") {
  std::vector<std::vector<float>> ups;
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Shape shape;
    shape.hidden = {64, 64};
    toy::Network network(engine, shape);
    fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
      if (first && tensor.name.ends_with(".up")) ups.emplace_back(values.begin(), values.end());
      if (first && tensor.name.ends_with(".bias"))
        for (auto const value : values) REQUIRE(value == 0.0f);
    });
  });
  REQUIRE(ups.size() == 2);
  CHECK(ups[0] != ups[1]);
  double sum = 0.0, squares = 0.0;
  for (auto const value : ups[0]) sum += value, squares += static_cast<double>(value) * value;
  auto const n = static_cast<double>(ups[0].size());
  // Mean 0 and deviation 0.3 within five standard errors.
  CHECK(std::abs(sum / n) < 5.0 * 0.3 / std::sqrt(n));
  CHECK(std::abs(std::sqrt(squares / n) - 0.3) < 5.0 * 0.3 / std::sqrt(2.0 * n));
}

TEST_CASE("what is exported comes back through import_shard, whatever the world size") {
  auto const run = untrained();
  auto const source = toy::train_local(fsdp::FullShard{}, 1, run);
  std::vector<float> result;
  fsdp::local::run(3, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{}, {.seed = 99});
    toy::Network network(engine, run.shape);
    fsdp::import_shard(engine, [&](fsdp::TensorInfo const& wanted, std::int64_t first, std::span<float> out) {
      std::size_t at = 0;
      for (auto const& tensor : fsdp::tensor_list(engine)) {
        if (tensor.name == wanted.name) break;
        at += static_cast<std::size_t>(tensor.numel);
      }
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = source[at + static_cast<std::size_t>(first) + i];
    });
    auto parameters = toy::parameters(engine);
    if (mesh.rank() == 0) result = std::move(parameters);
  });
  CHECK(result == source);
}

TEST_CASE("under FullShard no rank allocates the whole model") {
  std::int64_t largest = 0, model = 0;
  fsdp::local::run(4, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    fsdp::Mesh mesh(std::move(comm));
    auto engine = fsdp::Engine(mesh, fsdp::FullShard{});
    toy::Shape shape;
    shape.hidden.assign(24, 64);
    toy::Network network(engine, shape);
    network.step(0);
    engine.synchronize();
    if (!first) return;
    for (std::size_t u = 0; u < engine.shards().size(); ++u) model += engine.shards()[u].full_numel() * 4;
    for (auto const tag :
         {fsdp::MemoryTag::parameters, fsdp::MemoryTag::gradients, fsdp::MemoryTag::gather, fsdp::MemoryTag::reduce})
      largest = std::max(largest, engine.account().reserved(tag));
  });
  CHECK(largest > 0);
  CHECK(largest * 3 < model);  // a quarter for the shards, a few units for the buffers
}
