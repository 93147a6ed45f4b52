// SPDX-License-Identifier: Apache-2.0
// ranks: 2 3
// skip-sanitizers
// Buffers of modules over processes: all have the same bits when they are averaged or broadcast.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/support/messages.hpp"

namespace {

struct Nothing {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {8});
  }
};

}  // namespace

TEST_CASE("buffers over processes are equal on all ranks once they are averaged or broadcast, also in parts") {
  for (int const ranks_per_node : {0, 1}) {
    fsdp::mpi::Options options;
    options.ranks_per_node = ranks_per_node;
    fsdp::mpi::Communicator world(test_environment(), {}, options);
    fsdp::Mesh mesh(std::move(world));
    fsdp::Engine engine(mesh, fsdp::FullShard{});
    auto const unit = engine.shard(Nothing{}, "unit");
    auto const rank = engine.rank(), ranks = engine.world_size();
    std::vector<float> values(1'500'000);
    std::vector<double> wide{1.0 + rank};
    std::int64_t whole = 7 + rank;
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000) + static_cast<float>(rank);
    std::vector<fsdp::ModuleBuffer> buffers{
        {"values", values.data(), {1500, 1000}}, {"wide", wide.data(), {1}}, {"whole", &whole, {}}};
    fsdp::average_buffers(engine, buffers);
    auto const mean = static_cast<float>(ranks - 1) / 2.0f;  // of the ranks' numbers
    bool equal = true;
    for (std::size_t i = 0; i < values.size(); ++i) equal = equal && values[i] == static_cast<float>(i % 1000) + mean;
    CHECK(equal);
    CHECK(wide[0] == 1.0 + static_cast<double>(mean));
    CHECK(whole == 7);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + static_cast<std::size_t>(rank));
    whole = rank - 5;
    fsdp::broadcast_buffers(engine, buffers);
    equal = true;
    for (std::size_t i = 0; i < values.size(); ++i) equal = equal && values[i] == static_cast<float>(i);
    CHECK(equal);
    CHECK(whole == -5);
    if (rank == 1) buffers[1].shape = {1, 1};
    auto const text = fsdp::testing::what<fsdp::OrderError>([&] { fsdp::average_buffers(engine, buffers); });
    CHECK(
        fsdp::testing::has(text, "rank 0 has \"buffer 'wide' (1), fp64\", rank 1 has \"buffer 'wide' (1, 1), fp64\""));
    engine.synchronize();
  }
}
