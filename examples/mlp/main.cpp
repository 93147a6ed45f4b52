// SPDX-License-Identifier: Apache-2.0
// Trains on two ranks that are threads of this process.
#include <cstdio>

#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "train.hpp"

int main() {
  double loss = 1.0;
  fsdp::local::run(2, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    auto const last = mlp::train(std::move(comm), 501);
    if (first) loss = last;
  });
  std::printf("final loss %.6f\n", loss);
  return loss < 0.05 ? 0 : 1;
}
