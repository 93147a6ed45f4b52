// SPDX-License-Identifier: Apache-2.0
// Chooses the element type of a computation: the given one, that of the resumed run, or the fastest.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "transformer/launch/job.hpp"

namespace transformer {

/// Sets the job's type and its note: the setting, or the type of the run that is resumed, or bfloat16 on cuda and
/// float32 on cpu. On cpu `fastest` stays, for take_fastest_type(), unless a resumed run has decided it. What
/// cannot compute in bf16 computes in float32.
/// @param saved  the type of the run that is resumed; empty: there is none, or its type is not known
/// @pre the job's device is known
/// @throws fsdp::ConfigError unless there is such a computation
void choose_dtype(Job& job, std::string const& saved);

/// Gives every rank's text to all, in the order of the ranks.
using ExchangeTexts = std::function<std::vector<std::string>(std::string const&)>;

/// Where the job's type is `fastest`: sets the type that all ranks are fastest in together, by the rates that earlier
/// runs have left in the cache folder, or by a measurement of 0.1 to 1 s; the job's note says which. The setting
/// measure_dtype asks for a measurement.
/// @pre the job's type is the same on all ranks, and its threads are known
/// @note Collective: yes, where there is something to measure.
void take_fastest_type(Job& job, ExchangeTexts const& exchange);

}  // namespace transformer
