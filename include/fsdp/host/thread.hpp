// SPDX-License-Identifier: Apache-2.0
// Threads of streams and of ranks.
#pragma once

#include <thread>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::host {

/// A thread that calls `main(context)`. One type of callable for all: std::thread is compiled for each anew.
/// @throws std::system_error if it cannot be started
inline std::thread start_thread(void (*main)(void*), void* context) { return std::thread(main, context); }

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::host
