// SPDX-License-Identifier: Apache-2.0
// Where Catch2 itself is compiled, if it is version 2: for every main function together, because it takes long.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include "tests/run_catch.hpp"

int run_catch(int argc, char const* const* argv) { return Catch::Session().run(argc, argv); }
