// SPDX-License-Identifier: Apache-2.0
// The planned memory of a rank, behind a function that is compiled once.
#pragma once

#include <cstdint>

#include "transformer/run/settings.hpp"

namespace transformer {

/// Bytes that a rank of training will reserve: see plan_memory. Each program defines it.
/// @param settings  `ranks`, `device`, `dtype` and `threads` are those of the run
/// @throws fsdp::ConfigError if there is no such model or run
std::int64_t planned_bytes(Settings const& settings);

}  // namespace transformer
