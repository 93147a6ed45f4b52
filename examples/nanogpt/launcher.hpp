// SPDX-License-Identifier: Apache-2.0
// What a process settles before it computes: its cores, its deadline.
#pragma once

#include <chrono>

#include "settings.hpp"

namespace nanogpt {

/// Gives OpenBLAS this process's part of the cores, unless OPENBLAS_NUM_THREADS says otherwise.
/// @param ranks_here  ranks that share this machine
void divide_cores(int ranks_here);

/// How long a rank waits for its peers: the setting of that name, at least 1 ms.
std::chrono::milliseconds collective_timeout(Settings const& settings);

}  // namespace nanogpt
