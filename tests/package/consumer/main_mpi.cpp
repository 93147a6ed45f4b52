// SPDX-License-Identifier: Apache-2.0
// Links everything that fsdp::mpi brings.
#include <fsdp/fsdp.hpp>
#include <fsdp/mpi.hpp>

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [](fsdp::mpi::Environment& environment) {
    fsdp::mpi::Communicator const comm{environment};
    return comm.rank() < comm.size() ? 0 : 1;
  });
}
