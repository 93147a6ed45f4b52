// SPDX-License-Identifier: Apache-2.0
// The memory that the ranks of a communicator share, be they processes or threads.
#pragma once

#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace standin::nccl {

inline constexpr int most_ranks = 64;
inline constexpr std::size_t piece_bytes = std::size_t{1} << 17;  ///< that a rank offers its peers at a time

enum class Operation : std::uint32_t { all_gather, reduce_scatter, all_reduce, broadcast };

/// Arguments of a collective that must be equal on all ranks.
struct Signature {
  Operation operation{};
  ncclDataType_t type{};
  std::uint64_t count = 0;
  std::int32_t root = -1;         ///< -1: the operation has none
  std::int64_t send_offset = -1;  ///< in a symmetric window; -1: in none
  std::int64_t receive_offset = -1;
};

/// A message of a rank's host in a call that all ranks make.
struct Mail {
  std::array<char, 32> call{};  ///< "ncclCommSplit"
  std::array<std::int64_t, 2> numbers{};
  ncclUniqueId id{};
};

enum class SeatState : std::uint32_t { empty, joined, left, aborted };

/// Memory that a rank writes and its peers read. Of two entries of an array, the one of an even or odd number is in
/// use; the other may still be read.
struct alignas(64) Seat {
  std::atomic<SeatState> state;
  std::int32_t process;
  std::int32_t device;
  std::uint64_t gpu, host;  ///< hashes of their names
  std::atomic<std::uint64_t> mails;
  std::array<Mail, 2> mail;
  std::atomic<std::uint64_t> announced;  ///< number of the latest collective that runs, or ran; from 1
  std::array<Signature, 2> signatures;
  std::atomic<std::uint64_t> offered;  ///< pieces, counted over all collectives
  std::atomic<std::uint64_t> taken;    ///< pieces of which this rank took from its peers all that it needs
};

struct Header {
  std::atomic<std::uint32_t> bell;  ///< a futex: rises with all that a waiting host may be interested in
  std::atomic<std::int32_t> ranks;  ///< 0 until the first rank joins
  std::uint64_t nonce;
  std::array<Seat, most_ranks> seats;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<SeatState>::is_always_lock_free);

/// This rank's view of the memory. Ranks that are threads of one process have a view each, so that ThreadSanitizer
/// finds no edges between them in it.
///
/// [Note: Nothing stays behind] The memory is a file without a name in any folder (memfd_create). An identifier says
/// which process has it open, and as what; peers open it through /proc. The kernel frees it with the last process that
/// maps it, however that ends.
class Shared {
 public:
  /// A new identifier; this process keeps the file open until `close_identifier`.
  /// @return false if the system refuses, with errno
  static bool make_identifier(ncclUniqueId& id);
  static void close_identifier(ncclUniqueId const& id);

  Shared() = default;
  Shared(Shared&& other) noexcept;
  Shared& operator=(Shared&&) = delete;
  ~Shared();
  /// @return "" or why not
  std::string open(ncclUniqueId const& id);

  bool is_open() const { return header_ != nullptr; }
  Header& header() const { return *header_; }
  Seat& seat(int rank) const { return header_->seats[static_cast<std::size_t>(rank)]; }
  /// Where a rank offers piece number `piece`.
  std::byte* offer(int rank, std::uint64_t piece) const;
  void ring() const;
  /// Waits for a ring after `bell` was read, and not longer than that.
  void wait(std::uint32_t bell, std::chrono::milliseconds most) const;

 private:
  Header* header_ = nullptr;
};

}  // namespace standin::nccl
