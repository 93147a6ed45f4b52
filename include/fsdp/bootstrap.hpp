// SPDX-License-Identifier: Apache-2.0
// Start of a run without MPI: processes connect to rank 0, and exchange texts over TCP.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/detail/comm/messages.hpp"
#include "fsdp/detail/tcp/environment.hpp"
#include "fsdp/detail/tcp/join.hpp"
#include "fsdp/detail/tcp/socket.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap::detail {

/// Answers of rank 0: one for every rank, or one for all.
using Answers = std::vector<std::string>;

/// @param rank  who has sent it
template <class T>
T number(std::string const& text, int rank) {
  T value{};
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size())
    fail<PeerError>("rank {} sent '{}', expected a whole number: do all ranks run the same version of this program?",
                    rank, text);
  return value;
}

/// Three words separated by single spaces.
inline std::array<std::string, 3> words(std::string const& text) {
  auto const first = text.find(' ');
  auto const second = first == std::string::npos ? first : text.find(' ', first + 1);
  if (second == std::string::npos)
    fail<PeerError>("the ranks' first messages: expected three words, got '{}'; does another program use this port?",
                    text);
  return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
}

/// Every rank's rank and number of ranks in its part of a split, and rank 0's host.
/// @param wishes  color, key and host of every rank   @param first  see split
inline Answers places(std::vector<std::string> const& wishes, std::vector<int>& first) {
  struct Wish {
    int color, key, rank;
    auto operator<=>(Wish const&) const = default;
  };
  std::vector<Wish> sorted;
  for (int rank = 0; auto const& wish : wishes) {
    auto const word = words(wish);
    sorted.push_back({number<int>(word[0], rank), number<int>(word[1], rank), rank});
    ++rank;
  }
  std::sort(sorted.begin(), sorted.end());
  Answers answers(wishes.size());
  first.resize(wishes.size());
  auto const host = words(wishes[0])[2];
  for (auto part = sorted.begin(); part != sorted.end();) {
    auto const end = std::find_if(part, sorted.end(), [&](Wish const& wish) { return wish.color != part->color; });
    for (auto member = part; member != end; ++member) {
      auto const rank = static_cast<std::size_t>(member->rank);
      answers[rank] = formatted("{} {} {}", member - part, end - part, host);
      first[rank] = part->rank;
    }
    part = end;
  }
  return answers;
}

/// Every text's length, then the texts.
inline std::string packed(std::vector<std::string> const& texts) {
  std::string all;
  for (auto const& text : texts) {
    std::uint64_t const bytes = text.size();
    all.append(reinterpret_cast<char const*>(&bytes), sizeof(bytes));
  }
  for (auto const& text : texts) all += text;
  return all;
}
inline std::vector<std::string> unpacked(int size, std::string const& all) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  std::size_t offset = texts.size() * sizeof(std::uint64_t);
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    std::uint64_t bytes = 0;
    if (offset <= all.size())
      std::copy_n(all.data() + rank * sizeof(bytes), sizeof(bytes), reinterpret_cast<char*>(&bytes));
    if (offset > all.size() || bytes > all.size() - offset)
      fail<PeerError>(
          "rank 0 sent a malformed answer to an exchange: do all ranks run the same version of this program?");
    texts[rank] = all.substr(offset, bytes);
    offset += bytes;
  }
  return texts;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap::detail

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

/// A group of processes that exchange texts: every rank holds one connection to the group's rank 0.
///
/// Each group uses one file descriptor per rank on its rank 0 (`ulimit -n`). With a secret (see Secret::read) ranks
/// prove who they are when they connect, see [Note: The door]; what they say then is neither encrypted nor signed.
class TcpGroup {
 public:
  /// Rank 0 listens on `place.port`; the others connect to it, and try again until the timeout.
  /// @throws PeerError if a rank does not arrive; ConfigError if ranks disagree about the group or the port is taken
  /// @note Collective: yes.
  explicit TcpGroup(Environment const& place, std::chrono::milliseconds timeout = default_timeout(),
                    Secret secret = Secret::read())
      : TcpGroup(place.rank, place.size, timeout, std::move(secret)) {
    if (size_ == 1) return;
    RootAddress const root{place.address, place.port, formatted(" (MASTER_ADDR, {})", place.port_name)};
    if (rank_ == 0) {
      if (!secret_.is_known() && !is_loopback(root.host))
        std::fputs(
            formatted("fsdp: rank 0 of {} listens on port {} without a secret: any process that reaches it can join; "
                      "set FSDP_SECRET_FILE on all ranks\n",
                      size_, root.port)
                .c_str(),
            stderr);
      gather_peers(listen_at(root), root, 0);
    } else {
      join(root, 0);
    }
  }

