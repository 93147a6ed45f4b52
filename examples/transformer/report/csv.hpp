// SPDX-License-Identifier: Apache-2.0
// Runs as a table, for spreadsheets and notebooks.
#pragma once

#include <string>
#include <vector>

#include "transformer/report/log_reader.hpp"

namespace transformer::report {

/// Comma-separated values with a line of names first, as RFC 4180 has them but for line ends of one character. A row
/// for each iteration that was logged or evaluated; a value that is not known is empty.
std::string csv(std::vector<Run const*> const& runs);

}  // namespace transformer::report
