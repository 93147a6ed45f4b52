// SPDX-License-Identifier: Apache-2.0
// How ranks come about: threads.
#include <utility>

#include "fsdp/comm/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host/device.hpp"

template <class Comm>
void train(Comm) {}
void start() {
  // BLOCK
}
