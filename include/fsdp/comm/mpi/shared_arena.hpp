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

#include "fsdp/comm/mpi/wait.hpp"
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
  void remove(void const* memory) {
    Segment gone;
    std::scoped_lock const lock(mutex_);
    auto const found =
        std::find_if(segments_.begin(), segments_.end(), [&](Segment const& s) { return s.own == memory; });
    if (found == segments_.end() || keeps_) return;
    gone = std::move(*found);
    segments_.erase(found);
  }
  /// From now on what is removed stays mapped, until the process ends: messages may still read or write it.
  void keep() {
    std::scoped_lock const lock(mutex_);
    keeps_ = true;
  }
  ~SegmentBook() {
    if (keeps_) static_cast<void>(new std::vector<Segment>(std::move(segments_)));
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
  bool keeps_ = false;
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

/// A file that ranks of a node open by its name while they make a segment. Neither file nor name outlives it.
class SharedFile {
 public:
  SharedFile() = default;
  SharedFile(SharedFile const&) = delete;
  SharedFile& operator=(SharedFile const&) = delete;
  ~SharedFile() {
    remove_name();
    if (file_ >= 0) ::close(file_);
  }
  /// @return errno, or 0
  int create(std::string path) {
    path_ = std::move(path);
    std::snprintf(process().pending_name, sizeof process().pending_name, "%s", path_.c_str());
    return open_as(path_, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC);
  }
  int open(std::string const& path) { return open_as(path, O_RDWR | O_CLOEXEC); }
  int reserve(std::size_t begin, std::size_t bytes) const {
    int error = EINTR;
    while (error == EINTR) error = ::posix_fallocate(file_, static_cast<off_t>(begin), static_cast<off_t>(bytes));
    return error;
  }
  /// Of the rank that created it.
  void remove_name() {
    if (path_.empty()) return;
    ::unlink(path_.c_str());
    path_.clear();
    process().pending_name[0] = '\0';
  }
  int descriptor() const { return file_; }

 private:
  int open_as(std::string const& path, int flags) {
    file_ = ::open(path.c_str(), flags, 0600);
    return file_ < 0 ? errno : 0;
  }

  std::string path_;  // of the creator, until all have opened it
  int file_ = -1;
};

/// Makes one segment for the ranks of a node; zeroed, each rank's pages reserved by that rank.
///
/// The name is gone as soon as all ranks have opened it, or one has failed: nothing stays behind.
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
  std::string path = formatted("{}/fsdp-{:x}-{:08x}", directory, id, std::random_device{}());
  SharedFile file;
  int error = leader && members.size() > 1 ? file.create(path) : 0;
  std::vector<std::string> const offers = exchange(formatted("{} {} {}", bytes, id, path));
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
    if (!leader) error = file.open(path);
    // Each rank reserves its own pages, which puts them on its own memory controller.
    if (error == 0 && largest > 0) error = file.reserve(place * segment.stride, segment.stride);
  }
  std::vector<std::string> const outcomes = exchange(std::to_string(error));
  file.remove_name();
  for (std::size_t r = 0; r < outcomes.size(); ++r) {
    if (outcomes[r] == "0") continue;
    int const reason = std::atoi(outcomes[r].c_str());
    fail<ResourceError>(
        "rank {}: {} bytes of shared memory in {} ({} bytes for each of {} ranks on the node) could not be had: {} "
        "(reported by rank {}). {}",
        rank, total, directory, segment.stride, members.size(), std::strerror(reason), r,
        reason == ENOSPC ? formatted("Enlarge {}, for a container with --shm-size", directory)
                         : std::string("FSDP_SHM_DIR may name another folder, on a tmpfs"));
  }
  if (largest == 0) return segment;
  if (members.size() == 1) return private_segment(largest);
  void* const base = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.descriptor(), 0);
  if (base == MAP_FAILED) fail<ResourceError>("rank {}: mapping {} bytes: {}", rank, total, std::strerror(errno));
  segment.mapping = Mapping(static_cast<std::byte*>(base), total);
  segment.own = segment.mapping.base() + place * segment.stride;
  return segment;
}

}  // namespace fsdp::mpi::detail
