// SPDX-License-Identifier: Apache-2.0
// A collective, as the kernel that a stream runs.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tests/standin/nccl/communicator.hpp"
#include "tests/standin/nccl/occupancy.hpp"

namespace standin::nccl {

/// Arguments of a collective.
struct Request {
  Operation operation{};
  std::byte const* send = nullptr;
  std::byte* receive = nullptr;
  std::size_t count = 0;
  ncclDataType_t type{};
  int root = -1;

  /// Bytes of a buffer; 0 where a rank has none.
  std::size_t send_bytes(int rank, int size) const;
  std::size_t receive_bytes(int size) const;
  /// Whether buffers lie as the operation in place wants them.
  bool in_place(int rank) const;
};

/// "ncclAllGather of 16 float32".
std::string describe(Signature const& signature);

/// [Note: Rounds]
/// Data pass through the shared memory in rounds. In each, every rank offers a piece, and takes what it needs from the
/// pieces of its peers; one piece may be on offer while the next one is written.
///
/// [Note: Orders of sums]
/// NCCL promises none. Here a sum is made as a ring makes it: what is to end at a rank begins with the rank after it,
/// and each rank in turn adds its own, rounded to the type every time. In an all-reduce a piece is cut into as many
/// parts as there are ranks, and part p begins with rank p + 1. So results of three or more ranks differ from those of
/// fsdp's pairwise tree, and of other piece sizes, where sums are inexact.
class Collective {
 public:
  /// @param number  in its communicator, from 1
  Collective(std::shared_ptr<Communicator> communicator, Request const& request, std::uint64_t number);
  Collective(Collective const&) = delete;
  Collective& operator=(Collective const&) = delete;
  ~Collective();

  /// Function that a stream calls until it returns true.
  bool step();
  std::string const& what() const { return what_; }

 private:
  bool enter();
  bool agree();
  bool move_data();
  void offer(std::uint64_t round);
  void take(std::uint64_t round);
  void sum(std::byte* into, std::size_t at, std::size_t count, int first, std::uint64_t piece) const;
  bool contributes(int rank) const { return request_.root < 0 || request_.root == rank; }
  std::size_t elements_of(std::uint64_t round) const;
  void use_windows(int change);
  // To ThreadSanitizer, of the operands.
  void tell_input() const;
  void tell_output() const;

  std::shared_ptr<Communicator> const communicator_;
  Request const request_;
  std::uint64_t const number_;
  std::size_t const element_;         // bytes
  std::size_t const round_elements_;  // of a rank's part that one round moves
  std::uint64_t const rounds_;
  Signature signature_;
  std::string const what_;
  Occupancy::Place place_;
  bool entered_ = false, announced_ = false, stuck_ = false, uses_windows_ = true;
  int agreed_ = 0;                         // ranks whose signature was compared
  std::uint64_t offered_ = 0, taken_ = 0;  // rounds
  std::uint64_t first_piece_ = 0;          // number of this collective's first piece in its communicator
};

}  // namespace standin::nccl
