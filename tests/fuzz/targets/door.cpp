// SPDX-License-Identifier: Apache-2.0
// Any bytes over a connection of a group's bootstrap, as what a stranger says, a rank, or rank 0: an fsdp::Error, or
// the group goes on. Half of the texts are good ones, changed a little. The fuzzer bounds memory and time.
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>

#include "fsdp/bootstrap.hpp"
#include "fsdp/error.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "tests/support/tcp_place.hpp"

namespace at_the_door {

namespace bootstrap = fsdp::bootstrap;

template <class T>
std::string bytes_of(T const& value) {
  return {reinterpret_cast<char const*>(&value), sizeof(value)};
}
bootstrap::Clock::time_point in(std::chrono::milliseconds time) { return bootstrap::Clock::now() + time; }
constexpr auto patience = std::chrono::seconds(10);
bootstrap::Secret const secret("sixteen bytes or more");

/// As a group sends it.
std::string message(std::uint64_t sequence, std::string const& text, std::string_view what) {
  return bytes_of(sequence) + bytes_of(std::uint64_t{text.size()}) + bytes_of(fsdp::comm::Text(what)) + text;
}
std::string answer(std::string const& one, std::string const& two) {
  return bytes_of(std::uint64_t{one.size()}) + bytes_of(std::uint64_t{two.size()}) + one + two;
}
std::string hello() {
  bootstrap::detail::Hello said;
  said.claim = {1, 2};
  said.signature = secret.sign(bootstrap::detail::signed_text("hello", said));
  return bytes_of(said);
}

/// Sends a text, and that it is all.
void say(bootstrap::Socket const& socket, std::string const& text) {
  static_cast<void>(::send(socket.descriptor(), text.data(), text.size(), MSG_NOSIGNAL));
  socket.finish(in(patience));
}

/// A visitor of rank 0, with the right secret or with none.
void visit(std::string const& text, bootstrap::Secret const& key) {
  auto const listener = bootstrap::listen_on("127.0.0.1", 0);
  bootstrap::Doorkeeper keeper(listener, 0, 3, key);
  auto const visitor = bootstrap::connect_to("127.0.0.1", listener.local_port(), in(patience));
  static_cast<void>(::send(visitor.descriptor(), text.data(), text.size(), MSG_NOSIGNAL));
  ::shutdown(visitor.descriptor(), SHUT_WR);
  if (keeper.gather(in(std::chrono::milliseconds(2)))) std::abort();  // one visitor is not two ranks
  if (!key.is_known() && !keeper.verdict().empty()) std::abort();     // nothing is proven
}

/// One rank of two, whose peer says anything.
void take_part(int rank, int port) {
  try {
    bootstrap::TcpGroup group(fsdp::testing::place(rank, 2, port), patience, bootstrap::Secret());
    if (group.exchange("mine", "texts").size() != 2) std::abort();
    static_cast<void>(group.split(0, 0, "part"));
  } catch (fsdp::Error const&) {
  }
}

/// Rank 1 of 2, which is let in and says `text` then.
void rank(std::string const& text) {
  int const port = fsdp::testing::free_port();
  std::thread other([&] {
    bootstrap::detail::Hello hello;
    hello.claim = {1, 2};
    say(bootstrap::connect_to("127.0.0.1", port, in(patience)),
        bytes_of(hello) + bytes_of(bootstrap::detail::Proof{}) + text);
  });
  take_part(0, port);
  other.join();
}

/// Rank 0 of 2, which lets a rank in and says `text` then.
void first(std::string const& text) {
  auto const listener = bootstrap::listen_on("127.0.0.1", 0);
  std::thread other([&] {
    auto const socket = bootstrap::accept_from(listener, in(patience));
    say(socket, bytes_of(bootstrap::detail::Challenge{}) + bootstrap::detail::welcome + text);
  });
  take_part(1, listener.local_port());
  other.join();
}

/// Somebody who is no rank 0 answers a rank, once.
void stranger_answers(std::string const& text) {
  auto const listener = bootstrap::listen_on("127.0.0.1", 0);
  std::thread other([&] { say(bootstrap::accept_from(listener, in(patience)), text); });
  try {
    static_cast<void>(bootstrap::connect_to_root("127.0.0.1", listener.local_port(), "", 0, {1, 2}, secret,
                                                 in(std::chrono::milliseconds(15))));
    std::abort();  // it cannot have proven itself
  } catch (fsdp::PeerError const&) {
  }
  other.join();
}

}  // namespace at_the_door

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  if (size == 0) return 0;
  std::string const text(reinterpret_cast<char const*>(data + 1), size - 1);
  auto const said = [&](std::string const& good) { return data[0] < 128 ? text : fsdp::testing::changed(good, text); };
  using namespace at_the_door;
  switch (data[0] % 5) {
    case 0: visit(said(bytes_of(bootstrap::detail::Hello{})), {}); break;
    case 1: visit(said(hello()), secret); break;
    case 2: rank(said(message(1, "yours", "texts") + message(2, "0 0 127.0.0.1", "split 'part'"))); break;
    case 3:
      first(said(message(0, "", "") + message(1, answer("yours", "mine"), "texts") +
                 message(2, answer("0 0 127.0.0.1", "0 0 127.0.0.1"), "split 'part'")));
      break;
    default: stranger_answers(said(bytes_of(bootstrap::detail::Challenge{}) + bootstrap::detail::welcome));
  }
  return 0;
}
