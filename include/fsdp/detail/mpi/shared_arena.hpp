// SPDX-License-Identifier: Apache-2.0
// Memory shared by the ranks of a node, and a table that finds a peer's bytes in it. Open files pass between
// processes through sockets without a file.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// Hands descriptors to other processes of the machine, as datagrams. Its address is no file and ends with it.
class DescriptorSocket {
 public:
  DescriptorSocket() = default;
  DescriptorSocket(DescriptorSocket const&) = delete;
  DescriptorSocket& operator=(DescriptorSocket const&) = delete;
  ~DescriptorSocket() {
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

/// A mapping. The destructor unmaps it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (base_ != nullptr) ::munmap(base_, bytes_);
  }
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

/// A part of a node's shared memory: one block per rank of a communicator on this node.
struct Segment {
  std::uint64_t id = 0;  ///< equal on all ranks that map it; 0: private memory of a rank that is alone on its node
  Mapping mapping;
  std::size_t stride = 0;    ///< bytes from one rank's block to the next, a multiple of the page
  std::byte* own = nullptr;  ///< this rank's block
  std::uint64_t owner = 0;   ///< the communicator that it was allocated on
};

/// A location that peers can find: a segment, and an offset in bytes.
struct Place {
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
  bool direct = false;  ///< peers on the node may read it, or there are none
};

/// The segments of all communicators split from one world.
class SegmentBook {
 public:
  void add(Segment segment) {
    std::scoped_lock const lock(mutex_);
    segments_.push_back(std::move(segment));
  }
  /// Unmaps the segment whose own block starts at `memory`.
  void remove(void const* memory) {
    Segment gone;
    std::scoped_lock const lock(mutex_);
    auto const found =
        std::find_if(segments_.begin(), segments_.end(), [&](Segment const& s) { return s.own == memory; });
    if (found == segments_.end() || keeps_) return;
    gone = std::move(*found);
    segments_.erase(found);
  }
  /// Keeps removed segments mapped from now on, until the process ends: messages may still read or write them.
  void keep() {
    std::scoped_lock const lock(mutex_);
    keeps_ = true;
  }
  ~SegmentBook() {
    if (keeps_) static_cast<void>(new std::vector<Segment>(std::move(segments_)));
  }
  /// The place of [data, data + bytes), if a communicator of this lineage (itself and its ancestors) allocated it.
  Place find(void const* data, std::size_t bytes, std::span<std::uint64_t const> lineage) const {
    auto const* const begin = static_cast<std::byte const*>(data);
    std::scoped_lock const lock(mutex_);
    for (auto const& segment : segments_) {
      auto const* const base = segment.mapping.base();
      if (begin < base || begin + bytes > base + segment.mapping.bytes()) continue;
      if (std::find(lineage.begin(), lineage.end(), segment.owner) == lineage.end()) return {};
      return {segment.id, static_cast<std::uint64_t>(begin - base), true};
    }
    return {};
  }
  /// This rank's address of a place that a peer on the node published; nullptr if this rank has unmapped it.
  std::byte* address(Place const& place) const {
    std::scoped_lock const lock(mutex_);
    for (auto const& segment : segments_)
      if (segment.id == place.segment) return segment.mapping.base() + place.offset;
    return nullptr;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  bool keeps_ = false;
};

/// Folder for shared memory, on a tmpfs. FSDP_SHM_DIR overrides /dev/shm.
inline bool is_chosen_directory() {
  char const* const setting = std::getenv("FSDP_SHM_DIR");
  return setting != nullptr && *setting != '\0';
}
inline std::string shared_directory() { return is_chosen_directory() ? std::getenv("FSDP_SHM_DIR") : "/dev/shm"; }

inline std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }
inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

/// Zeroed memory that no other process sees.
inline Segment private_segment(std::size_t bytes) {
  Segment segment;
  segment.stride = round_up(bytes, page_bytes());
  void* const base = ::mmap(nullptr, segment.stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail<ResourceError>("cannot allocate {} bytes of memory: {}", bytes, std::strerror(errno));
  segment.mapping = Mapping(static_cast<std::byte*>(base), segment.stride);
  segment.own = segment.mapping.base();
  return segment;
}

inline constexpr std::string_view handing_over = "passing the file to the other ranks";

/// A file without a name, which ranks of a node map.
///
/// [Note: Memory without a name] A rank may be killed at any moment, and a name would then stay for ever; so the file
/// never has one, its descriptor travels through a socket without one, and the kernel frees both with the last process.
class SharedFile {
 public:
  SharedFile() = default;
  SharedFile(SharedFile const&) = delete;
  SharedFile& operator=(SharedFile const&) = delete;
  ~SharedFile() {
    if (file_ >= 0) ::close(file_);
  }
  /// Makes it in shared_directory(). Where that is /dev/shm by default and cannot hold such files, it is in no folder.
  /// @return errno, or 0
  int create() {
    file_ = ::open(shared_directory().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int const error = file_ < 0 ? errno : 0;
    if (error == 0 || is_chosen_directory()) return error;
    file_ = ::memfd_create("fsdp", MFD_CLOEXEC);
    return file_ < 0 ? error : 0;
  }
  int receive(DescriptorSocket const& socket, std::string const& from) { return socket.receive(file_, from); }
  int reserve(std::size_t begin, std::size_t bytes) const {
    int error = EINTR;
    while (error == EINTR) error = ::posix_fallocate(file_, static_cast<off_t>(begin), static_cast<off_t>(bytes));
    return error;
  }
  int descriptor() const { return file_; }

 private:
  int file_ = -1;
};

/// The text that each rank of a node sends to the others before a segment is made.
struct SegmentOffer {
  std::size_t bytes = 0;
  std::uint64_t id = 0;
  std::string socket;  ///< the name of its DescriptorSocket

  std::string text() const { return formatted("{} {} {}", bytes, id, socket); }
  static SegmentOffer parse(std::string const& text) {
    SegmentOffer offer;
    char* rest = nullptr;
    offer.bytes = std::strtoull(text.c_str(), &rest, 10);
    offer.id = std::strtoull(rest, &rest, 10);
    offer.socket = rest + 1;
    return offer;
  }
};

/// All ranks go on making a segment, or none does. Called by every rank of the communicator.
/// @param doing  what this rank did last, with the outcome `own_error`, an errno
/// @param stride bytes of a rank   @param ranks on the node
/// @throws ResourceError on every rank if some rank has an error
template <class Exchange>
void agree_on_segment(Exchange&& exchange, int rank, std::string_view doing, int own_error, std::size_t stride,
                      std::size_t ranks) {
  auto const outcomes = exchange(own_error == 0 ? "" : formatted("{} {}", own_error, doing));
  auto const failed = std::find_if(outcomes.begin(), outcomes.end(), [](auto const& text) { return !text.empty(); });
  if (failed == outcomes.end()) return;
  char* rest = nullptr;
  int const error = static_cast<int>(std::strtol(failed->c_str(), &rest, 10));
  std::string const directory = shared_directory();
  fail<ResourceError>(
      "rank {}: {} bytes of shared memory in {} ({} bytes for each of {} ranks on the node) are not "
      "available:{} failed: {} (reported by rank {}). {}",
      rank, stride * ranks, directory, stride, ranks, rest, std::strerror(error), failed - outcomes.begin(),
      error == ENOSPC                      ? formatted("Enlarge {}; for a container, use --shm-size", directory)
      : error == EMFILE || error == ENFILE ? std::string("Raise the limit of open files (ulimit -n)")
      : *failed != formatted("{} {}", error, handing_over)
          ? std::string("Set FSDP_SHM_DIR to another folder on a tmpfs")
          : std::string("The ranks of a node must share a network namespace"));
}

/// Makes one segment for the ranks of a node; zeroed, each rank's pages reserved by that rank.
/// @param exchange all-gathers a text over the communicator; called three times by every rank
/// @param members communicator ranks on this node, ascending
/// @param bytes per rank; the largest of the node counts
/// @throws ResourceError on every rank of the communicator if the memory cannot be had on any node
template <class Exchange>
Segment make_segment(Exchange&& exchange, int rank, std::vector<int> const& members, std::size_t bytes) {
  static std::atomic<std::uint32_t> counter{0};
  auto const place = static_cast<std::size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
  bool const alone = members.size() == 1, leader = place == 0;
  SharedFile file;
  DescriptorSocket socket;
  int const opened = alone ? 0 : socket.open();
  auto const own_id = (static_cast<std::uint64_t>(::getpid()) << 32) | (counter.fetch_add(1) + 1);
  auto const texts = exchange(SegmentOffer{bytes, own_id, socket.name()}.text());
  std::vector<SegmentOffer> offers;  // of the ranks of the node
  std::size_t largest = 0;
  for (auto const member : members) {
    offers.push_back(SegmentOffer::parse(texts[static_cast<std::size_t>(member)]));
    largest = std::max(largest, offers.back().bytes);
  }
  Segment segment;
  segment.stride = round_up(largest, page_bytes());
  std::size_t const total = segment.stride * members.size();
  if (!alone) segment.id = offers.front().id;

  int error = opened;
  std::string_view doing = handing_over;
  if (leader && !alone && error == 0) {
    error = file.create();
    if (error != 0) doing = "creating an unnamed file";
    for (std::size_t i = 1; i < offers.size() && error == 0; ++i)
      error = socket.send(file.descriptor(), offers[i].socket);
  }
  agree_on_segment(exchange, rank, doing, error, segment.stride, members.size());
  doing = handing_over;
  if (!alone && !leader) error = file.receive(socket, offers.front().socket);
  // Each rank reserves its own pages, which puts them on its own memory controller.
  if (!alone && error == 0 && largest > 0) {
    doing = "reserving the memory";
    error = file.reserve(place * segment.stride, segment.stride);
  }
  agree_on_segment(exchange, rank, doing, error, segment.stride, members.size());
  if (largest == 0) return segment;
  if (alone) return private_segment(largest);
  void* const base = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.descriptor(), 0);
  if (base == MAP_FAILED)
    fail<ResourceError>("rank {}: cannot map {} bytes of shared memory: {}", rank, total, std::strerror(errno));
  segment.mapping = Mapping(static_cast<std::byte*>(base), total);
  segment.own = segment.mapping.base() + place * segment.stride;
  return segment;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
