// SPDX-License-Identifier: Apache-2.0
// Connects a rank to rank 0, and verifies that it is rank 0.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "fsdp/comm/common/handshake.hpp"
#include "fsdp/comm/common/secret.hpp"
#include "fsdp/comm/common/tcp_socket.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

/// Connects to rank 0, and tries again until the deadline if somebody else is there, or nobody
/// answers.
/// @param variables  that name the place, for messages
/// @throws PeerError at the deadline, with the last reason
inline Socket knock(std::string const& host, int port, std::string_view variables, std::uint64_t group, Claim claim,
                    Secret const& secret, Clock::time_point deadline) {
  auto const since = Clock::now();
  auto const who = formatted("{} port {}", host, port);
  auto pause = std::chrono::milliseconds(20);
  auto patience = std::chrono::seconds(2);  // with somebody who has not proven to be rank 0
  for (;; patience *= 2) {
    std::string reason;
    try {
      Socket socket = connect_to(host, port, deadline);
      auto const unproven = std::min(deadline, Clock::now() + patience);
      detail::Hello hello;
      hello.group = group;
      hello.claim = claim;
      hello.nonce = random_bytes();
      hello.signature = secret.sign(detail::signed_text("hello", hello));
      socket.send(&hello, sizeof(hello), unproven, who);
      detail::Challenge challenge;
      auto const hear = [&](void* part, std::size_t bytes) {
        try {
          socket.receive(part, bytes, unproven, who);
        } catch (PeerError const& error) {
          fail<PeerError>("{}, and did not prove that it is rank 0 (is FSDP_SECRET_FILE the same on all ranks?)",
                          error.what());
        }
      };
      hear(&challenge.magic, sizeof(challenge.magic));  // somebody else may say less than a challenge, and wait
      if (!detail::has_magic(challenge.magic)) fail<PeerError>("the process at {} does not belong to this run", who);
      hear(&challenge.nonce, sizeof(challenge) - sizeof(challenge.magic));
      if (!secret.has_signed(detail::signed_text("challenge", hello, challenge.nonce), challenge.signature))
        fail<PeerError>("the process at {} does not have this rank's secret (FSDP_SECRET_FILE)", who);
      detail::Proof const proof{secret.sign(detail::signed_text("proof", hello, challenge.nonce))};
      socket.send(&proof, sizeof(proof), deadline, who);
      char answer{};
      try {
        socket.receive(&answer, 1, deadline, who);
      } catch (PeerError const&) {
        fail<PeerError>(
            "rank 0 at {} refused this process as rank {} of {}: another process has this rank, or the group "
            "has another size",
            who, claim.rank, claim.size);
      }
      if (answer != detail::welcome) fail<PeerError>("the process at {} does not belong to this run", who);
      return socket;
    } catch (PeerError const& error) {
      reason = error.what();
    }
    if (Clock::now() + pause >= deadline)
      fail<PeerError>("{}; expected rank 0 there{}, which listens until every rank has connected once; waited {:.1f} s",
                      reason, variables, std::chrono::duration<double>(Clock::now() - since).count());
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
