// SPDX-License-Identifier: Apache-2.0
// How ranks come about: processes.
#include <utility>

#include "fsdp/comm/mpi.hpp"
#include "fsdp/fsdp.hpp"

template <class Comm>
void train(Comm) {}
int start(int argc, char** argv) {
  // BLOCK
}
