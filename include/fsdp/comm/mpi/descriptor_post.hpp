// SPDX-License-Identifier: Apache-2.0
// Passes open files to other processes of the machine, through sockets without a file.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// Hands descriptors to other processes of the machine, as datagrams. Its address is no file and ends with it.
class DescriptorPost {
 public:
  DescriptorPost() = default;
  DescriptorPost(DescriptorPost const&) = delete;
  DescriptorPost& operator=(DescriptorPost const&) = delete;
  ~DescriptorPost() {
    if (socket_ >= 0) ::close(socket_);
  }
  /// @return errno, or 0
  int open() {
    socket_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    Address address;
    bool const bound = socket_ >= 0 && ::bind(socket_, address.data(), sizeof(sa_family_t)) == 0 &&
                       ::getsockname(socket_, address.data(), &address.bytes) == 0;
    if (bound) name_ = address.name();  // abstract: the kernel has chosen it
    return bound ? 0 : errno;
  }
  std::string const& name() const { return name_; }
  /// @return errno, or 0
  int send(int descriptor, std::string const& to) const {
    Address address(to);
    Message message(address);
    auto* const control = CMSG_FIRSTHDR(&message.header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
    return ::sendmsg(socket_, &message.header, MSG_NOSIGNAL) < 0 ? errno : 0;
  }
  /// Takes the descriptor that `from` has sent; those of strangers are closed.
  /// @return errno, or 0
  int receive(int& descriptor, std::string const& from) const {
    for (;;) {
      Address address;
      Message message(address);
      if (::recvmsg(socket_, &message.header, MSG_CMSG_CLOEXEC) < 0) return errno;
      auto const* const control = CMSG_FIRSTHDR(&message.header);
      if (control == nullptr || control->cmsg_type != SCM_RIGHTS) continue;
      std::memcpy(&descriptor, CMSG_DATA(control), sizeof descriptor);
      address.bytes = message.header.msg_namelen;
      if (address.name() == from) return 0;
      ::close(std::exchange(descriptor, -1));
    }
  }

 private:
  struct Address {
    sockaddr_un place{};
    socklen_t bytes = sizeof place;

    Address() { place.sun_family = AF_UNIX; }
    explicit Address(std::string const& name) : Address() {
      auto const length = std::min(name.size(), sizeof place.sun_path - 1);
      std::copy_n(name.data(), length, place.sun_path + 1);
      bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    }
    sockaddr* data() { return reinterpret_cast<sockaddr*>(&place); }
    std::string name() const {
      constexpr std::size_t before = offsetof(sockaddr_un, sun_path) + 1;
      return bytes <= before ? "" : std::string(place.sun_path + 1, bytes - before);
    }
  };
  /// A message with one byte and one descriptor.
  struct Message {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};

    explicit Message(Address& address) {
      header.msg_name = address.data();
      header.msg_namelen = address.bytes;
      header.msg_iov = &data;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof control;
    }
    Message(Message const&) = delete;
    Message& operator=(Message const&) = delete;
  };

  int socket_ = -1;
  std::string name_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
