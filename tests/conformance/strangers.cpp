// SPDX-License-Identifier: Apache-2.0
// Strangers at the door of a group: whatever they do, and however many they are, ranks with a secret find each other,
// no stranger is answered, and memory grows with what has arrived. What happens when is given by events, not by time.
// links: OpenSSL::Crypto
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/bootstrap.hpp"
#include "tests/catch.hpp"
#include "tests/support/tcp_place.hpp"

namespace {

using namespace fsdp::bootstrap;
using fsdp::testing::free_port;
using fsdp::testing::place;

constexpr auto patience = std::chrono::seconds(120);
Clock::time_point soon() { return Clock::now() + patience; }
Secret const ours("a secret of sixteen bytes or more"), theirs("another one, as long as the first");
constexpr int ranks = 4;

/// Stands between a rank and rank 0 and passes on what they say, so that the test sees it.
class Relay {
 public:
  explicit Relay(int port) : door_(listen_on("127.0.0.1", 0)), thread_([this, port] { run(port); }) {}
  ~Relay() {
    over_ = true;
    thread_.join();
  }
  int port() const { return door_.local_port(); }
  /// Waits until rank 0 has said so many bytes.
  void wait_for_answer(std::size_t bytes) const {
    while (answered_ < bytes) std::this_thread::yield();
  }
  /// The rank's first message. @pre rank 0 has answered
  std::string hello() const { return said_.substr(0, sizeof(fsdp::bootstrap::detail::Hello)); }

 private:
  void run(int port) {
    Socket const rank = accept_from(door_, soon());
    if (!rank) return;
    Socket const first = connect_to("127.0.0.1", port, soon());
    pollfd ends[] = {{rank.descriptor(), POLLIN, 0}, {first.descriptor(), POLLIN, 0}};
    while (!over_) {
      if (::poll(ends, 2, 10) <= 0) continue;
      for (int from : {0, 1}) {
        if (ends[from].revents == 0) continue;
        char bytes[4096];
        auto const count = ::recv(ends[from].fd, bytes, sizeof(bytes), 0);
        if (count <= 0) return;
        auto const size = static_cast<std::size_t>(count);
        if (from == 0 && answered_ == 0) said_.append(bytes, size);
        (from == 0 ? first : rank).send(bytes, size, soon(), "the other end");
        if (from == 1) answered_ += size;
      }
    }
  }

  Socket door_;
  std::string said_;
  std::atomic<std::size_t> answered_{0};
  std::atomic<bool> over_{false};
  std::thread thread_;
};

/// A connection of somebody who is no rank.
struct Stranger {
  Socket socket;
  /// @return bytes that it was sent, until rank 0 has disconnected it, or now
  std::size_t heard(bool until_closed) const {
    std::size_t total = 0;
    for (;;) {
      char byte{};
      auto const count = ::recv(socket.descriptor(), &byte, 1, 0);
      if (count == 1) ++total;
      if (count == 0 || (count < 0 && errno == ECONNRESET)) return total;
      if (count < 0 && (errno == EAGAIN || errno == EINTR) && (!until_closed || !socket.wait(POLLIN, soon())))
        return total;
    }
  }
};

std::string hello_of(Claim claim, Secret const& secret) {
  fsdp::bootstrap::detail::Hello hello;
  hello.claim = claim;
  hello.nonce = random_bytes();
  hello.signature = secret.sign(fsdp::bootstrap::detail::signed_text("hello", hello));
  return {reinterpret_cast<char const*>(&hello), sizeof(hello)};
}
std::string announced(std::uint64_t bytes) {
  std::string text = hello_of({1, ranks}, theirs);
  std::memcpy(text.data() + 8, &bytes, sizeof(bytes));
  return text;
}

/// Messages of strangers, in turn.
std::vector<std::string> lines(std::string const& replayed) {
  return {
      "",                                          // silent
      std::string(1, 'f'),                         // one byte, and then another
      "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n",    // another protocol
      std::string(500, '\xff'),                    // garbage
      hello_of({1, ranks}, theirs).substr(0, 40),  // half a hello
      hello_of({1, ranks}, Secret()),              // without a secret
      hello_of({1, ranks}, theirs),                // another secret; a rank that may be taken
      hello_of({2, ranks + 1}, theirs),            // another size
      announced(std::uint64_t{1} << 32),           // 4 GiB
      replayed,                                    // what a rank has said before
  };
}

/// So many strangers, one of each kind after the other.
std::vector<Stranger> strangers(int port, int count, std::string const& replayed) {
  auto const said = lines(replayed);
  std::vector<Stranger> all;
  for (int i = 0; i < count; ++i) {
    Stranger stranger{connect_to("127.0.0.1", port, soon())};
    auto const& line = said[static_cast<std::size_t>(i) % said.size()];
    if (!line.empty()) static_cast<void>(::send(stranger.socket.descriptor(), line.data(), line.size(), MSG_NOSIGNAL));
    if (i % 7 == 6) stranger.socket = {};  // a scan: connects, and is gone
    if (stranger.socket) all.push_back(std::move(stranger));
  }
  return all;
}

std::int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word)
    if (word == "VmHWM:") {
      std::int64_t kib = 0;
      status >> kib;
      return kib * 1024;
    }
  return 0;
}

