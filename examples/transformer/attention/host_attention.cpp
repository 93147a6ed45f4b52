// SPDX-License-Identifier: Apache-2.0
// See [Note: Attention in tiles].
#include "transformer/attention/host_attention.hpp"

#include "transformer/math/thread_sanitizer.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && !defined(TRANSFORMER_THREAD_SANITIZER)

#include "transformer/math/avx512.hpp"

namespace transformer {
namespace {

/// [Note: Attention in tiles]
/// One head of a sequence at a time. Queries go in blocks of 56 rows. A block's scores with all keys that its last row
/// sees are one product, in tiles of 14 rows by 32 keys that stay in registers (see [Note: fp32 products]); a tile
/// whose rows see none of its keys is left out. Scores stay in fp32 in a buffer of the block, rows of probabilities are
/// rounded to the type of the operands and multiplied with the values, up to the last key that a tile's rows see.
///
/// Backward computes a block's probabilities again, then the gradient of its scores, and adds to the gradients of all
/// keys and values, which are summed in fp32. Blocks go from the last to the first: the last one sees all keys, so its
/// products start the sums.
///
/// Operands are in *words* of 32 bits: one fp32 element, or two of bf16 that are neighbours along the sum. With words
/// both types have the same layout and the same loops, and differ in the instruction that multiplies and in how
/// operands are packed. The right operand of a product lies in panels of 32 columns, (words, 32).
constexpr std::int64_t block_rows = 4 * tile_rows;
/// Left operands lie in chunks of so many words a row, so that the distance between rows is known to the compiler;
/// whole vectors and whole tiles of keys. A row's distance is such that rows do not meet in one set of the cache.
constexpr std::int64_t chunk = 448, row_pitch = chunk + vector, chunk_pitch = block_rows * row_pitch;
constexpr std::int64_t most_head_size = 256;
static_assert(chunk % vector == 0 && chunk % tile_rows == 0 && most_head_size <= chunk);

std::int64_t most(std::int64_t a, std::int64_t b) { return a < b ? b : a; }
__mmask16 first_lanes(std::int64_t count) {
  return count >= vector ? __mmask16(0xffff) : static_cast<__mmask16>((1U << count) - 1U);
}

/// Operations on elements of one type: words, their product, and conversion from fp32.
struct Fp32 {
  using Element = float;
  static constexpr std::int64_t per_word = 1;
  static Vector multiply_add(Words a, Words b, Vector sum) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
  /// 16 elements from 16 results.
  static void put(float* to, Vector value) { _mm512_storeu_ps(to, value); }
  /// 32 words of a panel from 32 columns of the rows of a word.
  static void interleave(float const* row, float const*, Word* to) {
    store(to, load(row));
    store(to + vector, load(row + vector));
  }
};

struct Bf16 {
  using Element = fsdp::bf16;
  static constexpr std::int64_t per_word = 2;
  static Vector multiply_add(Words a, Words b, Vector sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static __m256i narrow(Vector value) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)); }
  static void put(fsdp::bf16* to, Vector value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(value)); }
  /// @param second  null: zeros
  static void interleave(fsdp::bf16 const* first, fsdp::bf16 const* second, Word* to) {
    Words const a = load(first), b = second == nullptr ? _mm512_setzero_si512() : load(second);
    Words const low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    Words const high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    store(to, _mm512_permutex2var_epi16(a, low, b));
    store(to + vector, _mm512_permutex2var_epi16(a, high, b));
  }
  /// Words of two rows' results.
  static Words pair(Vector first, Vector second) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(first)),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(second)), 16));
  }
};

