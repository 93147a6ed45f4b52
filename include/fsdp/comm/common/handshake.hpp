// SPDX-License-Identifier: Apache-2.0
// Messages by which a rank and rank 0 prove to each other that they belong to one run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "fsdp/comm/common/secret.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

// [Note: The door]
// A rank that connects says `Hello`: its rank, the size of the group, which group, and a nonce, signed. Rank 0 answers
// those whose hello it believes, and nobody else, with `Challenge`: its own nonce, and a signature over both nonces.
// The rank answers with `Proof`: another signature over both. Now each side knows that the other one has the secret and
// is there now. A rank that is let in is told so, in one byte. Who says something else is disconnected, and nothing of
// what it has said is used.
//
// Without a secret the signatures are zeros, and whoever knows these messages is believed.

/// A connecting rank's claim: its rank, the size of the group, and which group.
struct Claim {
  std::int32_t rank = 0, size = 0;
};

namespace detail {

struct Hello {
  char magic[8] = {'f', 's', 'd', 'p', 't', 'c', 'p', '3'};
  std::uint64_t group = 0;
  Claim claim;
  Bytes32 nonce{};
  Bytes32 signature{};
};
struct Challenge {
  char magic[8] = {'f', 's', 'd', 'p', 't', 'c', 'p', '3'};
  Bytes32 nonce{};
  Bytes32 signature{};
};
struct Proof {
  Bytes32 signature{};
};
inline constexpr char welcome = 'w';  ///< rank 0's last word: the rank is in
static_assert(sizeof(Hello) == 88 && sizeof(Challenge) == 72 && std::is_trivially_copyable_v<Hello>);

/// The signed text of one of the three messages.
/// @param role  "hello", "challenge" or "proof": no signature serves in another's place
/// @param answer  the nonce of rank 0; zeros in a hello, which comes before it
inline std::string signed_text(std::string_view role, Hello const& hello, Bytes32 const& answer = {}) {
  std::string text(role);
  auto const add = [&](auto const& value) { text.append(reinterpret_cast<char const*>(&value), sizeof(value)); };
  add(hello.magic), add(hello.group), add(hello.claim), add(hello.nonce), add(answer);
  return text;
}

inline bool has_magic(char const (&magic)[8]) { return std::equal(magic, magic + sizeof(magic), Hello{}.magic); }

}  // namespace detail

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
