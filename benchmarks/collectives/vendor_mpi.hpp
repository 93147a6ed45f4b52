// SPDX-License-Identifier: Apache-2.0
// Measures MPI's own collectives, for comparison.
#pragma once

#include <cstddef>
#include <type_traits>

#include "fsdp/detail/mpi/header.hpp"
#include "settings.hpp"

namespace bench {

/// Runs on the calling thread. MPI knows neither bf16 nor fp16: it gathers them as bytes and cannot sum them.
struct MpiVendor {
  template <class T>
  static constexpr bool is_number = std::is_same_v<T, float> || std::is_same_v<T, double>;

  template <class T>
  static constexpr bool supports(Collective collective) {
    return is_number<T> || collective == Collective::all_gather;
  }
  /// @param send nullptr: in place, all of it in `receive`
  template <class T>
  void run(Collective collective, T const* send, T* receive, std::size_t count) {
    void const* const from = send == nullptr ? MPI_IN_PLACE : static_cast<void const*>(send);
    auto const n = static_cast<int>(count);
    if (collective == Collective::all_gather) {
      auto const bytes = static_cast<int>(count * sizeof(T));
      MPI_Allgather(from, bytes, MPI_BYTE, receive, bytes, MPI_BYTE, MPI_COMM_WORLD);
    }
    if constexpr (is_number<T>) {
      auto const type = std::is_same_v<T, float> ? MPI_FLOAT : MPI_DOUBLE;
      if (collective == Collective::reduce_scatter)
        MPI_Reduce_scatter_block(from, receive, n, type, MPI_SUM, MPI_COMM_WORLD);
      if (collective == Collective::all_reduce) MPI_Allreduce(from, receive, n, type, MPI_SUM, MPI_COMM_WORLD);
    }
  }
};

}  // namespace bench