/// e^x of x <= 0, as fsdp::math::exp_in_range computes it; 0 where e^x is below 1.2e-38. NaN stays.
Vector exp_to_zero(Vector x) {
  Vector const bounded = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);
  Vector const power = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)),
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vector const reduced = _mm512_fmadd_ps(power, _mm512_set1_ps(-1.42860677e-6f),
                                         _mm512_fmadd_ps(power, _mm512_set1_ps(-0.693145752f), bounded));
  Vector tail = _mm512_set1_ps(0.00138141797f);
  for (float const coefficient : {0.00836891867f, 0.0416684076f, 0.166665196f, 0.49999994f})
    tail = _mm512_fmadd_ps(tail, reduced, _mm512_set1_ps(coefficient));
  Vector const mantissa =
      _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(reduced, reduced), tail, reduced), _mm512_set1_ps(1.0f));
  Vector const result = _mm512_scalef_ps(mantissa, power);
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ), result, _mm512_setzero_ps());
}

/// c (14, 16 Vectors) = or += a b; word i of row r of a lies at r * RowPitch + i * TermPitch, b is a panel from the
/// first of `words` words.
template <class T, std::int64_t Vectors, std::int64_t RowPitch, std::int64_t TermPitch>
void tile(std::int64_t words, Word const* a, Word const* b, float* c, std::int64_t ldc, bool adds) {
  Vector sum[static_cast<std::size_t>(tile_rows)][static_cast<std::size_t>(Vectors)];
#pragma GCC unroll 14
  for (std::int64_t r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 2
    for (std::int64_t v = 0; v < Vectors; ++v)
      sum[r][v] = adds ? _mm512_loadu_ps(c + r * ldc + v * vector) : _mm512_setzero_ps();
  }
  for (std::int64_t i = 0; i < words; ++i, a += TermPitch, b += tile_columns) {
    Words right[static_cast<std::size_t>(Vectors)];
#pragma GCC unroll 2
    for (std::int64_t v = 0; v < Vectors; ++v) right[v] = _mm512_load_si512(b + v * vector);
#pragma GCC unroll 14
    for (std::int64_t r = 0; r < tile_rows; ++r) {
      Words const left = _mm512_set1_epi32(a[r * RowPitch]);
#pragma GCC unroll 2
      for (std::int64_t v = 0; v < Vectors; ++v) sum[r][v] = T::multiply_add(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 14
  for (std::int64_t r = 0; r < tile_rows; ++r) {
#pragma GCC unroll 2
    for (std::int64_t v = 0; v < Vectors; ++v) _mm512_storeu_ps(c + r * ldc + v * vector, sum[r][v]);
  }
}

/// Y^T in panels, for products of rows with rows: y is (rows, size), its rows `pitch` elements apart. A panel is 32
/// rows, (size / per_word, 32) words; rows that the last panel has not are zeros.
template <class T>
void pack_transposed(typename T::Element const* y, std::int64_t pitch, std::int64_t rows, std::int64_t size, Word* to) {
  std::int64_t const words = size / T::per_word, bytes = pitch * static_cast<std::int64_t>(sizeof(*y));
  for (std::int64_t row = 0; row < whole(rows, tile_columns); row += vector) {
    Word* const panel = to + row / tile_columns * words * tile_columns + row % tile_columns;
    for (std::int64_t i = 0; i < words; i += vector)
      transpose(reinterpret_cast<char const*>(y + row * pitch) + i * 4, bytes, rows - row, panel + i * tile_columns);
  }
}

/// Y in panels of 32 of its columns, for products that sum over its rows: (whole words of rows, 32) words each, `words`
/// of them from one panel to the next. Rows that the last word has not are zeros.
template <class T>
void pack_rows(typename T::Element const* y, std::int64_t pitch, std::int64_t rows, std::int64_t size,
               std::int64_t words, Word* to) {
  for (std::int64_t row = 0; row < rows; row += T::per_word) {
    auto const* const first = y + row * pitch;
    auto const* const second = row + 1 < rows ? first + pitch : nullptr;
    for (std::int64_t column = 0; column < size; column += tile_columns)
      T::interleave(first + column, second == nullptr ? nullptr : second + column,
                    to + (column / tile_columns * words + row / T::per_word) * tile_columns);
  }
}

/// Rows of a left operand, row_pitch words apart, in a chunk of its own; zeros below the last one, to whole tiles:
/// whatever lies there is multiplied too, and what is not a normal number may be slow.
template <class T>
void copy_rows(typename T::Element const* y, std::int64_t pitch, std::int64_t rows, std::int64_t size, Word* to) {
  std::int64_t const words = size / T::per_word;
  for (std::int64_t row = 0; row < whole(rows, tile_rows); ++row, y += pitch, to += row_pitch)
    for (std::int64_t i = 0; i < words; i += vector)
      store(to + i, row < rows ? load(y + i * T::per_word) : _mm512_setzero_si512());
}

/// Where a thread's pieces of scratch lie. Sizes are in floats or words, both of 4 bytes.
struct Pieces {
  std::int64_t keys;  ///< room for so many, whole panels
  std::int64_t score_pitch;
  std::int64_t size = 0;                                                          ///< of all, in floats
  std::int64_t keys_transposed, values_transposed, keys_by_rows, values_by_rows;  ///< right operands
  std::int64_t key_gradient, value_gradient;                                      ///< (whole tiles of keys, head size)
  std::int64_t scores, scores_gradient;                                           ///< (block_rows, score_pitch)
  std::int64_t queries, results;                  ///< of a block: left operands; results: the gradient of them
  std::int64_t queries_by_rows, results_by_rows;  ///< of a block: right operands
  std::int64_t left, left_transposed;             ///< of a block: probabilities, or the gradient of scores
  std::int64_t out;                               ///< (tile_rows, head size)

  Pieces(std::int64_t wanted_keys, std::int64_t head_size, std::int64_t per_word, bool training)
      : keys(whole(wanted_keys, tile_columns)), score_pitch(keys + vector) {
    auto const chunks = [&](std::int64_t words) { return (words + 2 * vector + chunk - 1) / chunk; };
    std::int64_t const packed = keys * head_size / per_word;
    std::int64_t const block = block_rows / per_word * head_size;
    keys_transposed = take(packed);
    values_by_rows = take(packed);
    scores = take(block_rows * score_pitch);
    queries = take(chunk_pitch);
    left = take(chunks(keys / per_word) * chunk_pitch);
    out = take(tile_rows * head_size);
    values_transposed = take(training ? packed : 0);
    keys_by_rows = take(training ? packed : 0);
    key_gradient = take(training ? whole(keys, tile_rows) * head_size : 0);
    value_gradient = take(training ? whole(keys, tile_rows) * head_size : 0);
    scores_gradient = take(training ? block_rows * score_pitch : 0);
    results = take(training ? chunk_pitch : 0);
    queries_by_rows = take(training ? block : 0);
    results_by_rows = take(training ? block : 0);
    left_transposed = per_word == 1 ? left : take(training ? chunks(keys) * (chunk_pitch / 2) : 0);
  }

 private:
  std::int64_t take(std::int64_t count) {
    std::int64_t const begin = size;
    size += whole(count, vector);
    return begin;
  }
};

/// One head of one sequence.
template <class T>
class OneHead {
 public:
  using Element = typename T::Element;

  OneHead(HostAttention const& shape, std::int64_t part, Element const* qkv, bool training, std::byte* scratch)
      : size_(shape.head_size),
        length_(shape.length),
        position_(shape.position),
        keys_(shape.position + shape.length),
        width_(shape.width()),
        sequence_(part / shape.heads),
        column_(part % shape.heads * shape.head_size),
        qkv_(qkv + sequence_ * shape.capacity * 3 * width_ + column_),
        scale_(1.0f / __builtin_sqrtf(static_cast<float>(shape.head_size))),
        at_(keys_, size_, T::per_word, training),
        floats_(reinterpret_cast<float*>(scratch)),
        words_(reinterpret_cast<Word*>(scratch)) {}

  void forward(Element* mixed) {
    Element const *keys = qkv_ + width_, *values = keys + width_;
    pack_transposed<T>(keys, 3 * width_, keys_, size_, words_ + at_.keys_transposed);
    pack_rows<T>(values, 3 * width_, keys_, size_, at_.keys / T::per_word, words_ + at_.values_by_rows);
    for (std::int64_t first = 0; first < length_; first += block_rows) {
      enter(first);
      multiply_rows(at_.queries, at_.keys_transposed, at_.scores);
      put_left([this](std::int64_t row) { return Powers(*this, row); });
      multiply_left(at_.values_by_rows, inverse_, mixed + (sequence_ * length_ + first) * width_ + column_, width_);
    }
  }

  void backward(Element const* mixed_gradient, Element* qkv_gradient) {
    Element const *keys = qkv_ + width_, *values = keys + width_;
    pack_transposed<T>(keys, 3 * width_, keys_, size_, words_ + at_.keys_transposed);
    pack_transposed<T>(values, 3 * width_, keys_, size_, words_ + at_.values_transposed);
    pack_rows<T>(keys, 3 * width_, keys_, size_, at_.keys / T::per_word, words_ + at_.keys_by_rows);
    Element* const to = qkv_gradient + sequence_ * length_ * 3 * width_ + column_;
    bool adds = false;
    for (std::int64_t first = (length_ - 1) / block_rows * block_rows; first >= 0; first -= block_rows) {
      enter(first);
      Element const* const gradient = mixed_gradient + (sequence_ * length_ + first) * width_ + column_;
      copy_rows<T>(gradient, width_, rows_, size_, words_ + at_.results);
      pack_rows<T>(gradient, width_, rows_, size_, block_rows / T::per_word, words_ + at_.results_by_rows);
      pack_rows<T>(qkv_ + first * 3 * width_, 3 * width_, rows_, size_, block_rows / T::per_word,
                   words_ + at_.queries_by_rows);
      multiply_rows(at_.queries, at_.keys_transposed, at_.scores);
      probabilities();
      add_to_keys(at_.results_by_rows, at_.value_gradient, adds);
      multiply_rows(at_.results, at_.values_transposed, at_.scores_gradient);
      put_left([this](std::int64_t row) { return slope(row); });
      multiply_left(at_.keys_by_rows, nullptr, to + first * 3 * width_, 3 * width_);
      add_to_keys(at_.queries_by_rows, at_.key_gradient, adds);
      adds = true;
    }
    for (std::int64_t key = 0; key < keys_; ++key) {
      put_row(floats_ + at_.key_gradient + key * size_, 1.0f, to + key * 3 * width_ + width_);
      put_row(floats_ + at_.value_gradient + key * size_, 1.0f, to + key * 3 * width_ + 2 * width_);
    }
  }

 private:
  /// Goes on to the block of query rows from `first`.
  void enter(std::int64_t first) {
    first_ = position_ + first;
    rows_ = least(block_rows, length_ - first);
    copy_rows<T>(qkv_ + first_ * 3 * width_, 3 * width_, rows_, size_, words_ + at_.queries);
  }
  /// Keys that a row of the block sees; those that a tile's last row sees.
  std::int64_t visible(std::int64_t row) const { return first_ + row + 1; }
  std::int64_t visible_to_tile(std::int64_t row) const { return visible(least(row + tile_rows, rows_) - 1); }

  /// to (block, keys) = left operand times transposed right one, as far as rows see keys.
  void multiply_rows(std::int64_t left, std::int64_t right, std::int64_t to) {
    std::int64_t const words = size_ / T::per_word;
    for (std::int64_t key = 0; key < visible(rows_ - 1); key += tile_columns) {
      Word const* const panel = words_ + right + key * words;
      for (std::int64_t row = 0; row < rows_; row += tile_rows) {
        std::int64_t const columns = visible_to_tile(row) - key;
        if (columns <= 0) continue;
        auto const compute = columns <= vector ? tile<T, 1, row_pitch, 1> : tile<T, 2, row_pitch, 1>;
        compute(words, words_ + left + row * row_pitch, panel, floats_ + to + row * at_.score_pitch + key,
                at_.score_pitch, false);
      }
    }
  }

  /// to (block, head size) = left (block, keys) times a right operand by rows, and rows times their factors.
  /// @param factors  null: 1
  void multiply_left(std::int64_t right, float const* factors, Element* to, std::int64_t pitch) {
    for (std::int64_t row = 0; row < rows_; row += tile_rows) {
      std::int64_t const words = (visible_to_tile(row) + T::per_word - 1) / T::per_word;
      float* const out = floats_ + at_.out;
      for (std::int64_t column = 0; column < size_; column += tile_columns) {
        Word const* const panel = words_ + right + column * (at_.keys / T::per_word);
        for (std::int64_t word = 0; word < words; word += chunk)
          tile<T, 2, row_pitch, 1>(least(chunk, words - word),
                                   words_ + at_.left + word / chunk * chunk_pitch + row * row_pitch,
                                   panel + word * tile_columns, out + column, size_, word > 0);
      }
      for (std::int64_t r = row; r < least(row + tile_rows, rows_); ++r)
        put_row(out + (r - row) * size_, factors == nullptr ? 1.0f : factors[r], to + r * pitch);
    }
  }

  /// to (keys, head size) = or += left (block, keys)^T times a right operand by the block's rows.
  void add_to_keys(std::int64_t right, std::int64_t to, bool adds) {
    constexpr std::int64_t pitch = chunk_pitch / T::per_word;  // of a chunk of left_transposed
    std::int64_t const words = (rows_ + T::per_word - 1) / T::per_word;
    for (std::int64_t key = 0; key < visible(rows_ - 1); key += tile_rows) {
      std::int64_t const word = most(0, key - first_) / T::per_word;  // the first with a row that sees the key
      Word const* const left = words_ + at_.left_transposed + key / chunk * pitch + word * row_pitch + key % chunk;
      for (std::int64_t column = 0; column < size_; column += tile_columns) {
        Word const* const panel =
            words_ + right + (column / tile_columns * (block_rows / T::per_word) + word) * tile_columns;
        tile<T, 2, 1, row_pitch>(words - word, left, panel, floats_ + to + key * size_ + column, size_, adds);
      }
    }
  }

  void put_row(float const* from, float factor, Element* to) const {
    for (std::int64_t i = 0; i < size_; i += vector)
      T::put(to + i, _mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(factor)));
  }

  float* scores_of(std::int64_t row) const { return floats_ + at_.scores + row * at_.score_pitch; }
  float* scores_gradient_of(std::int64_t row) const { return floats_ + at_.scores_gradient + row * at_.score_pitch; }

  /// The largest scaled score that a row sees. It is subtracted, so that powers are at most 1.
  Vector offset(std::int64_t row) const {
    float const* const scores = scores_of(row);
    std::int64_t const count = visible(row), full = count / vector * vector;
    Vector largest = _mm512_set1_ps(-__builtin_huge_valf());
    largest = _mm512_mask_loadu_ps(largest, first_lanes(count - full), scores + full);
    for (std::int64_t i = 0; i < full; i += vector) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
    return _mm512_set1_ps(scale_ * _mm512_reduce_max_ps(largest));
  }
  Vector power(Vector scores, Vector offset) const {
    return exp_to_zero(_mm512_fmsub_ps(_mm512_set1_ps(scale_), scores, offset));
  }

  /// A row's e^(scaled score - offset), which add up to 1 / inverse_.
  class Powers {
   public:
    Powers(OneHead& head, std::int64_t row)
        : head_(head), row_(row), count_(head.visible(row)), offset_(head.offset(row)), sum_(_mm512_setzero_ps()) {}
    Vector operator()(std::int64_t key) {
      Vector power = head_.power(_mm512_loadu_ps(head_.scores_of(row_) + key), offset_);
      if (key + vector > count_) power = _mm512_maskz_mov_ps(first_lanes(most(0, count_ - key)), power);
      sum_ = _mm512_add_ps(sum_, power);
      return power;
    }
    void finish() { head_.inverse_[row_] = 1.0f / _mm512_reduce_add_ps(sum_); }

   private:
    OneHead& head_;
    std::int64_t row_, count_;
    Vector offset_, sum_;
  };

  /// A row of `values` times its factor.
  struct Scaled {
    float const* values;
    Vector factor;
    Vector operator()(std::int64_t key) const { return _mm512_mul_ps(_mm512_loadu_ps(values + key), factor); }
    void finish() {}
  };

  /// A row of the scores' gradient, scale * p (g - sum of p g), from that of the probabilities.
  struct Slope {
    float const *powers, *gradient;
    Vector factor, mean;
    Vector operator()(std::int64_t key) const {
      return _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(powers + key), factor),
                           _mm512_sub_ps(_mm512_loadu_ps(gradient + key), mean));
    }
    void finish() {}
  };
  Slope slope(std::int64_t row) const {
    float const *const powers = scores_of(row), *const gradient = scores_gradient_of(row);
    Vector sum = _mm512_setzero_ps();  // behind the last key powers are 0
    for (std::int64_t i = 0; i < visible(row); i += vector)
      sum = _mm512_fmadd_ps(_mm512_loadu_ps(powers + i), _mm512_loadu_ps(gradient + i), sum);
    return {powers, gradient, _mm512_set1_ps(inverse_[row] * scale_),
            _mm512_set1_ps(_mm512_reduce_add_ps(sum) * inverse_[row])};
  }

  /// Scores become powers, up to the end of each row's last vector; left (block, keys) = probabilities.
  void probabilities() {
    for (std::int64_t row = 0; row < rows_; ++row) {
      Powers powers(*this, row);
      std::int64_t const end =
          visible(row) / vector * vector;  // one vector more: a pair of rows goes as far as the second
      for (std::int64_t key = 0; key <= end; key += vector) _mm512_storeu_ps(scores_of(row) + key, powers(key));
      powers.finish();
    }
    put_left([this](std::int64_t row) { return Scaled{scores_of(row), _mm512_set1_ps(inverse_[row])}; });
  }

  /// left and left_transposed = rows, 16 keys at a time, to the end of the vector with the last key that a word's rows
  /// see; zeros in the 16 keys behind, which tiles reach, and in rows that fill up the last tile.
  /// @param row_at  gives for a row what gives values at keys, in order
  template <class RowAt>
  void put_left(RowAt const& row_at) {
    for (std::int64_t row = 0; row < rows_; row += T::per_word) {
      std::int64_t const last = least(row + T::per_word, rows_) - 1, end = whole(visible(last), vector);
      // Where a word has one row, it stands for both: the right operand has zeros there.
      auto first = row_at(row), second = row_at(last);
      for (std::int64_t begin = 0; begin <= end; begin += chunk) {
        Element* const to = left_at(row, begin);
        Element* const to_second = T::per_word == 2 ? left_at(row + 1, begin) : nullptr;
        Word* const both =
            words_ + at_.left_transposed + begin / chunk * (chunk_pitch / T::per_word) + row / T::per_word * row_pitch;
        std::int64_t const stop = least(end - begin, chunk);
        for (std::int64_t key = 0; key < stop; key += vector) {
          Vector const value = first(begin + key);
          T::put(to + key, value);
          if constexpr (T::per_word == 2) {
            Vector const below = second(begin + key);
            T::put(to_second + key, below);
            store(both + key, T::pair(value, below));
          }
        }
        if (stop == chunk) continue;
        T::put(to + stop, _mm512_setzero_ps());
        if constexpr (T::per_word == 2) {
          T::put(to_second + stop, _mm512_setzero_ps());
          store(both + stop, _mm512_setzero_si512());
        }
      }
      first.finish();
      if (T::per_word == 2 && last > row) second.finish();
    }
    for (std::int64_t row = whole(rows_, T::per_word); row < whole(rows_, tile_rows); ++row)
      for (std::int64_t key = 0; key < visible(rows_ - 1); key += vector)
        T::put(left_at(row, key), _mm512_setzero_ps());
  }
  Element* left_at(std::int64_t row, std::int64_t key) const {
    std::int64_t const word = key / T::per_word;
    return reinterpret_cast<Element*>(words_ + at_.left + word / chunk * chunk_pitch + row * row_pitch + word % chunk);
  }

  std::int64_t size_, length_, position_, keys_, width_, sequence_, column_;
  Element const* qkv_;
  float scale_;
  Pieces at_;
  float* floats_;
  Word* words_;
  std::int64_t first_ = 0, rows_ = 0;  // of the block: position of its first row
  float inverse_[block_rows];
};