  int rank() const { return rank_; }  ///< this process's rank, from 0
  int size() const { return size_; }  ///< number of ranks

  /// All-gathers a text. Blocks until every rank has come.
  /// @param what the texts are, in a word or two: equal on all ranks
  /// @throws OrderError on every rank if their `what` differ; PeerError if a rank ended or is late. The group cannot be
  /// used afterwards
  /// @note Collective: yes.
  std::vector<std::string> exchange(std::string const& mine, std::string_view what) {
    if (size_ == 1) return {mine};
    std::vector<std::string> texts;
    together([&] {
      texts = detail::unpacked(size_, ask(mine, what, [](auto const& all) { return Answers{detail::packed(all)}; }));
    });
    return texts;
  }

  /// Gathers texts on rank 0, and sends its answer to all ranks: see comm::ask_first_rank.
  template <class Answer>
  std::string ask_first_rank(std::string const& mine, std::string_view what, Answer const& answer) {
    if (size_ == 1) return answer(std::vector<std::string>{mine});
    std::string told;
    together([&] { told = ask(mine, what, [&](auto const& texts) { return Answers{answer(texts)}; }); });
    return told;
  }

  /// The ranks of equal color, ordered by key, then by rank.
  /// @note Collective: yes.
  TcpGroup split(int color, int key, std::string_view name) {
    auto const own_host = reachable_address();
    auto const what = comm::split_of(name);
    std::vector<int> first;  // on rank 0: the rank of this group that is rank 0 of the new one, for each rank
    std::array<std::string, 3> place{"0", "1", own_host};
    if (size_ > 1)
      together([&] {
        auto const wish = formatted("{} {} {}", color, key, own_host);
        place = detail::words(ask(wish, what, [&](auto const& wishes) { return detail::places(wishes, first); }));
      });
    TcpGroup group(detail::number<int>(place[0], 0), detail::number<int>(place[1], 0), timeout_, secret_);
    bool const hosts = group.size_ > 1 && group.rank_ == 0;
    // A rank that reaches rank 0 by the loopback is on rank 0's machine; other ranks reach it by rank 0's address.
    std::string const host = is_loopback(own_host) ? place[2] : own_host;
    Socket const listener = hosts ? listen_on(host, 0) : Socket();
    std::uint64_t const token = hosts ? std::random_device{}() + std::uint64_t{1} : 0;
    std::string root;
    if (size_ > 1)
      together([&] {
        auto const own = hosts ? formatted("{} {} {}", listener.local_port(), token, host) : std::string();
        root = ask(own, what, [&](auto const& addresses) {
          Answers answers;
          for (auto const rank : first) answers.push_back(addresses[static_cast<std::size_t>(rank)]);
          return answers;
        });
      });
    if (group.size_ == 1) return group;
    if (hosts) {
      group.gather_peers(listener, {host, listener.local_port(), ""}, token);
    } else {
      auto const at = detail::words(root);
      group.join({at[2], detail::number<int>(at[0], 0), ""}, detail::number<std::uint64_t>(at[1], 0));
    }
    return group;
  }

 private:
  using Answers = detail::Answers;
  /// Address of a group's rank 0.
  struct RootAddress {
    std::string host;
    int port;
    std::string variables;  ///< the variables that name the address, for messages
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

  TcpGroup(int rank, int size, std::chrono::milliseconds timeout, Secret secret)
      : rank_(rank), size_(size), timeout_(timeout), secret_(std::move(secret)) {}

  /// Address at which peers reach this rank, taken from its connections: not the loopback, if there is another.
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

  Socket listen_at(RootAddress const& root) const {
    try {
      return listen_on(root.host, root.port);
    } catch (ConfigError const& error) {
      fail<ConfigError>("rank 0 of {}: {}{}; choose a port that no other program and no other rank 0 uses", size_,
                        error.what(), root.variables);
    }
  }

