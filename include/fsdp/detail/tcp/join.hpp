// SPDX-License-Identifier: Apache-2.0
// Ranks connect to rank 0, and both sides prove to each other that they belong to one run.
#pragma once

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/tcp/environment.hpp"
#include "fsdp/detail/tcp/socket.hpp"
#include "fsdp/error.hpp"

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

/// Connects to rank 0, and tries again until the deadline if somebody else is there, or nobody
/// answers.
/// @param variables  that name the place, for messages
/// @throws PeerError at the deadline, with the last reason
inline Socket connect_to_root(std::string const& host, int port, std::string_view variables, std::uint64_t group,
                              Claim claim, Secret const& secret, Clock::time_point deadline) {
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

namespace detail {

/// Descriptors that the process has open; 0 where there is no /proc.
inline std::size_t open_files() {
  std::error_code error;
  std::size_t count = 0;
  for (std::filesystem::directory_iterator next("/proc/self/fd", error), end; !error && next != end;
       next.increment(error))
    ++count;
  return count;
}
/// Descriptors that the process may have open, after raising the limit as far as it may.
inline std::size_t open_files_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  if (limit.rlim_cur < limit.rlim_max) {
    auto const before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return static_cast<std::size_t>(limit.rlim_cur);
}

}  // namespace detail

/// Waits for the other ranks of a group, and refuses other processes.
class Doorkeeper {
 public:
  /// @param group  names the group: others are strangers
  Doorkeeper(Socket const& listener, std::uint64_t group, int size, Secret const& secret)
      : listener_(listener), group_(group), size_(size), secret_(secret), ranks_(static_cast<std::size_t>(size)) {}

  /// The reason why the group cannot be formed, from ranks that have proven themselves; empty: none.
  std::string const& verdict() const { return verdict_; }
  /// A sentence about refused connections, for the message at the deadline; empty: there were none.
  std::string strangers() const {
    if (turned_away_ == 0) return {};
    return formatted("; {} other connections were refused, the last one from {}: {}", turned_away_, last_address_,
                     last_reason_);
  }
  /// Gives the connection to a rank to the caller. @pre `gather` has returned
  Socket take(int rank) { return std::move(of(rank)); }

  /// Lets ranks in until all have come, the verdict stands, or the deadline. All handshakes go on at once.
  /// @return whether all have come
  bool gather(Clock::time_point deadline) {
    let_in(deadline);
    if (verdict_.empty()) visitors_.clear();
    return arrived_ + 1 >= size_ && verdict_.empty();
  }
  /// Once there is a verdict: the next connection that must be told of it. The first one is the connection that caused
  /// it; others come later. @return no connection if as many as there are ranks have come, or at the deadline
  Socket next_odd(Clock::time_point deadline) {
    if (!odd_) let_in(deadline);
    return std::move(odd_);
  }

 private:
  void let_in(Clock::time_point deadline) {
    auto const since = Clock::now();
    while (arrived_ + 1 < size_ && !odd_ && Clock::now() < deadline) {
      detail::end_on_sigterm(since);
      std::vector<pollfd> entries{{listener_.descriptor(), POLLIN, 0}};
      for (auto const& visitor : visitors_) entries.push_back({visitor.socket.descriptor(), POLLIN, 0});
      auto const ready = ::poll(entries.data(), static_cast<nfds_t>(entries.size()),
                                std::min(detail::milliseconds_until(deadline), 100));
      if (ready < 0 && errno != EINTR) fail<PeerError>("poll failed: {}", detail::system_message(errno));
      if (ready <= 0) continue;
      for (std::size_t i = 1; i < entries.size() && !odd_; ++i)
        if (entries[i].revents != 0) hear(visitors_[i - 1]);
      std::erase_if(visitors_, [](Visitor const& visitor) { return !visitor.socket; });
      if (entries[0].revents != 0) accept_some();
    }
  }

  /// A connection that has not proven itself.
  struct Visitor {
    Socket socket;
    std::array<char, sizeof(detail::Hello)> bytes{};  ///< of the message in transit
    std::size_t received = 0;
    bool is_challenged = false;
    detail::Hello hello{};
    Bytes32 nonce{};  ///< ours
  };

  Socket& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  Socket const& of(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }

  /// Accepts some of the waiting connections, and lets the caller hear others in between.
  void accept_some() {
    for (int i = 0; i < 64 && !odd_; ++i) {
      Socket socket(::accept4(listener_.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket) {
        if (errno != EMFILE && errno != ENFILE) return;
        if (visitors_.empty())
          fail<ResourceError>("rank 0 of {} cannot accept a connection: {} (ulimit -n)", size_,
                              detail::system_message(errno));
        send_oldest_away("there are too many open files");
        continue;
      }
      socket.tune();
      if (visitors_.size() >= most_visitors()) send_oldest_away("others came before it had proven anything");
      visitors_.push_back(Visitor{std::move(socket)});
      hear(visitors_.back());  // a rank's hello comes with its connection
      if (!visitors_.back().socket) visitors_.pop_back();
    }
  }
  /// Closes the oldest visitor. Visitors whose hello was believed stay while there are others.
  void send_oldest_away(std::string_view reason) {
    auto oldest = std::find_if(visitors_.begin(), visitors_.end(), [](Visitor const& v) { return !v.is_challenged; });
    if (oldest == visitors_.end()) oldest = visitors_.begin();
    if (oldest->socket) turn_away(*oldest, reason);
    visitors_.erase(oldest);
  }
  std::size_t most_visitors() const { return 4 * static_cast<std::size_t>(size_) + 64; }

  void turn_away(Visitor& visitor, std::string_view reason) {
    ++turned_away_;
    last_address_ = visitor.socket.remote_address();
    last_reason_ = reason;
    visitor.socket = {};
  }

  /// Closes a visitor that did not prove itself, and prints that once: it may be a rank with another secret, of which
  /// nothing else would be heard before the deadline.
  void turn_away_unproven(Visitor& visitor) {
    std::string_view const reason = secret_.is_known() ? "it does not have this rank's secret (FSDP_SECRET_FILE)"
                                                       : "it has a secret, and this rank has none (FSDP_SECRET_FILE)";
    turn_away(visitor, reason);
    if (std::exchange(has_warned_, true)) return;
    std::fputs(formatted("fsdp: rank 0 of {} refused a process at {}: {}\n", size_, last_address_, reason).c_str(),
               stderr);
  }

  /// Receives the available bytes of a visitor.
  void hear(Visitor& visitor) {
    auto const expected = visitor.is_challenged ? sizeof(detail::Proof) : sizeof(detail::Hello);
    auto const received =
        ::recv(visitor.socket.descriptor(), visitor.bytes.data() + visitor.received, expected - visitor.received, 0);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (received <= 0) return turn_away(visitor, "it closed the connection");
    visitor.received += static_cast<std::size_t>(received);
    if (visitor.received < expected) return;
    visitor.received = 0;
    if (visitor.is_challenged) return admit(visitor);
    challenge(visitor);
  }

  void challenge(Visitor& visitor) {
    auto& hello = visitor.hello;
    std::memcpy(&hello, visitor.bytes.data(), sizeof(hello));
    if (!detail::has_magic(hello.magic)) return turn_away(visitor, "it is no rank of this program");
    if (!secret_.has_signed(detail::signed_text("hello", hello), hello.signature)) return turn_away_unproven(visitor);
    if (hello.group != group_) return turn_away(visitor, "it belongs to another group");
    if (!nonces_.insert(hello.nonce).second) return turn_away(visitor, "it repeats what a rank has said");
    oldest_nonces_.push_back(hello.nonce);
    if (nonces_.size() > most_visitors()) {
      nonces_.erase(oldest_nonces_.front());
      oldest_nonces_.pop_front();
    }
    visitor.nonce = random_bytes();
    detail::Challenge answer;
    answer.nonce = visitor.nonce;
    answer.signature = secret_.sign(detail::signed_text("challenge", hello, visitor.nonce));
    visitor.is_challenged = true;
    if (::send(visitor.socket.descriptor(), &answer, sizeof(answer), MSG_NOSIGNAL) != sizeof(answer))
      turn_away(visitor, "it does not take an answer");
  }

  void admit(Visitor& visitor) {
    detail::Proof proof;
    std::memcpy(&proof, visitor.bytes.data(), sizeof(proof));
    if (!secret_.has_signed(detail::signed_text("proof", visitor.hello, visitor.nonce), proof.signature))
      return turn_away_unproven(visitor);
    auto const [rank, size] = visitor.hello.claim;
    bool const proven = secret_.is_known();
    if (!verdict_.empty()) {  // this one is told of it too
    } else if (size != size_ || rank < 1 || rank >= size_) {
      auto text = formatted("rank 0 belongs to a group of {}, a peer says that it is rank {} of {}", size_, rank, size);
      if (!proven) return turn_away(visitor, text);
      verdict_ = std::move(text);
    } else if (of(rank) && !of(rank).is_closed()) {
      auto text = formatted("two processes say that they are rank {} of {}, at {} and at {}: expected every RANK once",
                            rank, size_, of(rank).remote_address(), visitor.socket.remote_address());
      if (!proven) return turn_away(visitor, text);
      verdict_ = std::move(text);
    }
    if (::send(visitor.socket.descriptor(), &detail::welcome, 1, MSG_NOSIGNAL) != 1)
      return turn_away(visitor, "it closed the connection");
    if (!verdict_.empty()) {
      ++arrived_;
      odd_ = std::move(visitor.socket);
      return;
    }
    if (!of(rank)) ++arrived_;
    of(rank) = std::move(visitor.socket);
  }

  Socket const& listener_;
  std::uint64_t group_;
  int size_;
  Secret const& secret_;
  std::vector<Socket> ranks_;     ///< [0] is not used
  int arrived_ = 0;               ///< connections that have proven themselves
  std::deque<Visitor> visitors_;  ///< the oldest first
  std::set<Bytes32> nonces_;      ///< of hellos that were believed
  std::deque<Bytes32> oldest_nonces_;
  std::string verdict_;
  Socket odd_;  ///< has not been told of the verdict
  std::int64_t turned_away_ = 0;
  bool has_warned_ = false;
  std::string last_address_, last_reason_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
