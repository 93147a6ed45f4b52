// SPDX-License-Identifier: Apache-2.0
// The program nanogpt prepares texts, trains a GPT sharded over ranks, samples from it, exports and measures it.
#include "nanogpt/commands.hpp"
#include "transformer/run/command_line.hpp"

int main(int argc, char** argv) {
  return transformer::run_command_line(argc, argv, {nanogpt::run_export, nanogpt::run_plan});
}
