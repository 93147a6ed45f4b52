// SPDX-License-Identifier: Apache-2.0
// The subcommand `llama plan` computes the memory that training needs.
#include "transformer/training/plan.hpp"
#include "llama/commands.hpp"
#include "llama/program.hpp"
#include "transformer/training/planned_bytes.hpp"

namespace llama {

int run_plan(Settings const& settings) {
  auto adopted = settings;
  check_together(settings, Command::plan, settings.ranks);
  Program::adopt(adopted);
  return print_plan<Program>(std::move(adopted), read_config(settings));
}

}  // namespace llama

std::int64_t transformer::planned_bytes(Settings const& settings) {
  return plan_memory<llama::Program>(settings, llama::read_config(settings)).total();
}
