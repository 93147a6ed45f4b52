// SPDX-License-Identifier: Apache-2.0
// What a process has of its own, and its ranks share: cores, deadline, signals.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "settings.hpp"

namespace nanogpt {

/// Gives OpenBLAS this process's part of the cores, unless OPENBLAS_NUM_THREADS says otherwise.
/// @param ranks_here  ranks that share this machine
void divide_cores(int ranks_here);

/// How long a rank waits for its peers: the setting of that name, at least 1 ms.
std::chrono::milliseconds collective_timeout(Settings const& settings);

/// The iteration that training has come to, for the message that SIGTERM leaves behind; -1 before.
inline std::atomic<std::int64_t> current_iteration{-1};

}  // namespace nanogpt
