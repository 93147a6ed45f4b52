// SPDX-License-Identifier: Apache-2.0
// TCP sockets with deadlines, for the bootstrap of ranks.
#pragma once

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "fsdp/detail/host/backoff.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap {

using Clock = AwakeClock;

namespace detail {

/// Milliseconds left, for poll(): 0 when the deadline has passed.
inline int milliseconds_until(Clock::time_point deadline) {
  auto const left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, std::numeric_limits<int>::max()));
}

/// Ends the process if SIGTERM was noted (host::request_termination): a peer may never come.
inline void end_on_sigterm(Clock::time_point since) {
  if (host::termination_requested()) host::detail::give_up("peers over TCP", Clock::now() - since, true);
}

inline std::string system_message(int code) { return std::strerror(code); }

/// An IPv4 address that is written in IPv6's form, as an IPv4 address; others as they are.
inline std::string_view unmapped(std::string_view host) {
  constexpr std::string_view mapped = "::ffff:";
  bool const is_mapped = host.substr(0, mapped.size()) == mapped && host.find('.') != std::string_view::npos;
  return is_mapped ? host.substr(mapped.size()) : host;
}

/// The results of getaddrinfo, freed at the end.
class Addresses {
 public:
  /// @param host nullptr for any address of this machine
  Addresses(char const* host, int port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags | AI_NUMERICSERV;
    AwakeClock::LongCall const call;
    error_ = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &list_);
  }
  Addresses(Addresses const&) = delete;
  Addresses& operator=(Addresses const&) = delete;
  ~Addresses() {
    if (list_ != nullptr) ::freeaddrinfo(list_);
  }
  addrinfo const* first() const { return error_ == 0 ? list_ : nullptr; }
  std::string error() const { return error_ == 0 ? "" : ::gai_strerror(error_); }

 private:
  addrinfo* list_ = nullptr;
  int error_ = 0;
};

}  // namespace detail

