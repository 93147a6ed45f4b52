// SPDX-License-Identifier: Apache-2.0
// Tensor core products and asynchronous copies of an emulated thread block.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tests/support/emulated_block.hpp"
#include "transformer/kernels/tile.hpp"

namespace transformer::tile {

/// The operations of Tile as the PTX ISA describes them ("Matrix multiply-accumulate operation using mma instruction",
/// "ldmatrix", "cp.async"); the warp's last lane does what the warp does together.
template <>
struct Tile<emulated::Lanes> {
  using Address = std::uintptr_t;
  static Address address(void const* shared) { return reinterpret_cast<Address>(shared); }

  /// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d += a b.
  static void mma(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t const (&b)[2]) {
    struct {
      float* d;
      std::uint32_t const *a, *b;
    } own{d, a, b};
    emulated::machine().collective("mma", 0, own, [](auto& lanes) {
      float left[16][16], right[16][8];  // (row, k), (k, column)
      for (std::size_t lane = 0; lane < 32; ++lane) {
        std::size_t const group = lane / 4, pair = lane % 4 * 2;
        for (std::size_t half = 0; half < 2; ++half) {
          for (std::size_t i = 0; i < 4; ++i) {
            left[group + i % 2 * 8][pair + i / 2 * 8 + half] = element(lanes[lane]->a[i], half);
          }
          for (std::size_t i = 0; i < 2; ++i) right[pair + i * 8 + half][group] = element(lanes[lane]->b[i], half);
        }
      }
      for (std::size_t row = 0; row < 16; ++row) {
        float sum[8];
        for (std::size_t column = 0; column < 8; ++column) {
          sum[column] = lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
        }
        for (std::size_t k = 0; k < 16; ++k) {
          for (std::size_t column = 0; column < 8; ++column) sum[column] += left[row][k] * right[k][column];
        }
        for (std::size_t column = 0; column < 8; ++column) {
          lanes[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2] = sum[column];
        }
      }
    });
  }

  /// ldmatrix.sync.aligned.m8n8.x4.shared.b16: lane l gives the address of row l % 8 of matrix l / 8.
  static void load_matrices(std::uint32_t (&r)[4], Address row) { load<false>("ldmatrix", r, row); }
  /// ldmatrix with .trans.
  static void load_matrices_transposed(std::uint32_t (&r)[4], Address row) { load<true>("ldmatrix.trans", r, row); }

  /// cp.async.cg.shared.global of 16 bytes; zeros, and `from` is not read, if not `valid`.
  static void copy_async(Address to, void const* from, bool valid) {
    emulated::machine().copy_async(reinterpret_cast<void*>(to), valid ? from : nullptr);
  }
  /// Closes this thread's group of copies.
  static void commit() { emulated::machine().commit(); }
  /// All but the newest `Pending` groups of this thread have arrived.
  template <int Pending>
  static void wait() {
    emulated::machine().wait(Pending);
  }

  static float exp2(float x) { return std::exp2(x); }
  static float log2(float x) { return std::log2(x); }

 private:
  /// One of two bf16, the lower half first.
  static float element(std::uint32_t pair, std::size_t half) {
    return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u);
  }

  template <bool Transposed>
  static void load(char const* operation, std::uint32_t (&r)[4], Address address) {
    auto const* const row = reinterpret_cast<void const*>(address);
    emulated::machine().expect_shared(row, 16, operation);
    struct {
      std::uint32_t* r;
      void const* row;
    } own{r, row};
    emulated::machine().collective(operation, 0, own, [](auto& lanes) {
      for (auto const* const lane : lanes) emulated::machine().note_read(lane->row);
      for (std::size_t matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t element[8][8];
        for (std::size_t i = 0; i < 8; ++i) std::memcpy(element[i], lanes[matrix * 8 + i]->row, 16);
        for (std::size_t lane = 0; lane < 32; ++lane) {
          std::size_t const i = lane / 4, j = lane % 4 * 2;
          std::uint16_t const low = Transposed ? element[j][i] : element[i][j];
          std::uint16_t const high = Transposed ? element[j + 1][i] : element[i][j + 1];
          lanes[lane]->r[matrix] = low | static_cast<std::uint32_t>(high) << 16;
        }
      }
    });
  }
};

}  // namespace transformer::tile
