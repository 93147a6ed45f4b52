// SPDX-License-Identifier: Apache-2.0
// The program llama prepares texts, fine-tunes a Llama sharded over ranks, samples from it, exports and measures it.
#include "llama/commands.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/command_line.hpp"

int main(int argc, char** argv) {
  transformer::program_name = "llama";
  return transformer::run_command_line(argc, argv, {llama::run_export, llama::run_plan});
}
