// SPDX-License-Identifier: Apache-2.0
// Exports: the memory that ranks need for them, however many there are, and every value where it belongs.
// skip-tsan
// needs: nlohmann_json xxHash
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;

/// Element i of a tensor.
float value_at(std::int64_t i) { return static_cast<float>(i % 1'000'003); }

/// Bytes that all ranks together stage for an export of a model with about this number of elements, a multiple of 1024.
std::int64_t staged(int ranks, std::int64_t elements) {
  std::int64_t bytes = 0;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
    auto part = engine.shard(toy::Patch<Device>{engine.device(), elements / 1024, 1024, 0}, "part");
    fsdp::import_shard(engine, [](fsdp::TensorInfo const&, std::int64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) out[i] = value_at(first + static_cast<std::int64_t>(i));
    });
    auto const before = engine.account().reserved(fsdp::MemoryTag::workspace);
    std::int64_t mine = 0;
    bool right = true;
    fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      mine = engine.account().reserved(fsdp::MemoryTag::workspace) - before;
      for (std::size_t i = 0; i < values.size(); ++i)
        right = right && values[i] == value_at(static_cast<std::int64_t>(i));
    });
    RANK_CHECK(right);
    if (engine.rank() == 0) bytes = mine;
    engine.drain();
  });
  return ranks * bytes;
}

}  // namespace

TEST_CASE("each rank stages at most 4 MiB for an export, however many ranks there are") {
  constexpr std::int64_t budget = std::int64_t{4} << 20;
  for (int const ranks : {1, 2, 8, 16}) CHECK(staged(ranks, 64 << 10) == ranks * budget);
  CHECK(staged(3, 64 << 10) <= 3 * budget);
  // Several chunks of each rank, the last of them shorter.
  CHECK(staged(8, (std::int64_t{1} << 20) + (200 << 10)) == 8 * budget);
  CHECK(staged(3, (std::int64_t{2} << 20) + (5 << 10)) <= 3 * budget);
  CHECK_RANKS();
}
