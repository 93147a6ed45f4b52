// SPDX-License-Identifier: Apache-2.0
// Trains on the ranks that mpirun starts.
#include <cstdio>

#include "fsdp/mpi.hpp"
#include "train.hpp"

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [](fsdp::mpi::Environment& environment) {
    fsdp::mpi::Communicator comm{environment};
    bool const first = comm.rank() == 0;
    auto const loss = mlp::train(std::move(comm), 501);
    if (first) std::printf("final loss %.6f\n", loss);
    return loss < 0.05 ? 0 : 1;
  });
}
