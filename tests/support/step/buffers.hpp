// SPDX-License-Identifier: Apache-2.0
// The cells of a program's buffers.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/format.hpp"
#include "fsdp/layout.hpp"
#include "tests/support/step/operation.hpp"

namespace fsdp::step {

/// [Note: Cells] A buffer by slot has two cells, the own slice of its content and the rest: peers of an all-gather read
/// the own slice, those of a reduce-scatter the rest. Where a rank has the content for itself, the own slice is all of
/// it. A kept slice is one cell. A buffer by unit is one cell, but gradient shards that backward writes are cut where a
/// unit ends, and where a bucket ends.
class Buffers {
 public:
  explicit Buffers(Program const& program) : program_(&program), gradients_(program.units.size()) {
    std::int64_t end = 0;
    for (auto const unit : program.gradient_order) {
      if (!program.units[unit].writes_shards) continue;
      cuts_.push_back(end += program.units[unit].elements);
    }
    for (auto const& bucket : program.buckets) cuts_.push_back(bucket.end);
    cuts_.push_back(0);
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
    auto const direct_cells = static_cast<std::uint32_t>(cuts_.size() - 1);
    cell_units_.resize(direct_cells);
    end = 0;
    for (auto const unit : program.gradient_order) {
      if (program.units[unit].writes_shards) {
        auto const begin = end;
        gradients_[unit] = cells_of({begin, end += program.units[unit].elements});
        for (std::uint32_t i = 0; i < gradients_[unit].count; ++i)
          cell_units_[gradients_[unit].first + i] = static_cast<std::uint32_t>(unit);
      } else {
        gradients_[unit] = {Pool::gradient, static_cast<std::uint32_t>(cell_units_.size()), 1};
        cell_units_.push_back(static_cast<std::uint32_t>(unit));
      }
    }
  }

  /// Of a pool by unit. @pre not empty
  Cells of_unit(Pool pool, std::uint32_t unit) const {
    return pool == Pool::gradient ? gradients_[unit] : Cells{pool, unit, 1};
  }
  /// Of gradient shards.
  Cells bucket(std::uint32_t index) const { return cells_of(program_->buckets[index]); }
  static Cells kept(std::uint32_t slot) { return {Pool::kept, slot, 1}; }
  static Cells own(Pool pool, std::uint32_t slot) { return {pool, 2 * slot, 1}; }
  static Cells rest(Pool pool, std::uint32_t slot) { return {pool, 2 * slot + 1, 1}; }
  static Cells whole(Pool pool, std::uint32_t slot) { return {pool, 2 * slot, 2}; }

  /// The pool has slots, each with an own slice and a rest.
  static bool has_slices(Pool pool) {
    return pool == Pool::gather || pool == Pool::gradient_slot || pool == Pool::wire;
  }
  /// Number of cells.
  std::size_t size(Pool pool) const {
    switch (pool) {
      case Pool::gradient: return cell_units_.size();
      case Pool::gather: return 2 * program_->gather_slots.size();
      case Pool::kept: return program_->kept_slots.size();
      case Pool::gradient_slot: return 2 * program_->gradient_slots.size();
      case Pool::wire: return 2 * program_->wires.size();
      default: return program_->units.size();
    }
  }
  /// The unit of a cell of gradient shards.
  std::uint32_t unit_of_gradient(std::uint32_t cell) const { return cell_units_[cell]; }
  /// Elements of a cell of gradient shards that backward writes, counted in all of these.
  /// @pre the unit of the cell writes shards
  Range elements(std::uint32_t cell) const { return {cuts_[cell], cuts_[cell + 1]}; }

  /// For messages.
  std::string text(Cells cells) const {
    auto const what = name(cells.pool);
    if (cells.pool == Pool::kept) return formatted("{} {}", what, cells.first);
    if (has_slices(cells.pool))
      return formatted("{} {}{}", what, cells.first / 2,
                       cells.count > 1        ? ""
                       : cells.first % 2 == 0 ? ", own slice"
                                              : ", rest");
    auto const unit = cells.pool == Pool::gradient ? unit_of_gradient(cells.first) : cells.first;
    return formatted("{} of '{}'", what, program_->units[unit].name);
  }

 private:
  Cells cells_of(Range elements) const {
    auto const at = [&](std::int64_t cut) {
      return static_cast<std::uint32_t>(std::lower_bound(cuts_.begin(), cuts_.end(), cut) - cuts_.begin());
    };
    return {Pool::gradient, at(elements.begin), at(elements.end) - at(elements.begin)};
  }

  Program const* program_;
  std::vector<Cells> gradients_;           ///< by unit
  std::vector<std::int64_t> cuts_;         ///< of gradient shards that backward writes
  std::vector<std::uint32_t> cell_units_;  ///< by cell of gradient shards
};

/// Values of all cells of a program.
template <class Value>
class PerCell {
 public:
  explicit PerCell(Buffers const& buffers) {
    for (std::size_t pool = 0; pool < pools; ++pool) values_[pool].resize(buffers.size(static_cast<Pool>(pool)));
  }
  std::span<Value> operator[](Cells cells) {
    return std::span(values_[static_cast<std::size_t>(cells.pool)]).subspan(cells.first, cells.count);
  }

 private:
  std::array<std::vector<Value>, pools> values_;
};

}  // namespace fsdp::step
