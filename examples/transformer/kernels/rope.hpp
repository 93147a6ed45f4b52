// SPDX-License-Identifier: Apache-2.0
// Rotary position embeddings of grouped queries, keys and values, on their way from the projection to attention and
// back.
#pragma once

#include <cstdint>

#include "fsdp/error.hpp"
#include "transformer/kernels/common.hpp"
#include "transformer/kernels/packs.hpp"
#include "transformer/kernels/rope_table.hpp"
#include "transformer/layers/pass.hpp"

namespace transformer {

/// Heads of grouped-query attention (Ainslie et al., arXiv:2305.13245): head h has the keys and values of group
/// h / (heads / kv_heads).
struct GroupedHeads {
  std::int64_t heads = 1;     ///< H
  std::int64_t kv_heads = 1;  ///< K: divides H
  std::int64_t size = 64;     ///< Q: elements of a head, even

  FSDP_HD constexpr std::int64_t group() const { return heads / kv_heads; }
  /// H Q: width of the queries, and of each third of what attention reads.
  FSDP_HD constexpr std::int64_t width() const { return heads * size; }
  /// (H + 2K) Q: width of a projected row.
  FSDP_HD constexpr std::int64_t projected() const { return (heads + 2 * kv_heads) * size; }
};

namespace detail {

/// [Note: Rotation of halves]
/// The layout of HuggingFace's Llama: elements i and i + Q/2 of a head are a pair, which turns by position * frequency
/// i. (Meta's own checkpoints have pairs side by side.) The keys and values of a group are repeated for its heads,
/// because attention reads H heads of each; their gradients are therefore sums over the group.
struct RopeArgs {
  GroupedHeads heads;
  std::int64_t length, position, capacity;

  /// Row of the table that rotates a projected row.
  FSDP_HD std::int64_t table_row(std::int64_t row) const { return position + row % length; }
  /// Row among those of attention.
  FSDP_HD std::int64_t packed_row(std::int64_t row) const { return row / length * capacity + table_row(row); }
};

/// Where a projected head lies among the heads that attention reads, in elements of a row: `copies` heads, side by
/// side.
struct RopePlace {
  std::int64_t first, copies;
  bool rotated;  // queries and keys

  FSDP_HD RopePlace(GroupedHeads const& h, std::int64_t head)
      : first(head * h.size), copies(1), rotated(head < h.heads + h.kv_heads) {
    if (head < h.heads) return;
    std::int64_t const key = head - h.heads;
    copies = h.group();
    first = rotated ? h.width() + key * copies * h.size : 2 * h.width() + (key - h.kv_heads) * copies * h.size;
  }
};

/// One row.
struct RopeForward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* projected, float const* table, A* packed,
                          RopeArgs args) const {
    using T = Compute<A>;
    auto const& h = args.heads;
    std::int64_t const pairs = h.size / 2;
    float const* const cosine = table + args.table_row(row) * h.size;
    float const* const sine = cosine + pairs;
    for (std::int64_t head = 0; head < h.heads + 2 * h.kv_heads; ++head) {
      RopePlace const place(h, head);
      A const* const low = projected + row * h.projected() + head * h.size;
      A const* const high = low + pairs;
      for (std::int64_t copy = 0; copy < place.copies; ++copy) {
        A* const to = packed + args.packed_row(row) * 3 * h.width() + place.first + copy * h.size;
        if (!place.rotated) {
          block.each(
              h.size, to, [](T v) { return v; }, low);
          continue;
        }
        block.each(
            pairs, to, [](T a, T b, float c, float s) { return a * T(c) - b * T(s); }, low, high, cosine, sine);
        block.each(
            pairs, to + pairs, [](T a, T b, float c, float s) { return b * T(c) + a * T(s); }, low, high, cosine, sine);
      }
    }
  }
};

