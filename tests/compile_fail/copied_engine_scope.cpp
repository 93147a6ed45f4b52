// SPDX-License-Identifier: Apache-2.0
// The scope that keeps parameters gathered cannot be copied: the unit would be dropped twice.
// expect: use of deleted function|call to deleted constructor
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

using Engine = fsdp::Engine<compile_fail::Communicator>;
auto use(Engine& engine) {
  auto scope = engine.forward_scope(fsdp::UseId{0});
#ifdef CONTROL
  return scope.parameters();
#else
  auto copy = scope;
  return copy.parameters();
#endif
}
