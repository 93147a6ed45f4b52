// SPDX-License-Identifier: Apache-2.0
// Reads a process's place in a run without MPI from environment variables.
#pragma once

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>

#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

namespace detail {
/// An environment variable, or "" if it is not set.
inline std::string variable(char const* name) {
  char const* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}
/// @throws ConfigError unless the variable is a whole number in [least, most]
inline int number_variable(char const* name, int least, int most) {
  auto const text = variable(name);
  int value = 0;
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < least || value > most)
    fail<ConfigError>("{}='{}': expected a whole number from {} to {}", name, text, least, most);
  return value;
}
}  // namespace detail

/// Time that a rank waits for its peers: FSDP_TIMEOUT (seconds) where it is set, else host::wait_deadline(), ten
/// minutes.
inline std::chrono::milliseconds default_timeout() {
  if (detail::variable("FSDP_TIMEOUT").empty())
    return std::chrono::duration_cast<std::chrono::milliseconds>(host::wait_deadline());
  return std::chrono::seconds(detail::number_variable("FSDP_TIMEOUT", 1, 10'000'000));
}

/// This process's place in a run, as launchers such as torchrun give it.
struct Environment {
  int rank = 0;
  int size = 1;
  int local_rank = -1;  ///< place on this machine; -1: not given
  std::string address = "127.0.0.1";
  int port = 29500;
  std::string_view port_name = "MASTER_PORT";  ///< source of the port, for messages

  /// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Without RANK and WORLD_SIZE: a run of one rank.
  ///
  /// [Note: The port beside torchrun's] MASTER_PORT is where rank 0 listens, unless TORCHELASTIC_USE_AGENT_STORE says
  /// that torchrun's agent listens there itself, for PyTorch's processes to connect to. Then it is the next port (below
  /// the highest, the one before): each rank knows it without asking. FSDP_PORT, if set on all ranks, is taken instead.
  /// @throws ConfigError if a variable is missing beside others, or malformed
  static Environment read() {
    Environment place;
    if (!detail::variable("LOCAL_RANK").empty()) place.local_rank = detail::number_variable("LOCAL_RANK", 0, 1 << 20);
    bool const ranked = !detail::variable("RANK").empty();
    bool const sized = !detail::variable("WORLD_SIZE").empty();
    if (!ranked && !sized) return place;
    if (ranked != sized)
      fail<ConfigError>("RANK and WORLD_SIZE must both be set, but {} is not set", ranked ? "WORLD_SIZE" : "RANK");
    place.size = detail::number_variable("WORLD_SIZE", 1, 1 << 20);
    place.rank = detail::number_variable("RANK", 0, place.size - 1);
    if (place.size == 1) return place;
    place.address = detail::variable("MASTER_ADDR");
    if (place.address.empty()) fail<ConfigError>("rank {}: MASTER_ADDR is not set", place.rank);
    if (detail::variable("MASTER_PORT").empty()) fail<ConfigError>("rank {}: MASTER_PORT is not set", place.rank);
    place.port = detail::number_variable("MASTER_PORT", 1, 65535);
    if (agent_listens()) {
      place.port += place.port < 65535 ? 1 : -1;
      place.port_name = "beside MASTER_PORT, which is torchrun's agent's";
    }
    if (!detail::variable("FSDP_PORT").empty()) {
      place.port = detail::number_variable("FSDP_PORT", 1, 65535);
      place.port_name = "FSDP_PORT";
    }
    return place;
  }

 private:
  static bool agent_listens() {
    auto const text = detail::variable("TORCHELASTIC_USE_AGENT_STORE");
    return text == "True" || text == "true" || text == "1";
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
