// SPDX-License-Identifier: Apache-2.0
// ranks: 2
// needs: nlohmann_json
// The trace file of processes is that of threads.
// skip-sanitizers
#include "fsdp/mpi.hpp"
#include "tests/catch.hpp"
#include "tests/mpi_main.hpp"
#include "tests/schedule/trace_file.hpp"

TEST_CASE("processes' spans are in one file, on one clock") {
  fsdp::mpi::Communicator comm{test_environment()};
  int const rank = comm.rank(), ranks = comm.size();
  auto const text = toy::traced_run(std::move(comm));
  if (rank == 0) CHECK(toy::faults(text, ranks) == "");
  if (rank != 0) CHECK(text.empty());
}
