// SPDX-License-Identifier: Apache-2.0
// Subcommands of llama that need the model: export and plan.
#pragma once

#include "transformer/run/settings.hpp"

namespace llama {

/// Each returns the exit code of the process. Problems that the user can mend are fsdp::Error.
int run_export(transformer::Settings const& settings);
int run_plan(transformer::Settings const& settings);

}  // namespace llama
