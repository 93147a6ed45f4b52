// SPDX-License-Identifier: Apache-2.0
// Processes: replicas that drift apart are an error. See replicas.hpp.
// ranks: 2
// skip-sanitizers
#include "tests/schedule/replicas.hpp"

#include <string>

#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"

namespace {

fsdp::mpi::Communicator make_world(int ranks_per_node) {
  fsdp::mpi::Options options;
  options.ranks_per_node = ranks_per_node;
  return fsdp::mpi::Communicator(test_environment(), {}, options);
}

}  // namespace

TEST_CASE("processes that drift apart are an error on every rank, on one node and between nodes") {
  for (int const ranks_per_node : {0, 1}) {
    replicas::train(fsdp::NoShard{}, make_world(ranks_per_node), {});
    for (auto const how : replicas::drifts) {
      if (how == replicas::Drift::discards_at_the_end) continue;  // below
      std::string message;
      try {
        replicas::train(fsdp::NoShard{}, make_world(ranks_per_node), how);
      } catch (fsdp::Error const& error) {
        message = error.what();
      }
      INFO("the last rank " << replicas::name(how) << ": " << message);
      CHECK(message.find(replicas::expected(how)) != std::string::npos);
    }
  }
}

TEST_CASE("a difference that no collective follows is noticed at the end of the run") {
  auto const compared = [] {
    try {
      test_environment().expect_equal_ends();
    } catch (fsdp::OrderError const& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(compared() == "");
  replicas::train(fsdp::NoShard{}, make_world(0), {});
  CHECK(compared() == "");
  replicas::train(fsdp::NoShard{}, make_world(0), replicas::Drift::discards_at_the_end);
  auto const message = compared();
  INFO(message);
  CHECK(message.find(replicas::expected(replicas::Drift::discards_at_the_end)) != std::string::npos);
  CHECK(message.find("on rank 0, and after discard_gradients, history") != std::string::npos);
}
