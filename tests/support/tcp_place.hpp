// SPDX-License-Identifier: Apache-2.0
// Ranks of a group over TCP on the loopback.
#pragma once

#include "fsdp/detail/tcp/environment.hpp"
#include "fsdp/detail/tcp/socket.hpp"

namespace fsdp::testing {

/// A port that was free a moment ago.
inline int free_port() { return bootstrap::listen_on("127.0.0.1", 0).local_port(); }

/// A rank's place, as its environment would give it.
inline bootstrap::Environment place(int rank, int size, int port) {
  bootstrap::Environment result;
  result.rank = rank;
  result.size = size;
  result.address = "127.0.0.1";
  result.port = port;
  return result;
}

}  // namespace fsdp::testing
