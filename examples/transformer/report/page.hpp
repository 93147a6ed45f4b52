// SPDX-License-Identifier: Apache-2.0
// The page of a report: one file that loads nothing from a network.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transformer/report/log_reader.hpp"
#include "transformer/report/trace_reader.hpp"

namespace transformer::report {

/// All that is known of a run.
struct Material {
  Run run;
  std::optional<Trace> trace;
  std::string trace_missing{};  ///< why there is none, where the run was to write one
};

/// An HTML document, which is well-formed XML as well.
/// @param reload_seconds  above 0: browsers load it again so often
/// @pre runs is not empty
std::string page(std::vector<Material> const& runs, int reload_seconds = 0);

/// A picture of the first run for a README: losses, and a step's timeline if there is one.
std::string overview(Material const& run);

}  // namespace transformer::report
