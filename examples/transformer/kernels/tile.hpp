// SPDX-License-Identifier: Apache-2.0
// Warp operations for attention: matrix products of 16-bit tiles, and asynchronous copies into shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp/detail/cuda/block.hpp"
#include "fsdp/tensor.hpp"
#include "transformer/kernels/packs.hpp"

#if defined(__CUDACC__)
#include "fsdp/detail/cuda/hardware.hpp"
#endif

namespace transformer::tile {

/// Static operations of a lane. Lanes as fsdp::cuda::ThreadBlock has them; a test specialises this for its emulation.
/// All lanes of a warp call the first three together, with a, b, d and r spread over them as the PTX ISA's section
/// on mma.m16n8k16 and ldmatrix shows.
template <class Lanes>
struct Tile;

#if defined(__CUDACC__)
template <>
struct Tile<fsdp::cuda::Hardware> {
  /// A place in shared memory, as a number to calculate with.
  using Address = std::uint32_t;
  FSDP_HD static Address address([[maybe_unused]] void const* shared) {
#if defined(__CUDA_ARCH__)
    return static_cast<Address>(__cvta_generic_to_shared(shared));
#else
    return 0;
#endif
  }

  /// d (16 x 8, fp32) += a (16 x 16, bf16, by rows) b (16 x 8, bf16, by columns).
  FSDP_HD static void mma([[maybe_unused]] float (&d)[4], [[maybe_unused]] std::uint32_t const (&a)[4],
                          [[maybe_unused]] std::uint32_t const (&b)[2]) {
#if defined(__CUDA_ARCH__)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
  }

  /// Four 8 x 8 matrices of 16-bit elements out of shared memory: r[i] is the lane's part of matrix i.
  /// @param row  16 bytes, aligned: row l % 8 of matrix l / 8, for lane l
  FSDP_HD static void load_matrices([[maybe_unused]] std::uint32_t (&r)[4], [[maybe_unused]] Address row) {
#if defined(__CUDA_ARCH__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
  }
  /// Loads four 8 x 8 matrices as load_matrices does, each transposed.
  FSDP_HD static void load_matrices_transposed([[maybe_unused]] std::uint32_t (&r)[4], [[maybe_unused]] Address row) {
#if defined(__CUDA_ARCH__)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
  }

  /// Copies 16 bytes, both addresses aligned, from global to shared memory; they are there after a wait of this
  /// thread. Writes zeros instead if not `valid`; then `from` is not read, but must be an address of the device.
  FSDP_HD static void copy_async([[maybe_unused]] Address to, [[maybe_unused]] void const* from,
                                 [[maybe_unused]] bool valid) {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(valid ? 16 : 0)
                 : "memory");
#endif
  }
  /// Closes the group of this thread's copies since the last one.
  FSDP_HD static void commit() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  /// Waits until all but the last `Pending` groups of this thread are there.
  template <int Pending>
  FSDP_HD static void wait() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
  }

  /// 2^x, to 2 ulp; 0 below -126.
  FSDP_HD static float exp2([[maybe_unused]] float x) {
#if defined(__CUDA_ARCH__)
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return 0.0f;
#endif
  }
  /// Base-2 logarithm.
  FSDP_HD static float log2([[maybe_unused]] float x) {
#if defined(__CUDA_ARCH__)
    return ::log2f(x);
#else
    return 0.0f;
#endif
  }
};
#endif

/// Two values as one register of bf16, rounded to nearest even: `low` in the lower half.
FSDP_HD inline std::uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__)
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return static_cast<std::uint32_t>(fsdp::bf16(high).bits) << 16 | fsdp::bf16(low).bits;
#endif
}

/// Copies 16 bytes, both addresses aligned.
FSDP_HD inline void copy_chunk(fsdp::bf16* to, fsdp::bf16 const* from) {
  struct alignas(16) Chunk {
    std::uint32_t word[4];
  };
  *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<Chunk const*>(from);
}

/// Rows of `Width` 16-bit elements in shared memory, without gaps. Chunk c (16 bytes) of row r lies at place c ^ (r %
/// 8): eight rows' chunks of one column lie in different banks, for ldmatrix and for rows that are written whole.
template <int Width>
struct SharedRows {
  static_assert(Width % 64 == 0, "a row has at least eight chunks");
  static constexpr int chunks = Width / 8;
  static constexpr std::size_t bytes(int rows) { return sizeof(fsdp::bf16) * Width * static_cast<std::size_t>(rows); }

  fsdp::bf16* base;  // aligned to 128 bytes

  FSDP_HD fsdp::bf16* at(int row, int chunk) const { return base + (row * chunks + (chunk ^ (row & 7))) * 8; }
};

/// A chunk of SharedRows<Width>, and others so and so many rows and chunks from it.
template <class Lanes, int Width>
struct Place {
  using Address = typename Tile<Lanes>::Address;
  Address first;

