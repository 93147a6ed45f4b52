// SPDX-License-Identifier: Apache-2.0
// Trials as C++: what a failing seed prints.
#pragma once

#include <string>
#include <vector>

#include "tests/support/trial/model.hpp"

namespace trial {

/// Initialisers, as a program would write them.
std::string literal(Trial const& trial);
std::string literal(Setting const& setting);
std::string literal(Op const& op);

/// A program that runs the trial under the settings and says what differs: exit code 1 if anything does. The headers of
/// the tests that it needs are pasted into it.
std::string program(Trial const& trial, std::vector<Setting> const& settings);

}  // namespace trial
