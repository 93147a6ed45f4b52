// SPDX-License-Identifier: Apache-2.0
// Memory of ranks as bars, divided by purpose, below the bar of the plan.
#pragma once

#include <cstdint>
#include <string>

#include "transformer/report/chart.hpp"
#include "transformer/report/log_reader.hpp"

namespace transformer::report {

/// @param width  pixels; the height follows from the ranks, of which 8 are drawn at most
std::string memory_svg(Run const& run, double width);

/// Whether the log has anything to draw.
bool has_memory(Run const& run);

/// Bytes of a rank that the library plans: all but activations, workspace, scalars and snapshots.
std::int64_t planned_bytes(BytesByTag const& bytes);
std::int64_t total_bytes(BytesByTag const& bytes);

}  // namespace transformer::report
