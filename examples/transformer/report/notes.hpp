// SPDX-License-Identifier: Apache-2.0
// Notes of a page: losses that are not finite, jumps, and samples that the model wrote during training.
#pragma once

#include <string>

#include "transformer/report/log_reader.hpp"

namespace transformer::report {

/// How many losses of the run are null, and since when; empty if none is.
std::string null_losses(Run const& run);

/// Null losses and jumps, as paragraphs.
/// @param of  stands before each: "NAME: " where the page has several runs, else empty
std::string notes_section(Run const& run, std::string const& of);

/// The last sample, and the earlier ones folded.
/// @param of  " of NAME" where the page has several runs, else empty
std::string samples_section(Run const& run, std::string const& of);

}  // namespace transformer::report
