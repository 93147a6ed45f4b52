// SPDX-License-Identifier: Apache-2.0
// See [Note: fp32 products].
#include "transformer/math/fp32_products.hpp"

#if defined(__AVX512F__)

#include <cstddef>
#include <cstdlib>
#include <new>

#include "transformer/math/avx512.hpp"

namespace transformer {
namespace {

/// [Note: fp32 products] As in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), with
/// the roles of A and B exchanged, since C is row-major. A tile of C, 14 rows by 32 columns, stays in 28 registers
/// while a block of k passes. The block of B (up to 384 by 768) lies in the second-level cache, packed by panels of 32
/// columns; 14 rows of A lie in the first one. Packing A by rows is a plain copy, which spares the cache the strides of
/// the whole matrix. While a tile is computed, the rows of A that come next are fetched into the second-level cache:
/// where they begin, no hardware foresees.
constexpr std::int64_t most_terms = 384;                 ///< of a block, in k
constexpr std::int64_t most_columns = 768;               ///< of a block of B
constexpr std::int64_t row_pitch = most_terms + vector;  ///< of packed rows of A
constexpr std::int64_t group = 8;   ///< tiles whose rows of a transposed A are packed together: its rows are long
constexpr std::int64_t ahead = 16;  ///< terms by which a panel of B is fetched before it is used

std::int64_t within(std::int64_t value, std::int64_t most) { return value < 0 ? 0 : least(value, most); }

/// Into how large parts to cut `length`, as few as may be of at most `most`, and all of about one size.
std::int64_t part(std::int64_t length, std::int64_t most, std::int64_t unit) {
  std::int64_t const parts = (length + most - 1) / most;
  return whole((length + parts - 1) / parts, unit);
}

/// A thread's buffers of packed operands.
class Packed {
 public:
  explicit Packed(std::int64_t elements)
      : data_(static_cast<float*>(std::aligned_alloc(4096, static_cast<std::size_t>(whole(elements * 4, 4096))))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  Packed(Packed const&) = delete;
  Packed& operator=(Packed const&) = delete;
  ~Packed() { std::free(data_); }
  float* data() const { return data_; }

 private:
  float* data_;
};

/// Rows of memory that will be read soon: one for each half of a tile's time.
struct Next {
  char const *first, *second;
};

/// c (Rows, 32) = or += a (Rows, terms) b (terms, 32); element (r, i) of a lies at r * RowPitch + i * TermPitch.
template <int Rows, int RowPitch, int TermPitch>
void tile(std::int64_t terms, float const* a, float const* b, float* c, std::int64_t ldc, bool adds, Next next) {
  Vector sum[static_cast<std::size_t>(Rows)][2];
#pragma GCC unroll 14
  for (int r = 0; r < Rows; ++r) {
    sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    _mm_prefetch(reinterpret_cast<char const*>(c + r * ldc), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<char const*>(c + r * ldc + vector), _MM_HINT_T0);
  }
  auto const add = [&](std::int64_t i) __attribute__((always_inline)) {
    char const* const later = reinterpret_cast<char const*>(b) + (i + ahead) * tile_columns * 4;
    _mm_prefetch(later, _MM_HINT_T0);
    _mm_prefetch(later + 64, _MM_HINT_T0);
    Vector const left = _mm512_load_ps(b + i * tile_columns), right = _mm512_load_ps(b + i * tile_columns + vector);
#pragma GCC unroll 14
    for (int r = 0; r < Rows; ++r) {
      Vector const x = _mm512_set1_ps(a[r * RowPitch + i * TermPitch]);
      sum[r][0] = _mm512_fmadd_ps(x, left, sum[r][0]);
      sum[r][1] = _mm512_fmadd_ps(x, right, sum[r][1]);
    }
  };
  std::int64_t i = 0;
  for (; i + vector <= terms; i += vector) {
    _mm_prefetch(next.first + i * 4, _MM_HINT_T1);
    _mm_prefetch(next.second + i * 4, _MM_HINT_T1);
    for (std::int64_t four = i; four < i + vector; four += 4) {
      add(four);
      add(four + 1);
      add(four + 2);
      add(four + 3);
    }
  }
  for (; i < terms; ++i) add(i);
#pragma GCC unroll 14
  for (int r = 0; r < Rows; ++r) {
    float* const row = c + r * ldc;
    if (adds) {
      sum[r][0] = _mm512_add_ps(sum[r][0], _mm512_loadu_ps(row));
      sum[r][1] = _mm512_add_ps(sum[r][1], _mm512_loadu_ps(row + vector));
    }
    _mm512_storeu_ps(row, sum[r][0]);
    _mm512_storeu_ps(row + vector, sum[r][1]);
  }
}

using Tile = void (*)(std::int64_t, float const*, float const*, float*, std::int64_t, bool, Next);
/// By rows - 1.
template <int RowPitch, int TermPitch>
constexpr Tile tiles[tile_rows] = {
    tile<1, RowPitch, TermPitch>,  tile<2, RowPitch, TermPitch>,  tile<3, RowPitch, TermPitch>,
    tile<4, RowPitch, TermPitch>,  tile<5, RowPitch, TermPitch>,  tile<6, RowPitch, TermPitch>,
    tile<7, RowPitch, TermPitch>,  tile<8, RowPitch, TermPitch>,  tile<9, RowPitch, TermPitch>,
    tile<10, RowPitch, TermPitch>, tile<11, RowPitch, TermPitch>, tile<12, RowPitch, TermPitch>,
    tile<13, RowPitch, TermPitch>, tile<14, RowPitch, TermPitch>};

/// Elements from one panel of B to the next: lines of several panels are not to meet in one set of the cache.
std::int64_t panel_pitch(std::int64_t terms) { return (terms + 1) * tile_columns; }

/// A panel of op(B), (terms, 32), with zeros for columns that it has not.
void pack_panel(Op op, float const* b, std::int64_t ldb, std::int64_t terms, std::int64_t width, float* to) {
  for (std::int64_t half = 0; half < tile_columns; half += vector) {
    float const* const from = b + (op == Op::none ? half : half * ldb);
    float* const out = to + half;
    std::int64_t i = 0;
    if (op == Op::transpose && width >= half + vector)
      for (; i + vector <= terms; i += vector)
        transpose(reinterpret_cast<char const*>(from + i), ldb * 4, vector,
                  reinterpret_cast<Word*>(out + i * tile_columns));
    for (; i < terms; ++i) {
      for (std::int64_t column = 0; column < vector; ++column) {
        bool const there = half + column < width;
        out[i * tile_columns + column] = !there           ? 0.0f
                                         : op == Op::none ? from[i * ldb + column]
                                                          : from[column * ldb + i];
      }
    }
  }
}

/// Panels of op(B), panel_pitch apart. Whole ones of a B that is not transposed row by row: it is read as it lies.
void pack_b(Op op, float const* b, std::int64_t ldb, std::int64_t terms, std::int64_t columns, float* to) {
  std::int64_t const pitch = panel_pitch(terms);
  std::int64_t const together = op == Op::none ? columns / tile_columns : 0;
  for (std::int64_t i = 0; i < terms && together > 0; ++i) {
    float const* from = b + i * ldb;
    float* out = to + i * tile_columns;
    for (std::int64_t panel = 0; panel < together; ++panel, from += tile_columns, out += pitch) {
      _mm512_store_ps(out, _mm512_loadu_ps(from));
      _mm512_store_ps(out + vector, _mm512_loadu_ps(from + vector));
    }
  }
  for (std::int64_t first = together * tile_columns; first < columns; first += tile_columns)
    pack_panel(op, b + (op == Op::none ? first : first * ldb), ldb, terms, least(tile_columns, columns - first),
               to + first / tile_columns * pitch);
}

/// Rows of A, row_pitch apart.
void copy_rows(float const* a, std::int64_t lda, std::int64_t rows, std::int64_t terms, float* to) {
  for (std::int64_t r = 0; r < rows; ++r, a += lda, to += row_pitch) {
    std::int64_t i = 0;
    for (; i + vector <= terms; i += vector) _mm512_store_ps(to + i, _mm512_loadu_ps(a + i));
    for (; i < terms; ++i) to[i] = a[i];
  }
}

/// Columns of a transposed A: for each tile_rows of them (terms, 16), of which two are not used.
void copy_columns(float const* a, std::int64_t lda, std::int64_t columns, std::int64_t terms, float* to) {
  for (std::int64_t i = 0; i < terms; ++i, a += lda, to += vector) {
    float const* from = a;
    float* out = to;
    std::int64_t left = columns;
    for (; left >= vector; left -= tile_rows, from += tile_rows, out += terms * vector)
      _mm512_store_ps(out, _mm512_loadu_ps(from));
    for (; left > 0; left -= tile_rows, from += tile_rows, out += terms * vector)
      _mm512_store_ps(out, _mm512_maskz_loadu_ps(static_cast<__mmask16>((1U << left) - 1U), from));
  }
}

/// A block of B with all rows of A.
struct Block {
  Fp32Product const& product;
  float const* a;  ///< of op_a(A) (m, terms)
  float* c;        ///< of C (m, columns)
  std::int64_t first_term, terms, first_column, columns;
  bool adds;
};

/// The terms [begin, end) of a block, and the columns up to `columns`, that a tile's rows [first, last) need.
struct Needed {
  std::int64_t begin, end, columns;
};
Needed needed(Block const& block, std::int64_t first, std::int64_t last) {
  auto const& p = block.product;
  Needed all{0, block.terms, block.columns};
  if (p.lower == Lower::result) {
    all.columns = within(last + p.n - p.m - block.first_column, block.columns);
  } else if (p.lower == Lower::left && p.op_a == Op::none) {
    all.end = within(last + p.k - p.m - block.first_term, block.terms);
  } else if (p.lower == Lower::left) {
    all.begin = within(first - (p.m - p.k) - block.first_term, block.terms);
  }
  return all;
}

/// Tiles of up to 14 rows of C, from `row`.
/// @param left   packed rows of A: needed() of them, or with a transposed A all terms
/// @param right  packed panels of B
void multiply_rows(Block const& block, std::int64_t row, Needed const& range, float const* left, float const* right) {
  auto const& p = block.product;
  std::int64_t const rows = least(tile_rows, p.m - row), terms = range.end - range.begin;
  bool const by_rows = p.op_a == Op::none;
  Tile const compute = by_rows ? tiles<row_pitch, 1>[rows - 1] : tiles<1, vector>[rows - 1];
  float const* const a = by_rows ? left : left + range.begin * vector;
  // Rows of A to fetch: the next ones, two for a panel at most.
  std::int64_t const panels = (range.columns + tile_columns - 1) / tile_columns;
  std::int64_t const coming = by_rows ? least(least(tile_rows, p.m - row - rows), 2 * panels) : 0;
  auto const fetch = [&](std::int64_t index) {
    return reinterpret_cast<char const*>(index < coming ? block.a + (row + rows + index) * p.lda : left);
  };
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    Next const next =
        coming > panels ? Next{fetch(2 * panel), fetch(2 * panel + 1)} : Next{fetch(panel), fetch(coming)};
    float* const to = block.c + row * p.ldc + panel * tile_columns;
    float const* const b = right + panel * panel_pitch(block.terms) + range.begin * tile_columns;
    std::int64_t const width = block.columns - panel * tile_columns;
    if (width >= tile_columns) {
      compute(terms, a, b, to, p.ldc, block.adds, next);
      continue;
    }
    alignas(64) float all[tile_rows * tile_columns];
    compute(terms, a, b, all, tile_columns, false, next);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < width; ++i) {
        float& result = to[r * p.ldc + i];
        result = block.adds ? all[r * tile_columns + i] + result : all[r * tile_columns + i];
      }
    }
  }
}

