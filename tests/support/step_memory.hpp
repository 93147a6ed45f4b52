// SPDX-License-Identifier: Apache-2.0
// Where the cells of a list of operations lie in the memory of one rank of an engine, and which bytes are accessed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/detail/step/buffers.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/fsdp.hpp"
#include "tests/support/recording.hpp"

namespace fsdp::testing {

/// Consecutive bytes that an operation accesses alike.
struct Stretch {
  std::uintptr_t begin, end;
  bool reads, writes;
  friend bool operator==(Stretch const&, Stretch const&) = default;
};

/// The bytes that an operation accesses: sorted, disjoint, and as few stretches as possible.
class Footprint {
 public:
  void add(std::uintptr_t begin, std::uintptr_t end, bool reads, bool writes) {
    if (begin < end) parts_.push_back({begin, end, reads, writes});
  }
  std::vector<Stretch> stretches() const {
    std::vector<std::uintptr_t> cuts;
    for (auto const& part : parts_) cuts.push_back(part.begin), cuts.push_back(part.end);
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::vector<Stretch> stretches;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      Stretch next{cuts[i], cuts[i + 1], false, false};
      for (auto const& part : parts_) {
        bool const inside = part.begin <= next.begin && next.end <= part.end;
        next.reads |= inside && part.reads;
        next.writes |= inside && part.writes;
      }
      if (!next.reads && !next.writes) continue;
      bool const goes_on = !stretches.empty() && stretches.back().end == next.begin &&
                           stretches.back().reads == next.reads && stretches.back().writes == next.writes;
      if (goes_on) {
        stretches.back().end = next.end;
      } else {
        stretches.push_back(next);
      }
    }
    return stretches;
  }

 private:
  std::vector<Stretch> parts_;
};

