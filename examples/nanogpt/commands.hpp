// SPDX-License-Identifier: Apache-2.0
// The subcommands that need a GPT.
#pragma once

#include "transformer/launch/exit.hpp"
#include "transformer/run/settings.hpp"

namespace nanogpt {

using namespace transformer;  // the rooms that it is built of

/// Each returns the exit code of the process. Problems that the user can mend are fsdp::Error.
int run_export(Settings const& settings);
int run_plan(Settings const& settings);

}  // namespace nanogpt
