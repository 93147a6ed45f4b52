// SPDX-License-Identifier: Apache-2.0
// Catch2, version 3 or 2, through one include.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // version 2 does this itself
#else
#include <catch2/catch.hpp>
#endif
