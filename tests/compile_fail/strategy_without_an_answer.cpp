// SPDX-License-Identifier: Apache-2.0
// A user's own strategy answers every question.
// expect: fsdp: expected \(mesh, strategy\[, precision\]\[, options\]\[, stream\]\); check the names in braces
#include "fsdp/fsdp.hpp"
#include "model_communicator.hpp"

#include <string_view>

struct Mine {
  static constexpr std::string_view name = "mine";
  static constexpr bool shards = true;
#ifdef CONTROL
  static constexpr bool reshards_after_forward = false;
#endif
};
void use(fsdp::Mesh<compile_fail::Communicator>& mesh) { fsdp::Engine engine{mesh, Mine{}}; }
