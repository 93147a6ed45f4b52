// SPDX-License-Identifier: Apache-2.0
// 16 bytes of a row at a time, for kernels of thread blocks alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp/detail/cuda/block.hpp"

namespace transformer::blocks {

/// The extent of an array.
FSDP_HD constexpr std::size_t extent(int n) { return static_cast<std::size_t>(n); }

/// Elements that move together: 16 bytes.
template <class A>
inline constexpr int pack_elements = 16 / static_cast<int>(sizeof(A));
template <class A>
using Pack = fsdp::cuda::detail::Pack<A, pack_elements<A>>;

/// Whether a row of these views can move in packs: their addresses, and the columns.
template <class A, class... Views>
bool in_packs(std::int64_t columns, Views... views) {
  return columns % pack_elements<A> == 0 && ((reinterpret_cast<std::uintptr_t>(views) % 16 == 0) && ...);
}

template <class A>
FSDP_HD inline Pack<A> load(A const* place) {
  return *reinterpret_cast<Pack<A> const*>(place);
}
template <class A>
FSDP_HD inline void store(A* place, Pack<A> const& pack) {
  *reinterpret_cast<Pack<A>*>(place) = pack;
}

}  // namespace transformer::blocks