bool fits(std::int64_t head_size) { return head_size % tile_columns == 0 && head_size <= most_head_size; }

}  // namespace

template <>
bool host_attention_serves<float>(std::int64_t head_size) {
  return fits(head_size) && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
template <>
bool host_attention_serves<fsdp::bf16>(std::int64_t head_size) {
  return host_attention_serves<float>(head_size) && __builtin_cpu_supports("avx512bf16") != 0;
}

std::int64_t host_attention_scratch(std::int64_t keys, std::int64_t head_size, std::size_t element_bytes,
                                    bool training) {
  return 4 * Pieces(keys, head_size, 4 / static_cast<std::int64_t>(element_bytes), training).size;
}

void host_attention_forward(HostAttention const& shape, std::int64_t part, float const* qkv, float* mixed,
                            std::byte* scratch) {
  OneHead<Fp32>(shape, part, qkv, false, scratch).forward(mixed);
}
void host_attention_backward(HostAttention const& shape, std::int64_t part, float const* qkv,
                             float const* mixed_gradient, float* qkv_gradient, std::byte* scratch) {
  OneHead<Fp32>(shape, part, qkv, true, scratch).backward(mixed_gradient, qkv_gradient);
}
void host_attention_forward(HostAttention const& shape, std::int64_t part, fsdp::bf16 const* qkv, fsdp::bf16* mixed,
                            std::byte* scratch) {
  OneHead<Bf16>(shape, part, qkv, false, scratch).forward(mixed);
}
void host_attention_backward(HostAttention const& shape, std::int64_t part, fsdp::bf16 const* qkv,
                             fsdp::bf16 const* mixed_gradient, fsdp::bf16* qkv_gradient, std::byte* scratch) {
  OneHead<Bf16>(shape, part, qkv, true, scratch).backward(mixed_gradient, qkv_gradient);
}

}  // namespace transformer

#else

namespace transformer {

template <>
bool host_attention_serves<float>(std::int64_t) {
  return false;
}
template <>
bool host_attention_serves<fsdp::bf16>(std::int64_t) {
  return false;
}
std::int64_t host_attention_scratch(std::int64_t, std::int64_t, std::size_t, bool) { return 0; }
void host_attention_forward(HostAttention const&, std::int64_t, float const*, float*, std::byte*) {}
void host_attention_backward(HostAttention const&, std::int64_t, float const*, float const*, float*, std::byte*) {}
void host_attention_forward(HostAttention const&, std::int64_t, fsdp::bf16 const*, fsdp::bf16*, std::byte*) {}
void host_attention_backward(HostAttention const&, std::int64_t, fsdp::bf16 const*, fsdp::bf16 const*, fsdp::bf16*,
                             std::byte*) {}

}  // namespace transformer

#endif
