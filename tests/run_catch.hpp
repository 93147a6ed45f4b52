// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Runs the tests that a Catch2 command line chooses. @return the exit code
int run_catch(int argc, char const* const* argv);
