// SPDX-License-Identifier: Apache-2.0
// AdamW's moments are fp32 or bf16.
// expect: moments are float or fsdp::bf16
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#ifdef CONTROL
using Moment = fsdp::bf16;
#else
using Moment = fsdp::fp16;
#endif
using Engine = fsdp::Engine<compile_fail::Communicator>;
void use(Engine& engine) { fsdp::AdamW<Engine, Moment> adamw(engine); }
