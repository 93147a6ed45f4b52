// SPDX-License-Identifier: Apache-2.0
// nanogpt plan.
#include "transformer/training/plan.hpp"
#include "commands.hpp"
#include "program.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/training/planned_bytes.hpp"

namespace nanogpt {

int run_plan(Settings const& settings) {
  check_together(settings, Command::plan, settings.ranks);
  return print_plan<Program>(settings, model_config(settings, Meta{}.vocab_size));
}

}  // namespace nanogpt

std::int64_t transformer::planned_bytes(Settings const& settings) {
  return plan_memory<nanogpt::Program>(settings, nanogpt::model_config(settings, Meta{}.vocab_size)).total();
}
