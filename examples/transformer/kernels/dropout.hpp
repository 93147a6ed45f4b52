// SPDX-License-Identifier: Apache-2.0
// Dropout with counter-based masks: nothing is stored, backward draws the same mask again.
#pragma once

#include <cstdint>

#include "fsdp/kernels.hpp"
#include "transformer/kernels/common.hpp"
#include "transformer/kernels/packs.hpp"

namespace transformer {

/// Which elements are dropped: a function of the seed, the site and an element's index alone. Neither sharding nor
/// recomputation changes it.
struct DropoutMask {
  float probability = 0.0f;  ///< of dropping, below 1
  std::uint64_t seed = 0;    ///< of the run
  std::uint64_t step = 0;    ///< below 2^40
  std::uint32_t site = 0;    ///< layer and place in it, below 2^24

  FSDP_HD fsdp::RandomSequence sequence() const { return {seed, step << 24 | site}; }
};

/// Elements between two rows of a mask of attention's scores: whole groups of random elements ([Note: Random
/// elements]), which a kernel that works on tiles then draws without waste.
FSDP_HD constexpr std::int64_t attention_mask_pitch(std::int64_t keys) { return (keys + 63) / 64 * 64; }

namespace detail {

/// Random words to the factors of kept and dropped elements.
struct DropoutFactors {
  float probability, kept;
  FSDP_HD float one(std::uint32_t word) const { return fsdp::uniform_below_one(word) < probability ? 0.0f : kept; }
  FSDP_HD fsdp::Four<float> operator()(fsdp::Words w) const { return {one(w.a), one(w.b), one(w.c), one(w.d)}; }
};
FSDP_HD inline DropoutFactors dropout_factors(DropoutMask const& mask) {
  return {mask.probability, 1.0f / (1.0f - mask.probability)};
}

template <class Block, class A>
FSDP_HD void drop(Block const& block, A const* in, A* out, std::int64_t n, DropoutMask const& mask,
                  std::int64_t first) {
  fsdp::each_random(block, n, mask.sequence(), first, dropout_factors(mask), [=](std::int64_t i, float factor) {
    out[i] = fsdp::narrow<A>(fsdp::widen(in[i]) * static_cast<Compute<A>>(factor));
  });
}

struct Dropout {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* in, A* out, std::int64_t n, DropoutMask mask,
                          std::int64_t first) const {
    std::int64_t const begin = index * chunk_elements;
    drop(block, in + begin, out + begin, chunk_length(n, index), mask, first + begin);
  }
};

struct DropoutRows {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* in, A* out, std::int64_t rows,
                          std::int64_t columns, DropoutMask mask, std::int64_t first, std::int64_t panel_stride,
                          std::int64_t row_stride) const {
    drop(block, in + row * columns, out + row * columns, columns, mask,
         first + row / rows * panel_stride + row % rows * row_stride);
  }
};

}  // namespace detail

namespace blocks {

/// Dropout of whole groups of 64 random elements: a counter's words belong to elements that are 16 apart, so a thread
/// draws as many neighbouring counters as a pack has elements, and moves four packs.
struct DropoutPacks {
  static constexpr int threads = 256;
  template <class A>
  static constexpr int threads_per_group = 16 / pack_elements<A>;
  /// Blocks for n elements.
  template <class A>
  static std::int64_t blocks(std::int64_t n) {
    return (n / 64 * threads_per_group<A> + threads - 1) / threads;
  }

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* in, A* out, std::int64_t groups,
                          DropoutMask mask, std::int64_t first_counter) const {
    constexpr int count = pack_elements<A>;
    std::int64_t const thread = index * threads + block.thread();
    std::int64_t const group = thread / threads_per_group<A>;
    if (group >= groups) return;
    int const part = static_cast<int>(thread % threads_per_group<A>) * count;
    std::int64_t const begin = group * 64 + part;
    Pack<A> packs[4];
    FSDP_UNROLL
    for (int word = 0; word < 4; ++word) packs[word] = load(in + begin + 16 * word);

    auto const sequence = mask.sequence();
    auto const factors = detail::dropout_factors(mask);
    std::int64_t const counter = first_counter + group * 16 + part;
    FSDP_UNROLL
    for (int k = 0; k < count; ++k) {
      auto const four = factors(fsdp::random_words(sequence, counter + k));
      float const by[4] = {four.a, four.b, four.c, four.d};
      FSDP_UNROLL
      for (int word = 0; word < 4; ++word) {
        A& element = packs[word].element[k];
        element = fsdp::narrow<A>(fsdp::widen(element) * static_cast<Compute<A>>(by[word]));
      }
    }
    FSDP_UNROLL
    for (int word = 0; word < 4; ++word) store(out + begin + 16 * word, packs[word]);
  }
};

}  // namespace blocks

/// out = in where kept, scaled by 1 / (1 - probability), else 0. The same call on gradients is backward.
/// @param first  index of element 0 in the mask
template <fsdp::Device D, class A>
void dropout(D const& device, typename D::Stream& stream, A const* in, A* out, std::int64_t n, DropoutMask mask,
             std::int64_t first) {
  if (n == 0) return;
  if constexpr (fsdp::RunsThreadBlocks<D>) {
    if (n % 64 == 0 && first % 64 == 0 && blocks::in_packs<A>(64, in, out))
      return device.launch(stream, blocks::DropoutPacks::blocks<A>(n), blocks::DropoutPacks{}, in, out, n / 64, mask,
                           first / 4);
  }
  device.launch(stream, detail::blocks_for(n), detail::Dropout{}, in, out, n, mask, first);
}

/// Dropout of panels (panels, rows, columns) of a larger array: element (p, r, c) has the mask's index
/// first + p * panel_stride + r * row_stride + c, however the work is cut into panels.
template <fsdp::Device D, class A>
void dropout_panels(D const& device, typename D::Stream& stream, A const* in, A* out, std::int64_t panels,
                    std::int64_t rows, std::int64_t columns, DropoutMask mask, std::int64_t first,
                    std::int64_t panel_stride, std::int64_t row_stride) {
  if (panels * rows == 0) return;
  device.launch(stream, panels * rows, detail::DropoutRows{}, in, out, rows, columns, mask, first, panel_stride,
                row_stride);
}

}  // namespace transformer