/// One row.
struct RopeBackward {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* packed, float const* table, A* projected,
                          RopeArgs args) const {
    using T = Compute<A>;
    auto const& h = args.heads;
    std::int64_t const pairs = h.size / 2, size = h.size;
    float const* const cosine = table + args.table_row(row) * size;
    float const* const sine = cosine + pairs;
    for (std::int64_t head = 0; head < h.heads + 2 * h.kv_heads; ++head) {
      RopePlace const place(h, head);
      A const* const from = packed + row * 3 * h.width() + place.first;
      A* const to = projected + row * h.projected() + head * size;
      std::int64_t const copies = place.copies;
      auto const sum = [=](std::int64_t i) {
        T total = 0;
        for (std::int64_t copy = 0; copy < copies; ++copy) total += fsdp::widen(from[copy * size + i]);
        return total;
      };
      if (!place.rotated) {
        block.each(size, to, sum, fsdp::Indices{});
        continue;
      }
      block.each(
          pairs, to, [=](std::int64_t i, float c, float s) { return sum(i) * T(c) + sum(i + pairs) * T(s); },
          fsdp::Indices{}, cosine, sine);
      block.each(
          pairs, to + pairs, [=](std::int64_t i, float c, float s) { return sum(i + pairs) * T(c) - sum(i) * T(s); },
          fsdp::Indices{}, cosine, sine);
    }
  }
};

}  // namespace detail

namespace blocks {

/// The elements that a thread rotates: a pack of a head's lower half and the pack of its upper half.
struct RopeUnit {
  std::int64_t row, head, column;  // column: of the lower half

  FSDP_HD RopeUnit(GroupedHeads const& h, std::int64_t unit, int count) {
    std::int64_t const packs = h.size / 2 / count, heads = h.heads + 2 * h.kv_heads;
    column = unit % packs * count;
    head = unit / packs % heads;
    row = unit / packs / heads;
  }
};

/// Cosines and sines of a pack.
template <int Count>
struct RopeAngles {
  float cosine[extent(Count)], sine[extent(Count)];

  FSDP_HD RopeAngles(float const* row, std::int64_t pairs, std::int64_t column) {
    FSDP_UNROLL
    for (int first = 0; first < Count; first += 4) {
      auto const c = load(row + column + first), s = load(row + pairs + column + first);
      FSDP_UNROLL
      for (int k = 0; k < 4; ++k) {
        cosine[first + k] = c.element[k];
        sine[first + k] = s.element[k];
      }
    }
  }
};

struct RopeForwardPacks {
  static constexpr int threads = 256;

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* projected, float const* table, A* packed,
                          detail::RopeArgs args, std::int64_t units) const {
    constexpr int count = pack_elements<A>;
    std::int64_t const number = index * threads + block.thread();
    if (number >= units) return;
    auto const& h = args.heads;
    std::int64_t const pairs = h.size / 2;
    RopeUnit const unit(h, number, count);
    detail::RopePlace const place(h, unit.head);
    A const* const from = projected + unit.row * h.projected() + unit.head * h.size + unit.column;
    auto low = load(from), high = load(from + pairs);
    if (place.rotated) {
      RopeAngles<count> const at(table + args.table_row(unit.row) * h.size, pairs, unit.column);
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) {
        float const a = fsdp::widen(low.element[k]), b = fsdp::widen(high.element[k]);
        low.element[k] = fsdp::narrow<A>(a * at.cosine[k] - b * at.sine[k]);
        high.element[k] = fsdp::narrow<A>(b * at.cosine[k] + a * at.sine[k]);
      }
    }
    A* to = packed + args.packed_row(unit.row) * 3 * h.width() + place.first + unit.column;
    for (std::int64_t copy = 0; copy < place.copies; ++copy, to += h.size) {
      store(to, low);
      store(to + pairs, high);
    }
  }
};

