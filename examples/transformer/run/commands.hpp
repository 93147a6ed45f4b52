// SPDX-License-Identifier: Apache-2.0
// Subcommands that need no model: prepare and report.
#pragma once

#include "transformer/run/settings.hpp"

namespace transformer {

/// Each returns the exit code of the process. Problems that the user can mend are fsdp::Error.
int run_prepare(Settings const& settings);
int run_report(Settings const& settings);

}  // namespace transformer
