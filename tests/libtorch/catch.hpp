// SPDX-License-Identifier: Apache-2.0
// Torch and Catch2, which both define CHECK: here it is Catch2's.
#pragma once

#include <torch/torch.h>

#undef CHECK

#include "tests/catch.hpp"
