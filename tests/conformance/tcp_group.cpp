// SPDX-License-Identifier: Apache-2.0
// The bootstrap of ranks over TCP: ranks are threads here, connected through the loopback.
// links: OpenSSL::Crypto
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"
#include "tests/support/tcp_place.hpp"

using fsdp::bootstrap::Environment;
using fsdp::bootstrap::TcpGroup;
using fsdp::testing::free_port;
using fsdp::testing::place;

namespace {

/// Runs `body(rank)` on one thread per rank; gives what each threw ("" for nothing).
template <class Body>
std::vector<std::string> on_ranks(int size, Body body) {
  std::vector<std::string> thrown(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([rank, &body, &thrown] {
      try {
        body(rank);
      } catch (std::exception const& error) {
        thrown[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return thrown;
}

bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

/// Sets a variable of the environment while it lives.
class Variable {
 public:
  Variable(char const* name, char const* value) : name_(name) { ::setenv(name, value, 1); }
  Variable(Variable const&) = delete;
  Variable& operator=(Variable const&) = delete;
  ~Variable() { ::unsetenv(name_); }

 private:
  char const* name_;
};

constexpr auto patience = std::chrono::hours(1);  // never reached, whatever stops this machine for a while

/// The error of a rank that comes alone; "" if it was let in.
std::string arrival(Environment const& place, std::chrono::milliseconds timeout = std::chrono::milliseconds(200)) {
  try {
    TcpGroup const group(place, timeout);
  } catch (fsdp::Error const& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("texts of any length arrive at every rank, in rank order", "[tcp]") {
  for (int const size : {1, 2, 5}) {
    int const port = free_port();
    std::vector<std::vector<std::string>> got(static_cast<std::size_t>(size));
    auto const thrown = on_ranks(size, [&](int rank) {
      TcpGroup group(place(rank, size, port), patience);
      if (group.exchange("", "test") != std::vector<std::string>(static_cast<std::size_t>(size)))
        throw fsdp::Error("not empty");
      auto const big = static_cast<std::size_t>(rank) * 3'000'000u;
      got[static_cast<std::size_t>(rank)] = group.exchange(std::string(big, static_cast<char>('a' + rank)), "test");
    });
    for (auto const& text : thrown) CHECK(text == "");
    for (auto const& texts : got) {
      REQUIRE(texts.size() == static_cast<std::size_t>(size));
      for (std::size_t rank = 0; rank < texts.size(); ++rank)
        CHECK(texts[rank] == std::string(rank * 3'000'000u, static_cast<char>('a' + rank)));
    }
  }
}

TEST_CASE("a split orders ranks by key, then by rank, and splits again", "[tcp]") {
  int const port = free_port();
  std::vector<std::string> seen(5);
  auto const thrown = on_ranks(5, [&](int rank) {
    TcpGroup world(place(rank, 5, port), patience);
    TcpGroup half = world.split(rank % 2, -rank, "half");  // {4, 2, 0} and {3, 1}
    TcpGroup again = half.split(0, half.rank(), "again");
    TcpGroup alone = world.split(rank, 0, "alone");
    std::string text = std::to_string(alone.size());
    for (auto const& member : again.exchange(std::to_string(rank), "test")) text += member;
    seen[static_cast<std::size_t>(rank)] = text;
  });
  for (auto const& text : thrown) CHECK(text == "");
  CHECK(seen == std::vector<std::string>{"1420", "131", "1420", "131", "1420"});
}

TEST_CASE("a rank that does not come is named at the deadline", "[tcp]") {
  int const port = free_port();
  auto const thrown = on_ranks(3, [&](int rank) {
    if (rank != 2) TcpGroup(place(rank, 3, port), std::chrono::milliseconds(400));
  });
  auto const reason = fmt::format(
      "rank 0 of 3: these ranks did not connect within 0.4 s: 2; expected them at 127.0.0.1 port {} (MASTER_ADDR, "
      "MASTER_PORT)",
      port);
  CHECK(thrown[0] == reason);
  CHECK(thrown[1] == "rank 1 of 3: " + reason);
}

TEST_CASE("without rank 0 the others say whom they cannot reach", "[tcp]") {
  int const port = free_port();
  CHECK_THROWS_AS(TcpGroup(place(1, 2, port), std::chrono::milliseconds(200)), fsdp::PeerError);
  CHECK(contains(arrival(place(1, 2, port)), fmt::format("rank 1 of 2: cannot reach 127.0.0.1 port {}: Connection "
                                                         "refused; expected rank 0 there (MASTER_ADDR, MASTER_PORT)",
                                                         port)));
  auto nowhere = place(1, 2, port);
  nowhere.address = "no-such-machine.invalid";  // RFC 6761: a name that no resolver knows
  nowhere.port_name = "FSDP_PORT";
  auto const text = arrival(nowhere);
  CHECK(contains(text, fmt::format("rank 1 of 2: cannot reach no-such-machine.invalid port {}: the name cannot be "
                                   "resolved: ",
                                   port)));
  CHECK(contains(text, "; expected rank 0 there (MASTER_ADDR, FSDP_PORT)"));
}

TEST_CASE("who answers or is silent in rank 0's place is named at the deadline", "[tcp]") {
  auto const listener = fsdp::bootstrap::listen_on("127.0.0.1", 0);
  int const port = listener.local_port();
  auto const where = fmt::format("rank 1 of 2: 127.0.0.1 port {}", port);
  auto const begin = fsdp::bootstrap::Clock::now();
  auto const silent = arrival(place(1, 2, port));  // the system accepts for the listener
  CHECK(contains(silent, where +
                             " did not answer in time, and did not prove that it is rank 0 (is FSDP_SECRET_FILE the "
                             "same on all ranks?); expected rank 0 there (MASTER_ADDR, MASTER_PORT)"));
  CHECK(contains(silent, ", which listens until every rank has connected once; waited "));
  CHECK(fsdp::bootstrap::Clock::now() - begin >= std::chrono::milliseconds(200));

  std::thread stranger([&] {
    auto const deadline = fsdp::bootstrap::Clock::now() + patience;
    static_cast<void>(fsdp::bootstrap::accept_from(listener, deadline));  // the silent one's
    while (auto const caller = fsdp::bootstrap::accept_from(listener, deadline)) {
      char letter{};
      caller.receive(&letter, 1, deadline, "a rank");
      if (letter == 'q') return;
      caller.send("SSH-2.0-OpenSSH of somebody else\r\n", 34, deadline, "a rank");
    }
  });
  CHECK(contains(
      arrival(place(1, 2, port)),
      fmt::format("rank 1 of 2: the process at 127.0.0.1 port {} does not belong to this run; expected rank 0 there",
                  port)));
  auto const deadline = fsdp::bootstrap::Clock::now() + patience;
  fsdp::bootstrap::connect_to("127.0.0.1", port, deadline).send("q", 1, deadline, "the stranger");
  stranger.join();
}

TEST_CASE("a rank that ends is noticed by all before the deadline", "[tcp]") {
  int const port = free_port();
  auto const thrown = on_ranks(3, [&](int rank) {
    TcpGroup group(place(rank, 3, port), patience);
    group.exchange({}, "together");
    if (rank == 2) throw fsdp::Error("enough");
    group.exchange({}, "without rank 2");
  });
  CHECK(contains(thrown[0], "rank 2 closed the connection"));
  CHECK(contains(thrown[1], "rank 2 closed the connection"));
  CHECK(thrown[2] == "enough");
}

TEST_CASE("ranks that exchange different things are told, whoever is odd", "[tcp]") {
  for (int const odd : {0, 2}) {
    int const port = free_port();
    auto const thrown = on_ranks(4, [&](int rank) {
      TcpGroup group(place(rank, 4, port), patience);
      try {
        if (rank == odd) {
          static_cast<void>(group.split(0, rank, "kept group"));
        } else {
          group.exchange("text", "layouts");
        }
      } catch (fsdp::OrderError const& error) {
        throw fsdp::Error(fmt::format("order: {}", error.what()));
      }
    });
    for (auto const& text : thrown) {
      INFO(text);
      CHECK(contains(text, "order: rank "));
      CHECK(contains(text, "exchanges \"layouts\""));
      CHECK(contains(text, "exchanges \"split 'kept group'\""));
    }
  }
}

TEST_CASE("a rank that is late is named at the deadline", "[tcp]") {
  int const port = free_port();
  std::atomic<bool> over{false};
  auto const thrown = on_ranks(2, [&](int rank) {
    TcpGroup group(place(rank, 2, port), std::chrono::milliseconds(500));
    std::string first;
    if (rank == 0) {
      try {
        group.exchange("hello?", "test");
      } catch (std::exception const& error) {
        first = error.what();
      }
      over = true;
      if (contains(first, "rank 1 did not answer in time")) group.exchange("again", "test");
    }
    while (!over) std::this_thread::yield();
  });
  CHECK(contains(thrown[0], "has failed, so the group cannot be used any more"));
  CHECK(thrown[1] == "");
}

TEST_CASE("without a secret, ranks that disagree about the group are told at the deadline", "[tcp]") {
  int const port = free_port();
  auto const briefly = std::chrono::milliseconds(500);
  SECTION("about its size") {
    auto const thrown = on_ranks(2, [&](int rank) { TcpGroup(place(rank, 2 + rank, port), briefly); });
    INFO(thrown[0] << "\n" << thrown[1]);
    CHECK(contains(thrown[0], "rank 0 of 2: these ranks did not connect within 0.5 s: 1; "));
    CHECK(contains(thrown[0], "rank 0 belongs to a group of 2, a peer says that it is rank 1 of 3"));
    CHECK(contains(thrown[1], "refused this process as rank 1 of 3"));
  }
  SECTION("about who is who") {
    auto const thrown = on_ranks(3, [&](int rank) { TcpGroup(place(rank == 0 ? 0 : 1, 3, port), briefly); });
    INFO(thrown[0] << "\n" << thrown[1] << "\n" << thrown[2]);
    CHECK(contains(thrown[0], "rank 0 of 3: these ranks did not connect within 0.5 s: 2; "));
    CHECK(contains(thrown[0], "two processes say that they are rank 1 of 3, at 127.0.0.1 and at 127.0.0.1"));
    bool const first = contains(thrown[1], "rank 1 of 3: rank 0 of 3: these ranks did not connect");
    CHECK(contains(thrown[first ? 2 : 1], "refused this process as rank 1 of 3"));
  }
}

TEST_CASE("a stranger on the port does not disturb the ranks", "[tcp]") {
  int const port = free_port();
  auto const thrown = on_ranks(2, [&](int rank) {
    if (rank == 1) {
      auto const deadline = fsdp::bootstrap::Clock::now() + patience;
      auto const stranger = fsdp::bootstrap::connect_to("127.0.0.1", port, deadline);
      stranger.send("GET / HTTP/1.1\r\nHost: nobody\r\n\r\n", 32, deadline, "rank 0");
      TcpGroup(place(1, 2, port), patience).exchange("x", "test");
    } else {
      TcpGroup(place(0, 2, port), patience).exchange("y", "test");
    }
  });
  for (auto const& text : thrown) CHECK(text == "");
}

TEST_CASE("a split finds rank 0 whatever address it was reached at", "[tcp]") {
  for (std::string const address : {"127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1"}) {
    CAPTURE(address);
    int const port = free_port();
    std::vector<std::string> heard(2);
    std::vector<std::thread> threads;
    for (int rank : {0, 1})
      threads.emplace_back([&, rank] {
        auto at = place(rank, 2, port);
        at.address = address;
        try {
          TcpGroup world(at, std::chrono::seconds(120));
          auto pair = world.split(0, 1 - rank, "turned");
          heard[static_cast<std::size_t>(rank)] = pair.exchange(std::to_string(rank), "ranks").front();
        } catch (std::exception const& error) {
          heard[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(heard == std::vector<std::string>{"1", "1"});
  }
}

TEST_CASE("an IPv4 address is told as one, over a socket of IPv6 too", "[tcp]") {
  auto const soon = fsdp::bootstrap::Clock::now() + std::chrono::seconds(120);
  auto const listener = fsdp::bootstrap::listen_on("0.0.0.0", 0);
  auto const rank = fsdp::bootstrap::connect_to("127.0.0.1", listener.local_port(), soon);
  auto const accepted = fsdp::bootstrap::accept_from(listener, soon);
  CHECK(accepted.local_address() == "127.0.0.1");
  CHECK(accepted.remote_address() == "127.0.0.1");
}

TEST_CASE("a port that another program has on one address of the machine is taken", "[tcp]") {
  fsdp::bootstrap::Socket other;
  try {
    other = fsdp::bootstrap::listen_on("::1", 0);
  } catch (fsdp::ConfigError const&) {
    WARN("not run: this machine has no IPv6");
    return;
  }
  CHECK_THROWS_AS(fsdp::bootstrap::listen_on("0.0.0.0", other.local_port()), fsdp::ConfigError);
}

TEST_CASE("a taken port is a configuration error", "[tcp]") {
  auto const taken = fsdp::bootstrap::listen_on("127.0.0.1", 0);
  CHECK_THROWS_AS(TcpGroup(place(0, 2, taken.local_port()), patience), fsdp::ConfigError);
  CHECK(arrival(place(0, 2, taken.local_port())) ==
        fmt::format("rank 0 of 2: cannot listen on 127.0.0.1 port {}: Address already in use (MASTER_ADDR, "
                    "MASTER_PORT); choose a port that no other program and no other rank 0 uses",
                    taken.local_port()));
}

TEST_CASE("SIGTERM ends a rank that waits for others to come, whichever it is", "[tcp]") {
  int const port = free_port();
  for (int const rank : {0, 1}) {
    auto const outcome = fsdp::testing::in_child([&] {
      std::signal(SIGALRM, [](int) { fsdp::host::request_termination(); });  // as a handler of SIGTERM does
      ::ualarm(50'000, 0);
      TcpGroup(place(rank, 2, port), patience);
    });
    CHECK(outcome.code == fsdp::host::wait_terminated_exit_code);
    CHECK(contains(outcome.text, "SIGTERM during a wait: peers over TCP"));
  }
}

TEST_CASE("ranks find each other beside the agent of torchrun, which listens on MASTER_PORT", "[tcp]") {
  constexpr int size = 3;
  // Two ports, one after the other: the agent's, and one that was free a moment ago.
  fsdp::bootstrap::Socket agent;
  for (bool found = false; !found;) {
    agent = fsdp::bootstrap::listen_on("127.0.0.1", 0);
    try {
      static_cast<void>(fsdp::bootstrap::listen_on("127.0.0.1", agent.local_port() + 1));
      found = agent.local_port() < 65535;
    } catch (fsdp::ConfigError const&) {  // taken: the next try
    }
  }
  auto const port = std::to_string(agent.local_port());
  Variable const of_size("WORLD_SIZE", "3"), of_address("MASTER_ADDR", "127.0.0.1"),
      of_port("MASTER_PORT", port.c_str());
  auto const read = [](int rank) {
    Variable const of_rank("RANK", std::to_string(rank).c_str());
    return Environment::read();
  };
  for (char const* const without : {"False", "0", ""}) {
    Variable const store("TORCHELASTIC_USE_AGENT_STORE", without);
    CHECK(read(0).port == agent.local_port());
    CHECK(read(0).port_name == "MASTER_PORT");
  }
  for (char const* const with : {"True", "1"}) {
    Variable const store("TORCHELASTIC_USE_AGENT_STORE", with);
    std::vector<Environment> places;
    for (int rank = 0; rank < size; ++rank) places.push_back(read(rank));
    std::vector<std::vector<std::string>> got(size);
    auto const thrown = on_ranks(size, [&](int rank) {
      auto const own = static_cast<std::size_t>(rank);
      got[own] = TcpGroup(places[own], patience).exchange(std::to_string(rank), "test");
    });
    for (auto const& text : thrown) CHECK(text == "");
    for (auto const& texts : got) CHECK(texts == std::vector<std::string>{"0", "1", "2"});
  }
  Variable const store("TORCHELASTIC_USE_AGENT_STORE", "True");
  {
    Variable const last("MASTER_PORT", "65535");
    CHECK(read(1).port == 65534);
  }
  Variable const again("MASTER_PORT", port.c_str());
  Variable const chosen("FSDP_PORT", "12345");
  CHECK(read(2).port == 12345);
  CHECK(read(2).port_name == "FSDP_PORT");
}

TEST_CASE("the environment is read in full or not at all", "[tcp]") {
  for (char const* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "FSDP_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
    ::unsetenv(name);
  CHECK(Environment::read().size == 1);
  Variable const rank("RANK", "1");
  CHECK_THROWS_AS(Environment::read(), fsdp::ConfigError);
  Variable const size("WORLD_SIZE", "2");
  CHECK_THROWS_AS(Environment::read(), fsdp::ConfigError);
  Variable const address("MASTER_ADDR", "node0");
  Variable const port("MASTER_PORT", "70000");
  CHECK_THROWS_AS(Environment::read(), fsdp::ConfigError);
  {
    Variable const good("MASTER_PORT", "12345");
    Variable const local("LOCAL_RANK", "0");
    auto const read = Environment::read();
    CHECK((read.rank == 1 && read.size == 2 && read.local_rank == 0 && read.address == "node0" && read.port == 12345));
  }
  Variable const beyond("RANK", "2");
  CHECK_THROWS_AS(Environment::read(), fsdp::ConfigError);
}
