// SPDX-License-Identifier: Apache-2.0
// For kernels of users: blocks of threads, which run on the host and on GPUs, and functions of elements, arrays and
// random numbers. A kernel is an empty type; see [Note: Kernels from one source].
#pragma once

#include "fsdp/detail/kernels/block.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/random.hpp"
