// SPDX-License-Identifier: Apache-2.0
// mpi::Communicator: ranks that share a node, and the same ranks placed on pretended nodes of one, two or three.
// ranks: 3 7
// full-ranks: 1 2 4
// sanitizer-ranks: 3
// timeout: 600
#include "fsdp/mpi.hpp"

#include <vector>

#include "tests/conformance/communicator_suite.hpp"
#include "tests/mpi_main.hpp"

namespace {

/// Runs everything on each placement of the ranks.
struct MpiHost {
  using Communicator = fsdp::mpi::Communicator;
  static constexpr bool fixed_tree = true;
  static constexpr bool reports_order = false;  // at execution, not when it is enqueued: processes_mpi.cpp
  static constexpr bool reports_peers = false;  // a rank that throws ends the run: tests/failure, departures_mpi.cpp
  static std::vector<int> sizes() { return {test_environment().size()}; }
  template <class Body>
  static void run(int, Body const& body) {
    auto const ranks = test_environment().size();
    // With seven ranks, three a node, no node is a subtree of the sum.
    for (int const ranks_per_node : ranks > 4 ? std::vector{0, 3} : std::vector{0, 1, 2}) {
      if (ranks_per_node >= ranks) continue;
      fsdp::mpi::Options options;
      options.ranks_per_node = ranks_per_node;
      Communicator world(test_environment(), {}, options);
      body(world);
    }
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("mpi<host>", MpiHost);
