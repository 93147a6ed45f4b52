// SPDX-License-Identifier: Apache-2.0
// A communicator that lacks reduce_scatter is refused at the door of the engine.
// expect: comm\.reduce_scatter\(
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

struct Incomplete : compile_fail::Communicator {
  Incomplete split(int, int, std::string_view) { return {}; }
#ifndef CONTROL
  void reduce_scatter() = delete;
#endif
};
using Refused = fsdp::Engine<Incomplete>;