/// @tparam E  an engine on a RecordingDevice, sealed
template <class E>
class StepMemory {
 public:
  StepMemory(E& engine, Recording const& recording)
      : engine_(&engine), buffers_(&engine.program().buffers), direct_(engine.shards().size(), 0) {
    auto const& program = engine.program();
    auto const input = engine.plan_input();
    if (input.reshard_ranks > 0) kept_member_ = engine.rank() % input.reshard_ranks;
    auto const shards = engine.shards();
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      if (unit.empty()) continue;
      for (void const* data : {static_cast<void const*>(unit.shard_data), static_cast<void const*>(unit.gradient),
                               static_cast<void const*>(unit.partial), static_cast<void const*>(unit.accumulator)})
        if (data != nullptr) {
          auto const allocation = find(recording, data);
          add_region(*allocation);
          // ShardStorage allocates slots of parameters, then slots of gradients, after the master shards.
          if (data == unit.shard_data) gather_ = add_region(*(allocation + 1)), reduce_ = add_region(*(allocation + 2));
        }
    }
    std::int64_t end = 0;
    for (auto const u : program.gradient_order)
      if (program.units[u].writes_shards) {
        direct_[u] = end;
        end += program.units[u].elements;
      }
  }

  /// The program's buffers, whole: everything that its operations may access.
  bool contains(std::uintptr_t begin, std::uintptr_t end) const {
    return std::any_of(regions_.begin(), regions_.end(),
                       [&](auto const& region) { return region.first <= begin && end <= region.second; });
  }
  /// Bytes of this rank that the operation accesses, or that its peers read.
  std::vector<Stretch> bytes(step::Operation const& operation, bool peers) const {
    Footprint footprint;
    for (auto const& access : operation.accesses()) {
      if (access.cells.pool == Pool::moments) continue;  // the optimizer's
      if (peers && !peers_read(operation.primitive, access)) continue;
      bool const reads = peers || access.mode != step::Mode::write, writes = !peers && access.mode != step::Mode::read;
      for (std::uint32_t i = 0; i < access.cells.count; ++i) {
        auto const cell = place(operation, {access.cells.pool, access.cells.first + i, 1});
        for (auto const elements : cell.elements)
          for (auto const& accessed : mask(operation, access, cell))
            if (auto const part = intersect(elements, accessed); !part.empty())
              footprint.add(cell.address(part.begin), cell.address(part.end), reads, writes);
      }
    }
    return footprint.stretches();
  }
  /// Kernels, copies or zeroings that do it.
  std::size_t parts(step::Operation const& operation) const {
    return operation.primitive == step::Primitive::zero_padding ? unit(operation.unit).padding().size() : 1;
  }

 private:
  using Precision = typename E::Precision;
  using Unit = typename E::Unit;
  using Pool = step::Pool;

  /// Elements of a cell, counted in the full unit.
  struct Place {
    std::uint32_t unit;
    std::uintptr_t origin;  ///< address of element 0
    std::size_t element;    ///< bytes
    std::vector<Range> elements;
    std::uintptr_t address(std::int64_t index) const {
      return origin + static_cast<std::uintptr_t>(index) * static_cast<std::uintptr_t>(element);
    }
  };
  template <class T>
  static Place place_of(std::uint32_t unit, T const* data, std::int64_t first, std::vector<Range> elements) {
    return {unit, reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(first) * sizeof(T), sizeof(T),
            std::move(elements)};
  }
  Unit const& unit(std::uint32_t index) const { return engine_->shards()[index]; }

  Place place(step::Operation const& operation, step::Cells cell) const {
    bool const direct =
        cell.pool == Pool::gradient && engine_->program().units[buffers_->unit_of_gradient(cell.first)].writes_shards;
    auto const u = cell.pool == Pool::gradient ? buffers_->unit_of_gradient(cell.first) : operation.unit;
    if (buffers_->has_slices(cell.pool) || cell.pool == Pool::kept_slice) return place_in_slot(operation, cell);
    auto const& at = unit(u);
    auto const shard = at.shard();
    switch (cell.pool) {
      case Pool::master:
        return at.with_shard([&](auto const* data) { return place_of(u, data, shard.begin, {shard}); });
      case Pool::partial: return place_of(u, at.partial, shard.begin, {shard});
      case Pool::accumulator: return place_of(u, at.accumulator, 0, {{0, at.full_numel()}});
      case Pool::gradient:
        if (!direct) return place_of(u, at.gradient, shard.begin, {shard});
        return place_of(
            u, at.gradient, 0,
            {{buffers_->elements(cell.first).begin - direct_[u], buffers_->elements(cell.first).end - direct_[u]}});
      default: throw std::logic_error("a cell of a pool that the engine does not have");
    }
  }
  Place place_in_slot(step::Operation const& operation, step::Cells cell) const {
    auto const& program = engine_->program();
    auto const slot = cell.pool == Pool::kept_slice ? cell.first : cell.first / 2;
    auto const after = [&](std::vector<Slot> const& slots, std::size_t count) {
      std::uintptr_t bytes = 0;
      for (std::size_t i = 0; i < count; ++i) bytes += static_cast<std::uintptr_t>(slots[i].bytes);
      return bytes;
    };
    bool const of_a_unit = operation.unit != step::Operation::none;
    auto const types = of_a_unit ? unit(operation.unit).types() : ElementTypes{};
    auto const param = size_of(types.parameter), written = size_of(types.gradient);
    Place at{operation.unit, 0, param, {}};
    std::int64_t capacity = 0;  // bytes
    switch (cell.pool) {
      case Pool::gather: at.origin = gather_ + after(program.gather_slots, slot); break;
      case Pool::gradient_slot:
        at.origin = reduce_ + after(program.gradient_slots, slot);
        at.element = written;
        capacity = program.gradient_slots[slot].bytes;
        break;
      case Pool::wire:
        at.origin = reduce_ + after(program.gradient_slots, program.gradient_slots.size()) + after(program.wires, slot);
        at.element = size_of(*program.wire);
        break;
      default: {
        auto const slice = kept_slice(slot);
        at.origin = gather_ + after(program.gather_slots, program.gather_slots.size()) +
                    after(program.kept_slots, slot) - static_cast<std::uintptr_t>(slice.begin) * param;
        at.elements = {slice};
        return at;
      }
    }
    bool const own = cell.first % 2 == 0;
    if (operation.primitive == step::Primitive::zero) {
      // All of the slot, which a program says by both cells.
      if (own) at.elements = {{0, capacity / static_cast<std::int64_t>(at.element)}};
      return at;
    }
    if (operation.bucket != step::Operation::none) {
      if (own) at.elements = {{0, program.buckets[operation.bucket].size()}};
      return at;
    }
    auto const& content = unit(operation.unit);
    auto const shard = content.shard();
    if (own) {
      at.elements = {shard};
    } else {
      at.elements = {{0, shard.begin}, {shard.end, content.full_numel()}};
    }
    return at;
  }
  /// Elements that the operation may access, counted in the full unit.
  std::vector<Range> mask(step::Operation const& operation, step::Access const& access, Place const& place) const {
    static constexpr Range all{0, largest_numel};
    std::vector<Range> tensors;
    switch (operation.primitive) {
      case step::Primitive::forward:
      case step::Primitive::recompute:
      case step::Primitive::backward:
      case step::Primitive::update:
        for (auto const& tensor : unit(place.unit).layout().tensors()) tensors.push_back(tensor.range());
        return tensors;
      case step::Primitive::zero_padding: return unit(place.unit).padding();
      case step::Primitive::norm: {
        auto const& at = unit(place.unit);
        auto const slice = at.slice();
        return {{at.shard().begin + slice.begin, at.shard().begin + slice.end}};
      }
      case step::Primitive::copy:
        if (access.cells.pool != Pool::gather) return {all};
        return {kept_slice(engine_->program().units[place.unit].kept_slot)};
      default: return {all};
    }
  }
  /// The part that this rank keeps, in elements of the full unit.
  Range kept_slice(std::uint32_t slot) const {
    auto const& program = engine_->program();
    auto const elements = program.units[program.kept_slots[slot].unit].elements / program.kept_ranks;
    return {elements * kept_member_, elements * (kept_member_ + 1)};
  }

  using Allocation = std::pair<std::uintptr_t, std::size_t>;
  /// The allocation that has `data`. Addresses of memory that was freed may be there again: the last one.
  static std::vector<Allocation>::const_iterator find(Recording const& recording, void const* data) {
    auto const address = reinterpret_cast<std::uintptr_t>(data);
    auto const& all = recording.allocations;
    auto found = all.end();
    for (auto at = all.begin(); at != all.end(); ++at)
      if (at->first <= address && address < at->first + at->second) found = at;
    if (found == all.end()) throw std::logic_error("an engine's buffer was not allocated on its device");
    return found;
  }
  std::uintptr_t add_region(Allocation const& allocation) {
    if (allocation.second > 0) regions_.emplace_back(allocation.first, allocation.first + allocation.second);
    return allocation.first;
  }

  E* engine_;
  step::Buffers const* buffers_;
  std::vector<std::int64_t> direct_;        ///< by unit: its first element in the gradient shards that backward writes
  int kept_member_ = 0;                     ///< this rank's place among those that gather kept slices
  std::uintptr_t gather_ = 0, reduce_ = 0;  ///< slots of parameters, and of gradients
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> regions_;
};

}  // namespace fsdp::testing