/// Ranks that are threads. What one throws fails the test when they are joined.
class Ranks {
 public:
  ~Ranks() { join(); }
  void start(int rank, std::function<void()> body) {
    threads_.emplace_back([this, rank, body = std::move(body)] {
      try {
        body();
      } catch (std::exception const& error) {
        thrown_[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  void join() {
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }
  std::string const& thrown(int rank) const { return thrown_[static_cast<std::size_t>(rank)]; }

 private:
  std::array<std::string, ranks> thrown_;
  std::vector<std::thread> threads_;
};

}  // namespace

TEST_CASE("two hundred strangers, before, between and after the ranks, neither end, name nor delay a group", "[tcp]") {
  auto const memory = peak_memory();
  int const port = free_port();
  Ranks group;
  auto const body = [&](int rank, int at) {
    return [rank, at] {
      TcpGroup joined(place(rank, ranks, at), patience, ours);
      auto const texts = joined.exchange(std::to_string(rank), "ranks");
      if (texts != std::vector<std::string>{"0", "1", "2", "3"}) throw fsdp::Error("other texts");
    };
  };
  group.start(0, body(0, port));
  std::vector<std::vector<Stranger>> visits;
  visits.push_back(strangers(port, 200, ""));
  std::vector<std::unique_ptr<Relay>> relays;
  constexpr auto answers = sizeof(fsdp::bootstrap::detail::Challenge) + 1;
  for (int rank = 1; rank < ranks; ++rank) {
    auto& relay = *relays.emplace_back(std::make_unique<Relay>(port));
    group.start(rank, body(rank, relay.port()));
    relay.wait_for_answer(answers);  // it is in, and who came before it has been accepted
    std::size_t waiting = 0;
    for (auto const& stranger : visits.back()) waiting += !stranger.socket.is_closed();
    CHECK(waiting <= 4 * ranks + 64);
    if (rank + 1 < ranks) visits.push_back(strangers(port, 200, relay.hello()));
  }
  group.join();
  for (int rank = 0; rank < ranks; ++rank) CHECK(group.thrown(rank) == "");
  std::size_t heard = 0;
  for (auto const& visit : visits)
    for (auto const& stranger : visit) heard += stranger.heard(true);
  CHECK(heard == 0);
  CHECK(peak_memory() - memory <= (16 << 20));
}

TEST_CASE("a hello that another run has said is answered, and takes no rank's place", "[tcp]") {
  int const port = free_port();
  Ranks group;
  group.start(0, [&] { TcpGroup(place(0, ranks, port), patience, ours); });
  Stranger const replay{connect_to("127.0.0.1", port, soon())};
  auto const hello = hello_of({1, ranks}, ours);
  replay.socket.send(hello.data(), hello.size(), soon(), "rank 0");
  fsdp::bootstrap::detail::Challenge challenge;
  replay.socket.receive(&challenge, sizeof(challenge), soon(), "rank 0");
  fsdp::bootstrap::detail::Proof proof;
  proof.signature.fill(1);
  replay.socket.send(&proof, sizeof(proof), soon(), "rank 0");
  CHECK(replay.heard(true) == 0);
  for (int rank = 1; rank < ranks; ++rank)
    group.start(rank, [&, rank] { TcpGroup(place(rank, ranks, port), patience, ours); });
  group.join();
  for (int rank = 0; rank < ranks; ++rank) CHECK(group.thrown(rank) == "");
}

TEST_CASE("memory grows with what a rank sends, not with what it announces", "[tcp]") {
  auto const memory = peak_memory();
  int const port = free_port();
  Ranks group;
  group.start(0, [&] { TcpGroup(place(0, 2, port), patience, ours).exchange("", "texts"); });
  group.start(1, [&] {
    Socket const first = connect_to_root("127.0.0.1", port, "", 0, {1, 2}, ours, soon());
    struct {
      std::uint64_t sequence = 0, bytes = 0;
      fsdp::comm::Text what;
    } header;
    first.receive(&header, sizeof(header), soon(), "rank 0");  // the group stands
    header = {1, std::uint64_t{1} << 32, fsdp::comm::Text("texts")};
    first.send(&header, sizeof(header), soon(), "rank 0");
    first.send("a beginning", 11, soon(), "rank 0");
  });
  group.join();
  CHECK(group.thrown(0).find("rank 1 closed the connection") != std::string::npos);
  CHECK(group.thrown(1) == "");
  CHECK(peak_memory() - memory <= (16 << 20));
}

TEST_CASE("a false rank 0 is left, and the true one found in its place", "[tcp]") {
  auto listener = std::make_unique<Socket>(listen_on("127.0.0.1", 0));
  int const port = listener->local_port();
  Ranks group;
  for (int rank = 1; rank < ranks; ++rank)
    group.start(rank, [&, rank] { TcpGroup(place(rank, ranks, port), patience, ours); });
  std::vector<Socket> silent;
  for (int caller = 0; caller < ranks; ++caller) {  // each in another way
    Socket false_first = accept_from(*listener, soon());
    fsdp::bootstrap::detail::Hello hello;
    false_first.receive(&hello, sizeof(hello), soon(), "a rank");
    fsdp::bootstrap::detail::Challenge challenge;
    challenge.signature = theirs.sign(fsdp::bootstrap::detail::signed_text("challenge", hello, challenge.nonce));
    if (caller == 0)
      false_first.send("HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n12345678", 72, soon(),
                       "a rank");
    if (caller == 1) {  // what the true one would send, but for the secret
      struct {
        fsdp::bootstrap::detail::Challenge challenge;
        char welcome = fsdp::bootstrap::detail::welcome, verdict[80] = {};
      } const said{challenge};
      false_first.send(&said, sizeof(challenge) + 81, soon(), "a rank");
      char byte{};
      CHECK_THROWS_AS(false_first.receive(&byte, 1, soon(), "a rank"), fsdp::PeerError);  // no proof
    }
    if (caller == 2) silent.push_back(std::move(false_first));  // and takes nobody's time
  }
  listener.reset();
  group.start(0, [&] { TcpGroup(place(0, ranks, port), patience, ours); });
  group.join();
  for (int rank = 0; rank < ranks; ++rank) CHECK(group.thrown(rank) == "");
}

TEST_CASE("ranks with the secret that disagree are told at once", "[tcp]") {
  int const port = free_port();
  SECTION("about the size") {
    Ranks group;
    for (int rank : {0, 1}) group.start(rank, [&, rank] { TcpGroup(place(rank, 2 + rank, port), patience, ours); });
    group.join();
    for (int rank : {0, 1}) CHECK(group.thrown(rank).find("a peer says that it is rank 1 of 3") != std::string::npos);
  }
  SECTION("and those that come when rank 0 has told the others") {
    Ranks group, odd;
    group.start(0, [&] { TcpGroup(place(0, ranks, port), patience, ours); });
    odd.start(3, [&] { TcpGroup(place(3, ranks + 1, port), patience, ours); });
    odd.join();
    for (int rank : {1, 2}) group.start(rank, [&, rank] { TcpGroup(place(rank, ranks, port), patience, ours); });
    group.join();
    std::string const verdict = "a peer says that it is rank 3 of 5";
    CHECK(odd.thrown(3).find(verdict) != std::string::npos);
    for (int rank : {0, 1, 2}) CHECK(group.thrown(rank).find(verdict) != std::string::npos);
  }
  SECTION("about who is who") {
    Ranks group;
    for (int rank : {0, 1, 2})
      group.start(rank, [&, rank] { TcpGroup(place(rank == 0 ? 0 : 1, 3, port), patience, ours); });
    group.join();
    for (int rank : {0, 1, 2})
      CHECK(group.thrown(rank).find("two processes say that they are rank 1 of 3, at 127.0.0.1 and at 127.0.0.1") !=
            std::string::npos);
  }
}

TEST_CASE("a rank with another secret is a stranger, and both sides say so at the deadline", "[tcp]") {
  int const port = free_port();
  auto const briefly = std::chrono::milliseconds(500);
  Ranks group;
  group.start(0, [&] { TcpGroup(place(0, 2, port), briefly, ours); });
  group.start(1, [&] { TcpGroup(place(1, 2, port), briefly, theirs); });
  group.join();
  INFO(group.thrown(0) << "\n" << group.thrown(1));
  CHECK(group.thrown(0).find("it does not have this rank's secret (FSDP_SECRET_FILE)") != std::string::npos);
  CHECK(group.thrown(1).find("FSDP_SECRET_FILE") != std::string::npos);
}