struct RopeBackwardPacks {
  static constexpr int threads = 256;

  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t index, A const* packed, float const* table, A* projected,
                          detail::RopeArgs args, std::int64_t units) const {
    constexpr int count = pack_elements<A>;
    std::int64_t const number = index * threads + block.thread();
    if (number >= units) return;
    auto const& h = args.heads;
    std::int64_t const pairs = h.size / 2;
    RopeUnit const unit(h, number, count);
    detail::RopePlace const place(h, unit.head);
    A const* from = packed + unit.row * 3 * h.width() + place.first + unit.column;
    float low[extent(count)] = {}, high[extent(count)] = {};
    for (std::int64_t copy = 0; copy < place.copies; ++copy, from += h.size) {
      auto const a = load(from), b = load(from + pairs);
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) {
        low[k] += fsdp::widen(a.element[k]);
        high[k] += fsdp::widen(b.element[k]);
      }
    }
    Pack<A> a, b;
    if (place.rotated) {
      RopeAngles<count> const at(table + args.table_row(unit.row) * h.size, pairs, unit.column);
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) {
        a.element[k] = fsdp::narrow<A>(low[k] * at.cosine[k] + high[k] * at.sine[k]);
        b.element[k] = fsdp::narrow<A>(high[k] * at.cosine[k] - low[k] * at.sine[k]);
      }
    } else {
      FSDP_UNROLL
      for (int k = 0; k < count; ++k) {
        a.element[k] = fsdp::narrow<A>(low[k]);
        b.element[k] = fsdp::narrow<A>(high[k]);
      }
    }
    A* const to = projected + unit.row * h.projected() + unit.head * h.size + unit.column;
    store(to, a);
    store(to + pairs, b);
  }
};

}  // namespace blocks

namespace detail {

/// Launches a kernel of packs where there are thread blocks and rows that move in packs, else one of rows.
template <class Packs, class Rows, fsdp::Device D, class A>
void launch_rope(D const& device, typename D::Stream& stream, A const* from, float const* table, A* to,
                 RopeArgs const& args, std::int64_t rows) {
  if constexpr (fsdp::RunsThreadBlocks<D> && sizeof(A) <= sizeof(float)) {
    auto const& h = args.heads;
    if (blocks::in_packs<A>(h.size / 2, from, table, to)) {
      std::int64_t const units = rows * (h.projected() / 2 / blocks::pack_elements<A>);
      device.launch(stream, (units + Packs::threads - 1) / Packs::threads, Packs{}, from, table, to, args, units);
      return;
    }
  }
  device.launch(stream, rows, Rows{}, from, table, to, args);
}

}  // namespace detail

/// packed = queries and keys of `projected`, rotated by their positions, and its values; keys and values repeated for
/// the heads of their group. See [Note: Rotation of halves].
/// @param projected  (pass.rows(), (H + 2K) Q): queries, keys and values, heads side by side in each
/// @param table      rope_table of at least pass.position + pass.length positions
/// @param packed     (B, capacity, 3 H Q): what CausalAttention reads; the rows of this pass are written
/// @pre packed is not projected
template <fsdp::Device D, class A>
void rope_forward(D const& device, typename D::Stream& stream, GroupedHeads const& heads, Pass const& pass,
                  A const* projected, float const* table, A* packed) {
  if (pass.rows() == 0) return;
  detail::RopeArgs const args{heads, pass.length, pass.position, pass.capacity};
  detail::launch_rope<blocks::RopeForwardPacks, detail::RopeForward>(device, stream, projected, table, packed, args,
                                                                     pass.rows());
}

/// projected_gradient (pass.rows(), (H + 2K) Q) = gradient of rope_forward at projected, summed over each group in
/// Compute<A>, given that of its result.
/// @param packed_gradient  (B, n, 3 H Q): what CausalAttention's backward gives
/// @pre pass.position == 0; projected_gradient is not packed_gradient
template <fsdp::Device D, class A>
void rope_backward(D const& device, typename D::Stream& stream, GroupedHeads const& heads, Pass const& pass,
                   A const* packed_gradient, float const* table, A* projected_gradient) {
  FSDP_EXPECTS(pass.position == 0, "rope_backward: expected a pass from position 0, got {}", pass.position);
  if (pass.rows() == 0) return;
  detail::RopeArgs const args{heads, pass.length, 0, pass.length};
  detail::launch_rope<blocks::RopeBackwardPacks, detail::RopeBackward>(device, stream, packed_gradient, table,
                                                                       projected_gradient, args, pass.rows());
}

}  // namespace transformer
