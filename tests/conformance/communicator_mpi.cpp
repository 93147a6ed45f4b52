// SPDX-License-Identifier: Apache-2.0
// mpi::Communicator: ranks that share a node, and the same ranks placed on pretended nodes of one and of two.
// ranks: 1 2 3 4 7
// sanitizer-ranks: 3
// timeout: 600
#include "fsdp/comm/mpi.hpp"
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
    for (int const ranks_per_node : {0, 1, 2}) {
      auto const ranks = test_environment().size();
      if (ranks_per_node >= ranks || (ranks_per_node == 1 && ranks > 4)) continue;
      fsdp::mpi::Options options;
      options.ranks_per_node = ranks_per_node;
      Communicator world(test_environment(), {}, options);
      body(world);
    }
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("mpi<host>", MpiHost);
