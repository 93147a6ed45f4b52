// SPDX-License-Identifier: Apache-2.0
// A misspelt option is named as what it is.
// expect: \.momentun
// expect: fsdp: expected \(engine, tensors\[, MuonOptions\[, groups\]\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "fsdp/muon.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
#ifdef CONTROL
void use(Engine& engine) { fsdp::Muon muon{engine, fsdp::matching("h.*"), {.momentum = 0.9f}}; }
#else
void use(Engine& engine) { fsdp::Muon muon{engine, fsdp::matching("h.*"), {.momentun = 0.9f}}; }
#endif
