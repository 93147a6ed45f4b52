// SPDX-License-Identifier: Apache-2.0
// Packs of elements that a thread moves together, up to 128 bits in each load or store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fsdp/cuda/unroll.hpp"
#include "fsdp/kernels/block.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail {

using fsdp::detail::load;

/// `Count` elements that move together, in units of up to 16 bytes.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) Pack {
  T element[std::size_t{Count}];
};

/// Smallest element of these views, in bytes.
template <class View>
inline constexpr int element_bytes = sizeof(std::remove_pointer_t<View>);
template <>
inline constexpr int element_bytes<Indices> = 16;

template <class... Views>
FSDP_HD constexpr int pack_count() {
  int smallest = 16;
  ((smallest = element_bytes<Views> < smallest ? element_bytes<Views> : smallest), ...);
  return 16 / smallest;
}

/// True when packs of `Count` elements of this view may be read and written whole.
template <int Count, class T>
FSDP_HD inline bool aligned(T const* view) {
  return reinterpret_cast<std::uintptr_t>(view) % alignof(Pack<T, Count>) == 0;
}
template <int Count>
FSDP_HD inline bool aligned(Indices) {
  return true;
}

/// A pack of a view in registers, widened on demand.
template <int Count, class T>
struct Loaded {
  Pack<std::remove_cv_t<T>, Count> pack;
  FSDP_HD Loaded(T* view, std::int64_t i)
      : pack(*reinterpret_cast<Pack<std::remove_cv_t<T>, Count> const*>(view + i)) {}
  FSDP_HD Compute<T> operator[](int k) const { return widen(pack.element[k]); }
};
template <int Count>
struct LoadedIndices {
  std::int64_t first;
  FSDP_HD std::int64_t operator[](int k) const { return first + k; }
};
template <int Count, class T>
FSDP_HD inline Loaded<Count, T> load_pack(T* view, std::int64_t i) {
  return Loaded<Count, T>(view, i);
}
template <int Count>
FSDP_HD inline LoadedIndices<Count> load_pack(Indices view, std::int64_t i) {
  return LoadedIndices<Count>{view.first + i};
}

/// A pack of a view that `update` may write back.
template <int Count, class View>
struct Updated;
template <int Count, class T>
struct Updated<Count, T*> {
  T* place;
  Compute<T> value[std::size_t{Count}];
  FSDP_HD Updated(T* view, std::int64_t i) : place(view + i) {
    Loaded<Count, T> const loaded(view, i);
    FSDP_UNROLL
    for (int k = 0; k < Count; ++k) value[k] = loaded[k];
  }
  FSDP_HD Compute<T>& get(int k) { return value[k]; }
  FSDP_HD void store() const {
    if constexpr (!std::is_const_v<T>) {
      Pack<T, Count> pack;
      FSDP_UNROLL
      for (int k = 0; k < Count; ++k) pack.element[k] = narrow<T>(value[k]);
      *reinterpret_cast<Pack<T, Count>*>(place) = pack;
    }
  }
};
template <int Count>
struct Updated<Count, Indices> {
  std::int64_t first, value = 0;
  FSDP_HD Updated(Indices view, std::int64_t i) : first(view.first + i) {}
  FSDP_HD std::int64_t const& get(int k) {
    value = first + k;
    return value;
  }
  FSDP_HD void store() const {}
};

template <int Count, class F, class... Packs>
FSDP_HD inline void update_pack(F const& f, Packs... packs) {
  FSDP_UNROLL
  for (int k = 0; k < Count; ++k) f(packs.get(k)...);
  (packs.store(), ...);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::cuda::detail
