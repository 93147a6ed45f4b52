// SPDX-License-Identifier: Apache-2.0
// Parts of a page. Each is empty where a run has nothing to show.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "transformer/report/page.hpp"

namespace transformer::report {

/// A run in one line: model, ranks, iterations, date.
std::string run_line(Run const& run);

/// The share of the traced steps' time in which ranks communicate and do not compute, a mean over the ranks; nullopt
/// without a trace.
std::optional<double> exposed_communication(Material const& material);

/// A run's figures.
std::string tiles(Material const& material);
/// Several runs' figures, a row each, in the colours of their curves.
std::string run_table(std::vector<Material> const& materials);

/// @param of  " of NAME" where the page has several runs, else empty
std::string memory_section(Run const& run, std::string const& of);
/// A traced step's timeline, and the printed program beside it.
std::string step_section(Material const& material, std::string const& of);

/// Settings: those that were given, then all others, folded.
std::string settings_section(Run const& run);
/// Settings in which runs differ, side by side; and each run's own, folded.
std::string differences_section(std::vector<Run const*> const& runs);
std::string environment_section(Run const& run, std::string const& of);

}  // namespace transformer::report
