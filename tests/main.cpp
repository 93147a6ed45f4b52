// SPDX-License-Identifier: Apache-2.0
// The main function of every test program that needs nothing special at start-up.
#include "tests/run_catch.hpp"

int main(int argc, char** argv) { return run_catch(argc, argv); }