/// Owns a non-blocking TCP socket. Sends and receives whole pieces, or throws PeerError at the deadline or when the
/// other side has closed the connection.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    Socket taken(std::move(other));
    std::swap(descriptor_, taken.descriptor_);
    return *this;
  }
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  /// Waits until the socket is ready for `events` of poll(); false at the deadline. SIGTERM, if it is noted, ends the
  /// process.
  bool wait(short events, Clock::time_point deadline) const {
    auto const since = Clock::now();
    while (true) {
      pollfd entry{descriptor_, events, 0};
      detail::end_on_sigterm(since);
      int const ready =
          ::poll(&entry, 1, std::min(detail::milliseconds_until(deadline), 100));  // another thread's signal
      if (ready > 0) return true;
      if (ready == 0 && Clock::now() >= deadline) return false;
      if (ready < 0 && errno != EINTR) fail<PeerError>("poll failed: {}", detail::system_message(errno));
    }
  }
  /// @param peer who is on the other side, for messages
  void send(void const* data, std::size_t bytes, Clock::time_point deadline, std::string_view peer) const {
    auto const* next = static_cast<char const*>(data);
    while (bytes > 0) {
      auto const sent = ::send(descriptor_, next, bytes, MSG_NOSIGNAL);
      if (sent > 0) {
        next += sent;
        bytes -= static_cast<std::size_t>(sent);
      } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        if (!wait(POLLOUT, deadline)) fail<PeerError>("{} did not take {} bytes in time", peer, bytes);
      } else if (sent < 0 && errno != EINTR) {
        fail<PeerError>("lost the connection to {}: {}", peer, detail::system_message(errno));
      }
    }
  }
  /// Says that nothing follows, and takes what the peer still sends until it closes too, or the deadline: a socket that
  /// is closed before everything was received takes back what it has sent last.
  void finish(Clock::time_point deadline) const {
    ::shutdown(descriptor_, SHUT_WR);
    char rest[256];
    for (;;) {
      auto const received = ::recv(descriptor_, rest, sizeof(rest), 0);
      if (received == 0) return;
      if (received > 0 || errno == EINTR) continue;
      if ((errno != EAGAIN && errno != EWOULDBLOCK) || !wait(POLLIN, deadline)) return;
    }
  }
  void receive(void* data, std::size_t bytes, Clock::time_point deadline, std::string_view peer) const {
    auto* next = static_cast<char*>(data);
    while (bytes > 0) {
      auto const received = ::recv(descriptor_, next, bytes, 0);
      if (received > 0) {
        next += received;
        bytes -= static_cast<std::size_t>(received);
      } else if (received == 0) {
        fail<PeerError>("{} closed the connection: it has ended or failed", peer);
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        if (!wait(POLLIN, deadline)) fail<PeerError>("{} did not answer in time", peer);
      } else if (errno != EINTR) {
        fail<PeerError>("lost the connection to {}: {}", peer, detail::system_message(errno));
      }
    }
  }

  /// Whether the other side has closed the connection, or it is lost, and nothing is left to receive.
  bool is_closed() const {
    char next{};
    auto const peeked = ::recv(descriptor_, &next, 1, MSG_PEEK | MSG_DONTWAIT);
    return peeked == 0 || (peeked < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  }
  /// Receives a text of so many bytes. Memory grows with what arrives.
  std::string receive_text(std::uint64_t bytes, Clock::time_point deadline, std::string_view peer) const {
    constexpr std::uint64_t most_at_once = std::uint64_t{1} << 20;
    std::string text;
    while (text.size() < bytes) {
      auto const before = text.size();
      text.resize(before + static_cast<std::size_t>(
                               std::min(bytes - before, std::max(most_at_once, std::uint64_t{before} / 2))));
      receive(text.data() + before, text.size() - before, deadline, peer);
    }
    return text;
  }

  /// The numeric address of this end, as peers in the same network reach it.
  std::string local_address() const {
    auto text = address_by(::getsockname);
    if (text.empty()) fail<ResourceError>("cannot read the address of a socket");
    return text;
  }
  /// The numeric address of the other end, for messages.
  std::string remote_address() const {
    auto text = address_by(::getpeername);
    return text.empty() ? "an unknown address" : text;
  }
  int local_port() const {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    if (::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      fail<ResourceError>("cannot read the port of a socket: {}", detail::system_message(errno));
    if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port);
    return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
  }

  /// Small messages leave at once, and a vanished machine is noticed.
  void tune() const {
    int const on = 1;
    ::setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::setsockopt(descriptor_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  }

 private:
  /// @param name_of  getsockname or getpeername    @return "" if the system does not tell
  std::string address_by(decltype(::getsockname)* name_of) const {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    char text[NI_MAXHOST] = {};
    bool const told =
        name_of(descriptor_, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0;
    return told ? std::string(detail::unmapped(text)) : std::string();
  }

  int descriptor_ = -1;
};

/// Whether `host` is the loopback by its name or number. (A machine's own name may resolve to the loopback on that
/// machine only, so names are not resolved here.)
inline bool is_loopback(std::string_view host) {
  host = detail::unmapped(host);
  return host == "localhost" || host == "::1" || host.substr(0, 4) == "127.";
}

/// Listens on `port` (0: any free one): on the loopback only if `host` names it, else on every address of the machine.
/// @throws ConfigError if the port is taken, on whichever of these addresses
inline Socket listen_on(std::string const& host, int port) {
  bool const loopback = is_loopback(host);
  std::string const named(detail::unmapped(host));
  detail::Addresses const addresses(loopback ? named.c_str() : nullptr, port, AI_PASSIVE);
  std::string reason = addresses.error();
  bool taken = false;                             // who tries the addresses in turn would reach the other program
  for (int const family : {AF_INET6, AF_INET}) {  // an IPv6 socket serves both
    for (auto const* entry = addresses.first(); entry != nullptr && !taken; entry = entry->ai_next) {
      if (entry->ai_family != family) continue;
      Socket socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      int const on = 1;
      int const off = 0;
      if (socket) {
        ::setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
        if (family == AF_INET6)
          ::setsockopt(socket.descriptor(), IPPROTO_IPV6, IPV6_V6ONLY, loopback ? &on : &off, sizeof(on));
        if (::bind(socket.descriptor(), entry->ai_addr, entry->ai_addrlen) == 0 &&
            ::listen(socket.descriptor(), SOMAXCONN) == 0)
          return socket;
      }
      taken = errno == EADDRINUSE;
      reason = detail::system_message(errno);
    }
  }
  fail<ConfigError>("cannot listen on {} port {}: {}", loopback ? host : "every address of this machine,", port,
                    reason);
}

/// Accepts one connection; an empty socket at the deadline.
inline Socket accept_from(Socket const& listener, Clock::time_point deadline) {
  while (listener.wait(POLLIN, deadline)) {
    Socket socket(::accept4(listener.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      socket.tune();
      return socket;
    }
    if (errno == EMFILE || errno == ENFILE)
      fail<ResourceError>("cannot accept a rank's connection: {}", detail::system_message(errno));
  }
  return {};
}

/// Connects, and tries again until the deadline: the other side may not have started.
/// @throws PeerError at the deadline, with the last reason
inline Socket connect_to(std::string const& host, int port, Clock::time_point deadline) {
  std::string reason = "no address";
  auto pause = std::chrono::milliseconds(20);
  auto const since = Clock::now();
  while (true) {
    detail::end_on_sigterm(since);
    detail::Addresses const addresses(host.c_str(), port, 0);
    if (!addresses.error().empty()) reason = formatted("the name cannot be resolved: {}", addresses.error());
    for (auto const* entry = addresses.first(); entry != nullptr; entry = entry->ai_next) {
      Socket socket(::socket(entry->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      int code = errno;
      if (socket) {
        code = ::connect(socket.descriptor(), entry->ai_addr, entry->ai_addrlen) == 0 ? 0 : errno;
        if (code == EINPROGRESS) {
          auto const patience = std::min(deadline, Clock::now() + std::chrono::seconds(10));
          socklen_t size = sizeof(code);
          if (!socket.wait(POLLOUT, patience)) {
            code = ETIMEDOUT;
          } else {
            ::getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &code, &size);
          }
        }
        if (code == 0) {
          socket.tune();
          return socket;
        }
      }
      reason = detail::system_message(code);
    }
    if (Clock::now() + pause >= deadline) fail<PeerError>("cannot reach {} port {}: {}", host, port, reason);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::bootstrap
