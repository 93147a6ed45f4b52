// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of a node share, and the book that finds a peer's bytes in it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/comm/mpi_wait.hpp"
#include "fsdp/error.hpp"

namespace fsdp::mpi::detail {

/// A mapping that is unmapped when it dies.
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

/// A place that peers can find: a segment and the bytes from its beginning.
struct Place {
  std::uint64_t segment = 0;
  std::uint64_t offset = 0;
  bool direct = false;  ///< peers on the node may read it, or there are none
};

/// The segments of a family of communicators: those split from one world.
class SegmentBook {
 public:
  void add(Segment segment) {
    std::scoped_lock const lock(mutex_);
    segments_.push_back(std::move(segment));
  }
  /// Unmaps the segment whose own block starts at `memory`.
  bool remove(void const* memory) {
    Segment gone;
    std::scoped_lock const lock(mutex_);
    auto const found =
        std::find_if(segments_.begin(), segments_.end(), [&](Segment const& s) { return s.own == memory; });
    if (found == segments_.end()) return false;
    gone = std::move(*found);
    segments_.erase(found);
    return true;
  }
  /// Where [data, data + bytes) lies, if a communicator of this lineage (itself and its ancestors) allocated it.
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
};

/// Where shared memory is made: a directory on a tmpfs. FSDP_SHM_DIR overrides /dev/shm.
inline std::string shared_directory() {
  char const* const setting = std::getenv("FSDP_SHM_DIR");
  return setting != nullptr && *setting != '\0' ? setting : "/dev/shm";
}

inline std::size_t page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }
inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

/// Zeroed memory that no other process sees.
inline Segment private_segment(std::size_t bytes) {
  Segment segment;
  segment.stride = round_up(bytes, page_bytes());
  void* const base = ::mmap(nullptr, segment.stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail<ResourceError>("{} bytes of memory: {}", bytes, std::strerror(errno));
  segment.mapping = Mapping(static_cast<std::byte*>(base), segment.stride);
  segment.own = segment.mapping.base();
  return segment;
}

/// Makes one segment for the ranks of a node; zeroed, each rank's pages reserved by that rank.
///
/// The name is gone as soon as all ranks have opened it, so that nothing stays behind whatever happens later.
/// @param exchange all-gathers a text over the communicator; called twice by every rank
/// @param members communicator ranks on this node, ascending
/// @param bytes per rank; the largest of the node counts
/// @throws ResourceError on every rank of the communicator if the memory cannot be had on any node
template <class Exchange>
Segment make_segment(Exchange&& exchange, int rank, std::vector<int> const& members, std::size_t bytes) {
  static std::atomic<std::uint32_t> counter{0};
  auto const place = static_cast<std::size_t>(std::find(members.begin(), members.end(), rank) - members.begin());
  bool const leader = place == 0;
  auto const id = (static_cast<std::uint64_t>(::getpid()) << 32) | (counter.fetch_add(1) + 1);
  std::string const directory = shared_directory();
  std::string path = fmt::format("{}/fsdp-{:x}-{:08x}", directory, id, std::random_device{}());
  int file = -1;
  int error = 0;
  if (leader && members.size() > 1) {
    std::snprintf(process().pending_name, sizeof process().pending_name, "%s", path.c_str());
    file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) error = errno;
  }
  std::vector<std::string> const offers = exchange(fmt::format("{} {} {}", bytes, id, path));
  auto const offered_bytes = [&](int member) {
    return static_cast<std::size_t>(std::strtoull(offers[static_cast<std::size_t>(member)].c_str(), nullptr, 10));
  };
  Segment segment;
  std::size_t largest = 0;
  for (auto const member : members) largest = std::max(largest, offered_bytes(member));
  segment.stride = round_up(largest, page_bytes());
  std::size_t const total = segment.stride * members.size();

  if (members.size() > 1) {
    auto const& offer = offers[static_cast<std::size_t>(members.front())];
    auto const first = offer.find(' ') + 1;
    auto const second = offer.find(' ', first) + 1;
    segment.id = std::strtoull(offer.c_str() + first, nullptr, 10);
    path = offer.substr(second);
    if (!leader) {
      file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (file < 0) error = errno;
    }
    // Each rank reserves its own pages, which puts them on its own memory controller.
    while (error == 0 && largest > 0) {
      error = ::posix_fallocate(file, static_cast<off_t>(place * segment.stride), static_cast<off_t>(segment.stride));
      if (error != EINTR) break;
      error = 0;
    }
  }
  std::vector<std::string> const outcomes = exchange(std::to_string(error));
  if (leader && members.size() > 1) {
    ::unlink(path.c_str());
    process().pending_name[0] = '\0';
  }
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r] == "0") continue;
    if (file >= 0) ::close(file);
    fail<ResourceError>(
        "rank {}: {} bytes of shared memory in {} ({} bytes for each of {} ranks on the node) could not be had: {} "
        "(reported by rank {}). Enlarge {}, for a container with --shm-size",
        rank, total, directory, segment.stride, members.size(), std::strerror(std::atoi(outcomes[r].c_str())), r,
        directory);
  }
  if (members.size() == 1 || largest == 0) {
    if (file >= 0) ::close(file);
    return largest == 0 ? std::move(segment) : private_segment(largest);
  }
  void* const base = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  int const map_error = errno;
  ::close(file);
  if (base == MAP_FAILED) fail<ResourceError>("rank {}: mapping {} bytes: {}", rank, total, std::strerror(map_error));
  segment.mapping = Mapping(static_cast<std::byte*>(base), total);
  segment.own = segment.mapping.base() + place * segment.stride;
  return segment;
}

}  // namespace fsdp::mpi::detail