/// All tiles of a block.
/// @param left  room for packed rows of A
void multiply_block(Block const& block, float* left, float const* right) {
  auto const& p = block.product;
  for (std::int64_t row = 0; row < p.m; row += tile_rows) {
    std::int64_t const inside = p.op_a == Op::none ? 0 : row / tile_rows % group;
    auto const range = needed(block, row, least(row + tile_rows, p.m));
    if (p.op_a == Op::none) {
      copy_rows(block.a + row * p.lda, p.lda, least(tile_rows, p.m - row), range.end, left);
    } else if (inside == 0) {
      copy_columns(block.a + row, p.lda, least(group * tile_rows, p.m - row), block.terms, left);
    }
    multiply_rows(block, row, range, left + inside * block.terms * vector, right);
  }
}

}  // namespace

bool has_fp32_products() {  // -mavx512f stands for the second one too
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx2") != 0 &&
         __builtin_cpu_supports("fma") != 0;
}

void multiply_fp32(Fp32Product const& p, float const* a, float const* b, float* c) {
  thread_local Packed const left(group * vector * row_pitch);
  thread_local Packed const right(panel_pitch(most_terms) * (most_columns / tile_columns));
  if (p.m <= 0 || p.n <= 0) return;
  std::int64_t const terms = p.k > 0 ? part(p.k, most_terms, vector) : 1;
  std::int64_t const columns = part(p.n, most_columns, tile_columns);
  for (std::int64_t column = 0; column < p.n; column += columns) {
    for (std::int64_t first = 0; first == 0 || first < p.k; first += terms) {
      Block const block{p,
                        a + (p.op_a == Op::none ? first : first * p.lda),
                        c + column,
                        first,
                        least(terms, p.k - first),
                        column,
                        least(columns, p.n - column),
                        p.adds || first > 0};
      pack_b(p.op_b, b + (p.op_b == Op::none ? first * p.ldb + column : column * p.ldb + first), p.ldb, block.terms,
             block.columns, right.data());
      multiply_block(block, left.data(), right.data());
    }
  }
}

}  // namespace transformer

#else

namespace transformer {

bool has_fp32_products() { return false; }
void multiply_fp32(Fp32Product const&, float const*, float const*, float*) {}

}  // namespace transformer

#endif
