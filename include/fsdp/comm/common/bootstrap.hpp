// SPDX-License-Identifier: Apache-2.0
// How processes without MPI find each other: rank and address from the environment, texts exchanged over TCP.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/comm/common/tcp_socket.hpp"
#include "fsdp/comm/common/text.hpp"
#include "fsdp/error.hpp"
#include "fsdp/host/backoff.hpp"

namespace fsdp::bootstrap {

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

/// How long a rank waits for its peers: FSDP_TIMEOUT (seconds) where it is set, else host::wait_deadline(), ten
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
    if (ranked != sized) fail<ConfigError>("RANK and WORLD_SIZE: {} is not set", ranked ? "WORLD_SIZE" : "RANK");
    place.size = detail::number_variable("WORLD_SIZE", 1, 1 << 20);
    place.rank = detail::number_variable("RANK", 0, place.size - 1);
    if (place.size == 1) return place;
    place.address = detail::variable("MASTER_ADDR");
    if (place.address.empty()) fail<ConfigError>("rank {}: MASTER_ADDR is not set", place.rank);
    if (detail::variable("MASTER_PORT").empty()) fail<ConfigError>("rank {}: MASTER_PORT is not set", place.rank);
    place.port = detail::number_variable("MASTER_PORT", 1, 65535);
    if (agent_listens()) place.port += place.port < 65535 ? 1 : -1;
    if (!detail::variable("FSDP_PORT").empty()) place.port = detail::number_variable("FSDP_PORT", 1, 65535);
    return place;
  }

 private:
  static bool agent_listens() {
    auto const text = detail::variable("TORCHELASTIC_USE_AGENT_STORE");
    return text == "True" || text == "true" || text == "1";
  }
};

