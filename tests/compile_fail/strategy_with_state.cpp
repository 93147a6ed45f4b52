// SPDX-License-Identifier: Apache-2.0
// A strategy is an empty type: what it answers is known when compiling.
// expect: is_empty_v
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

struct Mine : fsdp::FullShard {
#ifndef CONTROL
  int depth = 0;
#endif
};
using Refused = fsdp::Engine<Mine, compile_fail::Communicator>;
