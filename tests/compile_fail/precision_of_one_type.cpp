// SPDX-License-Identifier: Apache-2.0
// An engine's precision is a policy, not an element type.
// expect: PrecisionPolicy
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#ifdef CONTROL
using P = fsdp::Bf16;
#else
using P = fsdp::bf16;
#endif
using Refused = fsdp::Engine<fsdp::FullShard, compile_fail::Communicator, P>;