/// A group of processes that exchange texts: every rank holds one connection to the group's rank 0.
///
/// Each group uses one file descriptor per rank on its rank 0 (`ulimit -n`). The network is trusted: connections are
/// neither encrypted nor authenticated, and are only checked to belong to this group.
class TcpGroup {
 public:
  /// Rank 0 listens on `place.port`; the others connect to it, and try again until the timeout.
  /// @throws PeerError if a rank does not arrive; ConfigError if ranks disagree about the group or the port is taken
  /// @note Collective: yes.
  explicit TcpGroup(Environment const& place, std::chrono::milliseconds timeout = default_timeout())
      : rank_(place.rank), size_(place.size), timeout_(timeout) {
    if (size_ == 1) return;
    if (rank_ == 0) {
      gather_peers(listen_on(place.address, place.port), 0);
    } else {
      join(place.address, place.port, 0);
    }
  }

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// All-gathers a text. Blocks until every rank has come.
  /// @param what the texts are, in a word or two: equal on all ranks
  /// @throws OrderError on every rank if their `what` differ; PeerError if a rank ended or is late. The group cannot be
  /// used afterwards
  /// @note Collective: yes.
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    if (size_ == 1) return {mine};
    FSDP_EXPECTS(!peers_.empty(), "rank {}: this group of {} ranks has failed and cannot be used", rank_, size_);
    auto const deadline = Clock::now() + timeout_;
    ++sequence_;
    try {
      return rank_ == 0 ? serve(mine, comm::Text(what), deadline) : ask(mine, comm::Text(what), deadline);
    } catch (OrderError const& error) {
      if (rank_ == 0) tell_failure(disagreement, error.what());
      peers_.clear();
      fail<OrderError>("rank {} of {}: {}", rank_, size_, error.what());
    } catch (Error const& error) {
      if (rank_ == 0) tell_failure(failure, error.what());
      peers_.clear();  // the others learn of it at once, instead of at their deadlines
      fail<PeerError>("rank {} of {}: exchange {}: {}", rank_, size_, sequence_, error.what());
    }
  }

  /// The ranks of equal color, ordered by key, then by rank.
  /// @note Collective: yes.
  TcpGroup split(int color, int key, std::string_view name) {
    auto const own_host = reachable_address();
    auto const what = comm::split_of(name);
    auto const wishes = exchange(formatted("{} {} {}", color, key, own_host), what);
    std::vector<std::pair<int, int>> members;  // key, rank
    for (int rank = 0; rank < size_; ++rank) {
      auto const wish = words(wishes[static_cast<std::size_t>(rank)]);
      if (std::stoi(wish[0]) == color) members.emplace_back(std::stoi(wish[1]), rank);
    }
    std::sort(members.begin(), members.end());
    auto const me = std::find(members.begin(), members.end(), std::pair(key, rank_));
    TcpGroup group(static_cast<int>(me - members.begin()), static_cast<int>(members.size()), timeout_);
    bool const hosts = group.size_ > 1 && group.rank_ == 0;
    // Who reaches rank 0 by the loopback is on rank 0's machine, and others reach it where they reach rank 0.
    std::string const host = is_loopback(own_host) ? words(wishes[0])[2] : own_host;
    Socket const listener = hosts ? listen_on(host, 0) : Socket();
    std::uint64_t const token = hosts ? std::random_device{}() + std::uint64_t{1} : 0;
    auto const doors = exchange(hosts ? formatted("{} {} {}", listener.local_port(), token, host) : "", what);
    if (group.size_ == 1) return group;
    if (hosts) {
      group.gather_peers(listener, token);
    } else {
      auto const door = words(doors[static_cast<std::size_t>(members.front().second)]);
      group.join(door[2], std::stoi(door[0]), std::stoull(door[1]));
    }
    return group;
  }

 private:
  struct Hello {
    char magic[8] = {'f', 's', 'd', 'p', 't', 'c', 'p', '1'};
    std::uint64_t token = 0;
    std::int32_t rank = 0;
    std::int32_t size = 0;
    bool same_kind(Hello const& other) const {
      return std::equal(magic, magic + sizeof(magic), other.magic) && token == other.token;
    }
  };
  struct Header {
    std::uint64_t sequence = 0;
    std::uint64_t bytes = 0;
    comm::Text what;
  };
  static constexpr std::uint64_t most_bytes = std::uint64_t{1} << 32;
  // In a header, instead of a sequence number: the text says why rank 0 gave up.
  static constexpr std::uint64_t failure = ~std::uint64_t{0};
  static constexpr std::uint64_t disagreement = failure - 1;

  TcpGroup(int rank, int size, std::chrono::milliseconds timeout) : rank_(rank), size_(size), timeout_(timeout) {}

  /// Three words separated by single spaces.
  static std::array<std::string, 3> words(std::string const& text) {
    auto const first = text.find(' ');
    auto const second = first == std::string::npos ? first : text.find(' ', first + 1);
    if (second == std::string::npos) fail<PeerError>("a peer sent '{}': expected three words", text);
    return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
  }
  /// Where peers reach this rank, as its connections tell: not the loopback, if there is another.
  std::string reachable_address() const {
    std::string address = "127.0.0.1";
    for (auto const& socket : peers_) {
      address = socket.local_address();
      if (!is_loopback(address)) break;
    }
    return address;
  }
  static std::string rank_name(int rank) { return formatted("rank {}", rank); }
  Socket& peer(int rank) { return peers_[static_cast<std::size_t>(rank - 1)]; }

  /// Rank 0: waits for every other rank, then tells all of them that the group stands, or why it does not.
  void gather_peers(Socket const& listener, std::uint64_t token) {
    auto const deadline = Clock::now() + timeout_;
    peers_.resize(static_cast<std::size_t>(size_ - 1));
    std::string verdict;
    for (int arrived = 1; arrived < size_ && verdict.empty();) {
      Socket socket = accept_from(listener, deadline);
      if (!socket) {
        std::string missing;
        for (int rank = 1; rank < size_; ++rank)
          if (!peer(rank)) missing += formatted("{}{}", missing.empty() ? "" : ", ", rank);
        fail<PeerError>("rank 0 of {}: these ranks did not arrive in {} s: {}", size_,
                        std::chrono::duration<double>(timeout_).count(), missing);
      }
      Hello expected;
      expected.token = token;
      Hello hello;
      try {
        socket.receive(&hello, sizeof(hello), std::min(deadline, Clock::now() + std::chrono::seconds(5)), "a stranger");
      } catch (PeerError const&) {
        continue;  // not one of ours
      }
      if (!hello.same_kind(expected)) continue;
      if (hello.size != size_ || hello.rank < 1 || hello.rank >= size_) {
        verdict = formatted("rank 0 belongs to a group of {}, a peer says that it is rank {} of {}", size_, hello.rank,
                            hello.size);
      } else if (peer(hello.rank)) {
        verdict = formatted("two processes say that they are rank {} of {}", hello.rank, size_);
      } else {
        peer(hello.rank) = std::move(socket);
        ++arrived;
        continue;
      }
      try {
        tell(socket, 0, verdict, deadline, "a peer");
      } catch (PeerError const&) {  // it has gone; the verdict stands
      }
    }
    for (int rank = 1; rank < size_; ++rank)
      if (peer(rank)) tell(peer(rank), 0, verdict, deadline, rank_name(rank));
    if (!verdict.empty()) fail<ConfigError>("{}", verdict);
  }

  void join(std::string const& host, int port, std::uint64_t token) {
    auto const deadline = Clock::now() + timeout_;
    std::string verdict;
    try {
      peers_.push_back(connect_to(host, port, deadline));
      Hello hello;
      hello.token = token;
      hello.rank = rank_;
      hello.size = size_;
      peers_.front().send(&hello, sizeof(hello), deadline, "rank 0");
      // Rank 0 answers when everyone has come, or fails at its own deadline and closes; it may have begun later.
      verdict = hear(peers_.front(), 0, deadline + timeout_, "rank 0");
    } catch (PeerError const& error) {
      peers_.clear();
      fail<PeerError>("rank {} of {}: {}", rank_, size_, error.what());
    }
    if (!verdict.empty()) fail<ConfigError>("rank {} of {}: {}", rank_, size_, verdict);
  }

  std::vector<std::string> serve(std::string const& mine, comm::Text const& what, Clock::time_point deadline) {
    std::vector<std::string> texts(static_cast<std::size_t>(size_));
    texts[0] = mine;
    for (int rank = 1; rank < size_; ++rank)
      texts[static_cast<std::size_t>(rank)] = hear(peer(rank), sequence_, deadline, rank_name(rank), &what);
    // The answer: every text's length, then the texts.
    std::string answer;
    for (auto const& text : texts) {
      std::uint64_t const bytes = text.size();
      answer.append(reinterpret_cast<char const*>(&bytes), sizeof(bytes));
    }
    for (auto const& text : texts) answer += text;
    for (int rank = 1; rank < size_; ++rank)
      tell(peer(rank), sequence_, answer, Clock::now() + timeout_, rank_name(rank));
    return texts;
  }

  std::vector<std::string> ask(std::string const& mine, comm::Text const& what, Clock::time_point deadline) {
    tell(peers_.front(), sequence_, mine, deadline, "rank 0", what);
    // Rank 0 waits for the slowest rank up to its own deadline; this rank lets it report who that is.
    auto const answer = hear(peers_.front(), sequence_, deadline + std::chrono::seconds(5), "rank 0");
    std::vector<std::string> texts(static_cast<std::size_t>(size_));
    std::size_t offset = texts.size() * sizeof(std::uint64_t);
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      std::uint64_t bytes = 0;
      if (offset > answer.size()) fail<PeerError>("rank 0 sent a malformed answer");
      std::copy_n(answer.data() + rank * sizeof(bytes), sizeof(bytes), reinterpret_cast<char*>(&bytes));
      if (bytes > answer.size() - offset) fail<PeerError>("rank 0 sent a malformed answer");
      texts[rank] = answer.substr(offset, bytes);
      offset += bytes;
    }
    return texts;
  }

  void tell_failure(std::uint64_t kind, std::string const& reason) {
    for (auto const& socket : peers_) {
      try {
        tell(socket, kind, reason, Clock::now() + std::chrono::seconds(1), "a peer");
      } catch (PeerError const&) {  // that one has gone
      }
    }
    auto const deadline = Clock::now() + std::chrono::seconds(1);
    for (auto const& socket : peers_) socket.finish(deadline);
  }

  static void tell(Socket const& socket, std::uint64_t sequence, std::string const& text, Clock::time_point deadline,
                   std::string_view who, comm::Text const& what = {}) {
    Header const header{sequence, text.size(), what};
    socket.send(&header, sizeof(header), deadline, who);
    socket.send(text.data(), text.size(), deadline, who);
  }
  /// @param what if given, what this rank exchanges: OrderError if the other side's differs
  static std::string hear(Socket const& socket, std::uint64_t sequence, Clock::time_point deadline,
                          std::string_view who, comm::Text const* what = nullptr) {
    Header header;
    socket.receive(&header, sizeof(header), deadline, who);
    if ((header.sequence != sequence && header.sequence < disagreement) || header.bytes > most_bytes)
      fail<PeerError>("{} is at exchange {}, expected {}", who, header.sequence, sequence);
    std::string text(header.bytes, '\0');
    socket.receive(text.data(), text.size(), deadline, who);
    if (header.sequence == failure) fail<PeerError>("{}", text);
    if (header.sequence == disagreement) fail<OrderError>("{}", text);
    if (what != nullptr && !(header.what == *what))
      fail<OrderError>("ranks disagree about a control call: rank 0 exchanges \"{}\", {} exchanges \"{}\"",
                       what->view(), who, header.what.view());
    return text;
  }

  int rank_;
  int size_;
  std::chrono::milliseconds timeout_;
  std::vector<Socket> peers_;  // rank 0: of rank i + 1; others: of rank 0
  std::uint64_t sequence_ = 0;
};

}  // namespace fsdp::bootstrap
