// SPDX-License-Identifier: Apache-2.0
// llama: prepare texts, fine-tune a Llama sharded over ranks, sample from it, export it, measure it.
#include "llama/commands.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/command_line.hpp"

int main(int argc, char** argv) {
  transformer::program_name = "llama";
  return transformer::run_command_line(argc, argv, {llama::run_export, llama::run_plan});
}
