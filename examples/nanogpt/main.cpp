// SPDX-License-Identifier: Apache-2.0
// nanogpt: prepare a text, train a GPT sharded over ranks, sample from it, give it to other programs, measure it.
#include "commands.hpp"
#include "transformer/run/command_line.hpp"

int main(int argc, char** argv) {
  return transformer::run_command_line(argc, argv, {nanogpt::run_export, nanogpt::run_plan});
}