  /// Rank 0: waits for every other rank, then tells all of them that the group stands, or why it does not.
  void gather_peers(Socket const& listener, RootAddress const& root, std::uint64_t token) {
    auto const deadline = Clock::now() + timeout_;
    auto const free = static_cast<std::size_t>(size_) + 64;
    if (auto const needed = free + detail::open_files(), limit = detail::open_files_limit(); limit < needed)
      fail<ConfigError>(
          "rank 0 of {} holds a connection to every rank: expected a limit of at least {} open files (ulimit -n), got "
          "{}",
          size_, needed, limit);
    Doorkeeper keeper(listener, token, size_, secret_);
    bool const complete = keeper.gather(deadline);
    for (int rank = 1; rank < size_; ++rank) peers_.push_back(keeper.take(rank));
    if (!complete && keeper.verdict().empty()) {
      std::string missing;
      for (int rank = 1; rank < size_; ++rank)
        if (!peer(rank)) missing += formatted("{}{}", missing.empty() ? "" : ", ", rank);
      auto const text =
          formatted("rank 0 of {}: these ranks did not connect within {} s: {}; expected them at {} port {}{}{}", size_,
                    std::chrono::duration<double>(timeout_).count(), missing, root.host, root.port, root.variables,
                    keeper.strangers());
      tell_failure(failure, text);
      fail<PeerError>("{}", text);
    }
    if (keeper.verdict().empty()) {
      for (int rank = 1; rank < size_; ++rank) tell(peer(rank), 0, "", deadline, rank_name(rank));
      return;
    }
    auto const tell_verdict = [&](Socket const& socket) {
      try {
        tell(socket, 0, keeper.verdict(), Clock::now() + std::chrono::seconds(1), "a peer");
      } catch (PeerError const&) {  // it has gone; the verdict stands
      }
    };
    for (auto const& socket : peers_)
      if (socket) tell_verdict(socket);
    // Ranks that come later would wait for a rank 0 that has ended.
    auto const until = std::min(deadline, Clock::now() + std::chrono::seconds(30));
    while (auto const odd = keeper.next_odd(until)) tell_verdict(odd);
    fail<ConfigError>("rank 0 of {}: {}", size_, keeper.verdict());
  }

  void join(RootAddress const& root, std::uint64_t token) {
    auto const deadline = Clock::now() + timeout_;
    std::string verdict;
    try {
      peers_.push_back(connect_to_root(root.host, root.port, root.variables, token, {rank_, size_}, secret_, deadline));
      // Rank 0 says when everyone has come, or who has not at its own deadline; it may have begun later.
      verdict = hear(peers_.front(), 0, deadline + timeout_, "rank 0");
    } catch (PeerError const& error) {
      peers_.clear();
      fail<PeerError>("rank {} of {}: {}", rank_, size_, error.what());
    }
    if (!verdict.empty()) fail<ConfigError>("rank {} of {}: {}", rank_, size_, verdict);
  }

  /// Runs `call` of all ranks. What ends it on this rank ends the group: rank 0 tells the others why.
  template <class Call>
  void together(Call const& call) {
    FSDP_EXPECTS(!peers_.empty(),
                 "rank {}: an earlier call of this group of {} ranks has failed, so the group cannot be used any more",
                 rank_, size_);
    ++sequence_;
    try {
      call();
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

  /// Sends a text to rank 0. @param answers  called there with all texts  @return the answer for this rank
  template <class AnswersTo>
  std::string ask(std::string const& mine, std::string_view name, AnswersTo const& answers) {
    comm::Text const what(name);
    auto const deadline = Clock::now() + timeout_;
    if (rank_ != 0) {
      tell(peers_.front(), sequence_, mine, deadline, "rank 0", what);
      // Rank 0 waits for the slowest rank up to its own deadline; this rank lets it report who that is.
      auto const margin = std::max<std::chrono::milliseconds>(std::chrono::seconds(5), timeout_ / 10);
      return hear(peers_.front(), sequence_, deadline + margin, "rank 0");
    }
    std::vector<std::string> texts(static_cast<std::size_t>(size_));
    texts[0] = mine;
    for (int rank = 1; rank < size_; ++rank)
      texts[static_cast<std::size_t>(rank)] = hear(peer(rank), sequence_, deadline, rank_name(rank), &what);
    Answers const said = answers(std::as_const(texts));
    auto const to = [&](int rank) -> std::string const& {
      return said[said.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
    };
    for (int rank = 1; rank < size_; ++rank)
      tell(peer(rank), sequence_, to(rank), Clock::now() + timeout_, rank_name(rank));
    return to(0);
  }

  void tell_failure(std::uint64_t kind, std::string const& reason) {
    for (auto const& socket : peers_) {
      if (!socket) continue;  // has not come
      try {
        tell(socket, kind, reason, Clock::now() + std::chrono::seconds(1), "a peer");
      } catch (PeerError const&) {  // that one has gone
      }
    }
    auto const deadline = Clock::now() + std::chrono::seconds(1);
    for (auto const& socket : peers_)
      if (socket) socket.finish(deadline);
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
      fail<PeerError>("{} is at exchange {}, expected {}: all ranks must make the same calls in the same order", who,
                      header.sequence, sequence);
    auto text = socket.receive_text(header.bytes, deadline, who);
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
  Secret secret_;
  std::vector<Socket> peers_;  // rank 0: of rank i + 1; others: of rank 0
  std::uint64_t sequence_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
