// SPDX-License-Identifier: Apache-2.0
// Subcommands of nanogpt that need the model: export and plan.
#pragma once

#include "transformer/launch/exit.hpp"
#include "transformer/run/settings.hpp"

namespace nanogpt {

using namespace transformer;  // the parts that nanogpt and llama share

/// Each returns the exit code of the process. Problems that the user can mend are fsdp::Error.
int run_export(Settings const& settings);
int run_plan(Settings const& settings);

}  // namespace nanogpt