  FSDP_HD explicit Place(fsdp::bf16 const* chunk) : first(Tile<Lanes>::address(chunk)) {}
  /// @param rows    a multiple of 8: the order of chunks is the same there
  /// @param chunks  even, and the first chunk is 0 or 1: then chunk numbers add up without a carry
  FSDP_HD Address at(int rows, int chunks) const {
    return (first ^ static_cast<Address>(chunks % 8 * 16)) + static_cast<Address>(rows * Width * 2 + chunks / 8 * 128);
  }
};

/// Starts copying `Rows` rows out of global memory, `stride` elements apart; rows from `valid` on become zeros.
template <int Rows, int Threads, class Block, int Width>
FSDP_HD void copy_rows(Block const& block, SharedRows<Width> to, fsdp::bf16 const* from, std::int64_t stride,
                       std::int64_t valid) {
  constexpr int chunks = SharedRows<Width>::chunks, step = Threads / chunks;
  static_assert(Threads % (8 * chunks) == 0 && Rows % step == 0);
  int const begin = block.thread() / chunks, chunk = block.thread() % chunks;
  int const there = valid < Rows ? static_cast<int>(valid) : Rows;
  Place<typename Block::Lanes, Width> const place(to.at(begin, chunk));
  fsdp::bf16 const* source = from + begin * stride + chunk * 8;
  FSDP_UNROLL
  for (int row = 0; row < Rows; row += step, source += step * stride) {
    bool const is_there = begin + row < there;
    Tile<typename Block::Lanes>::copy_async(place.at(row, 0), is_there ? source : from, is_there);
  }
}

/// [Note: Fragments]
/// A warp's product d (16 x 8) += a (16 x 16) b (16 x 8). Lane l holds, with g = l / 4 and q = l % 4: of d, columns 2q
/// and 2q + 1 of rows g (d[0], d[1]) and g + 8 (d[2], d[3]); of a, row pairs g, g + 8 at columns 2q.. and 2q + 8..; of
/// b, rows 2q.. and 2q + 8.. of column g. Two neighbouring d tiles, rounded, are therefore an a fragment as they stand.

/// Where this lane's loads of 16 rows from `row` on begin: for load_a and load_b.
template <class Lanes, int Width>
FSDP_HD Place<Lanes, Width> lane_place(SharedRows<Width> rows, int row, int lane) {
  return Place<Lanes, Width>(rows.at(row + lane % 16, lane / 16));
}
/// Where this lane's loads of 16 rows from `row` on begin: for load_b_transposed.
template <class Lanes, int Width>
FSDP_HD Place<Lanes, Width> lane_place_transposed(SharedRows<Width> rows, int row, int lane) {
  return Place<Lanes, Width>(rows.at(row + lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

/// a (16 x 16): 16 rows, `rows` behind the place, chunks `chunk` and `chunk` + 1.
template <class Lanes, int Width>
FSDP_HD void load_a(std::uint32_t (&a)[4], Place<Lanes, Width> const& place, int rows, int chunk) {
  Tile<Lanes>::load_matrices(a, place.at(rows, chunk));
}
/// b and next (16 x 8 each): the transpose of 16 such rows.
template <class Lanes, int Width>
FSDP_HD void load_b_transposed(std::uint32_t (&b)[2], std::uint32_t (&next)[2], Place<Lanes, Width> const& place,
                               int rows, int chunk) {
  std::uint32_t r[4];
  Tile<Lanes>::load_matrices(r, place.at(rows, chunk));
  b[0] = r[0], b[1] = r[1], next[0] = r[2], next[1] = r[3];
}
/// b and next (16 x 8 each): 16 such rows as they are, chunk `chunk` in b and the next in `next`.
template <class Lanes, int Width>
FSDP_HD void load_b(std::uint32_t (&b)[2], std::uint32_t (&next)[2], Place<Lanes, Width> const& place, int rows,
                    int chunk) {
  std::uint32_t r[4];
  Tile<Lanes>::load_matrices_transposed(r, place.at(rows, chunk));
  b[0] = r[0], b[1] = r[1], next[0] = r[2], next[1] = r[3];
}

/// The a fragment of 16 columns, made of two d tiles.
FSDP_HD inline void as_a(std::uint32_t (&a)[4], float const (&left)[4], float const (&right)[4]) {
  a[0] = pack(left[0], left[1]);
  a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]);
  a[3] = pack(right[2], right[3]);
}

}  // namespace transformer::tile

#if defined(FSDP_CUDA_STANDIN) && defined(FSDP_CUDA_SOURCE)  // other sources stay as they are without the stand-ins
#include <transformer_tile_standin.hpp>  // of a test: Tile for what fsdp/detail/cuda/launch.hpp runs kernels on there
#endif
