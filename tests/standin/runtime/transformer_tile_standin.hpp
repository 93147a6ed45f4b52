// SPDX-License-Identifier: Apache-2.0
// Included by transformer/kernels/tile.hpp when CUDA's runtime is the stand-in.
#pragma once

#include "tests/support/emulated_tile.hpp"
