// SPDX-License-Identifier: Apache-2.0
// An enqueued collective, and the division of its elements over ranks.
#pragma once

#include <algorithm>
#include <cstddef>

#include "fsdp/comm/mpi/control.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail {

/// An enqueued collective.
struct Call {
  Header header;
  std::byte const* send = nullptr;
  std::byte* receive = nullptr;

  std::size_t element() const { return size_of(header.type); }
  bool takes_mean() const { return header.collective == Collective::all_reduce_mean; }
};

/// Division of elements over ranks: equal parts, the last ones shorter or empty.
struct Parts {
  std::size_t total;
  std::size_t part;

  std::size_t begin(std::size_t rank) const { return std::min(total, rank * part); }
  /// Elements of `rank`'s part in [from, from + at_most).
  std::size_t length(std::size_t rank, std::size_t from, std::size_t at_most) const {
    std::size_t const size = std::min(total, (rank + 1) * part) - begin(rank);
    return size <= from ? 0 : std::min(at_most, size - from);
  }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::mpi::detail
