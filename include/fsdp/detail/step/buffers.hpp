// SPDX-License-Identifier: Apache-2.0
// Buffers of a step's operations, and their division into cells.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/layout.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A buffer of a pool by slot.
struct Slot {
  static constexpr std::uint32_t any_unit = ~0u;

  std::int64_t bytes;
  std::uint32_t unit = any_unit;  ///< the unit that alone uses it; any_unit: several units, in turn
  bool zeroed = false;            ///< for gradients: zeroed again after each content, because some unit adds to zeroes
};

using BufferPlan [[deprecated("write Slot")]] = Slot;

/// Bytes of a full-size buffer of `elements`.
constexpr std::int64_t slot_bytes(std::int64_t elements, std::size_t element_bytes) {
  return align_up(elements * static_cast<std::int64_t>(element_bytes), 256);
}

namespace step {

/// Cells of all buffers.
///
/// [Note: Cells] A buffer by slot has two cells: the own slice of its content, and the rest. Peers of an all-gather
/// read the own slice, peers of a reduce-scatter read the rest. If no other rank shares the unit, the own slice is the
/// whole content. A kept slice is one cell. A buffer by unit is one cell; but gradient shards that backward writes are
/// cut where a unit ends and where a bucket ends.
class Buffers {
 public:
  Buffers() = default;
  /// @param numel    elements of the gradient shards that backward writes, unit by unit, in the order in which they lie
  /// @param direct   these units
  /// @param reduced  the other units with parameters
  /// @param buckets  of elements of the former
  [[gnu::cold]] Buffers(std::size_t units, std::vector<std::int64_t> const& numel,
                        std::vector<std::size_t> const& direct, std::vector<std::size_t> const& reduced,
                        std::vector<Range> const& buckets)
      : gradients_(units) {
    std::vector<std::int64_t> ends(1);  // the first begins at 0
    for (auto const elements : numel) ends.push_back(ends.back() + elements);
    auto bucket = buckets.begin();
    for (auto const end : ends) {  // both ascend
      for (; bucket != buckets.end() && bucket->end < end; ++bucket) cuts_.push_back(bucket->end);
      if (bucket != buckets.end() && bucket->end == end) ++bucket;
      cuts_.push_back(end);
    }
    for (std::size_t i = 0; i < direct.size(); ++i) {
      gradients_[direct[i]] = cells_between({ends[i], ends[i + 1]});
      for (auto cell = gradients_[direct[i]].size(); cell > 0; --cell)
        unit_of_cell_.push_back(static_cast<std::uint32_t>(direct[i]));
    }
    for (auto const unit : reduced) {
      auto const cell = static_cast<std::int64_t>(unit_of_cell_.size());
      gradients_[unit] = {cell, cell + 1};
      unit_of_cell_.push_back(static_cast<std::uint32_t>(unit));
    }
    sizes_.fill(units);
    sizes_[static_cast<std::size_t>(Pool::gradient)] = unit_of_cell_.size();
    for (auto const pool : {Pool::staged, Pool::staged_gradient}) sizes_[static_cast<std::size_t>(pool)] = 2;
  }
  /// Sets the number of a pool's slots.
  void set_slots(Pool pool, std::size_t slots) {
    sizes_[static_cast<std::size_t>(pool)] = has_slices(pool) ? 2 * slots : slots;
  }

  /// The unit's cells in a pool by unit. @pre the unit has parameters
  Cells of_unit(Pool pool, std::uint32_t unit) const {
    return pool == Pool::gradient ? gradient_cells(gradients_[unit]) : Cells{pool, unit, 1};
  }
  /// The cells of a bucket. @param elements  of the gradient shards that backward writes
  Cells bucket(Range elements) const { return gradient_cells(cells_between(elements)); }
  static Cells kept(std::uint32_t slot) { return {Pool::kept_slice, slot, 1}; }
  static Cells staged(Pool pool, std::uint32_t slot) { return {pool, slot, 1}; }
  static Cells own(Pool pool, std::uint32_t slot) { return {pool, 2 * slot, 1}; }
  static Cells rest(Pool pool, std::uint32_t slot) { return {pool, 2 * slot + 1, 1}; }
  static Cells whole(Pool pool, std::uint32_t slot) { return {pool, 2 * slot, 2}; }

  /// Whether the pool has slots, each with an own slice and a rest.
  static constexpr bool has_slices(Pool pool) {
    return pool == Pool::gather || pool == Pool::gradient_slot || pool == Pool::wire;
  }
  static constexpr bool has_slots(Pool pool) { return has_slices(pool) || pool == Pool::kept_slice || is_staged(pool); }
  static constexpr bool is_staged(Pool pool) { return pool == Pool::staged || pool == Pool::staged_gradient; }
  /// The slot of the cells, in a pool by slot; the first cell, of gradient shards; the unit, in other pools.
  static constexpr std::uint32_t index(Cells cells) { return has_slices(cells.pool) ? cells.first / 2 : cells.first; }
  /// Number of cells.
  std::size_t size(Pool pool) const { return sizes_[static_cast<std::size_t>(pool)]; }
  /// The unit of a cell of gradient shards.
  std::uint32_t unit_of_gradient(std::uint32_t cell) const { return unit_of_cell_[cell]; }
  /// Elements of a cell of gradient shards that backward writes, counted in all of these.
  Range elements(std::uint32_t cell) const { return {cuts_[cell], cuts_[cell + 1]}; }

 private:
  static Cells gradient_cells(Range cells) {
    return {Pool::gradient, static_cast<std::uint32_t>(cells.begin), static_cast<std::uint32_t>(cells.size())};
  }
  /// @param elements  of gradient shards that backward writes; they begin and end at cuts
  Range cells_between(Range elements) const {
    auto const at = [&](std::int64_t cut) -> std::int64_t {
      return std::lower_bound(cuts_.begin(), cuts_.end(), cut) - cuts_.begin();
    };
    return {at(elements.begin), at(elements.end)};
  }

  std::vector<Range> gradients_;             ///< by unit: cells of gradient shards
  std::vector<std::int64_t> cuts_;           ///< of gradient shards that backward writes, in elements
  std::vector<std::uint32_t> unit_of_cell_;  ///< by cell of gradient shards
  std::array<std::size_t, pools> sizes_{};   ///< cells, by pool
};

/// A value for each cell.
template <class Value>
class PerCell {
 public:
  PerCell() = default;
  explicit PerCell(Buffers const& buffers) {
    std::size_t size = 0;
    for (std::size_t pool = 0; pool < pools; ++pool) {
      first_[pool] = size;
      size += buffers.size(static_cast<Pool>(pool));
    }
    values_ = fsdp::detail::FixedArray<Value>(size);
  }
  std::span<Value> operator[](Cells cells) { return {values_.begin() + index(cells), cells.count}; }
  std::span<Value const> operator[](Cells cells) const { return {values_.begin() + index(cells), cells.count}; }

 private:
  std::size_t index(Cells cells) const { return first_[static_cast<std::size_t>(cells.pool)] + cells.first; }

  std::array<std::size_t, pools> first_{};  ///< by pool
  fsdp::detail::FixedArray<Value> values_;
};

}  // namespace step
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
