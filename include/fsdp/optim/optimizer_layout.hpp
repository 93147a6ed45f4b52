// SPDX-License-Identifier: Apache-2.0
// Layout of an optimizer's moments, and the chunks that its kernels update.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/init.hpp"
#include "fsdp/kernels/optimizers.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/optim/param_groups.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The shards of an optimizer's tensors, cut by settings and by tensor. It knows no device.
///
/// [Note: Moments of some tensors] The moments of a unit are laid out as its shard if the optimizer owns all its
/// tensors. Else the parts that it owns lie end to end, each aligned as in a shard.
class OptimizerLayout {
 public:
  /// Chunks of one unit whose tensors have the same settings: one launch of a kernel.
  struct Launch {
    std::size_t first_chunk = 0, chunks = 0, group = 0;
  };

  /// @throws UsageError if a pattern of `owned` matches no tensor that trains
  [[gnu::cold]] OptimizerLayout(OwnedTensors owned, FixedArray<OwnedUnit> units)
      : owned_(std::move(owned)), units_(std::move(units)) {
    owned_.expect_matches(units_);
    find_groups();
    places_ = FixedArray<Place>(units_.size() + 1);
    launches_ = FixedArray<Launch>(units_.size() * groups_.size());
    std::size_t most = 0, launches = 0, chunks = 0;
    for (std::size_t unit = 0; unit < units_.size(); ++unit)
      for (auto const& part : segments(unit)) most += chunk_count(part);
    chunks_ = FixedArray<OptimizerChunk>(most);
    for (std::size_t unit = 0; unit < units_.size(); ++unit) {
      for (std::size_t group = 0; group < groups_.size(); ++group) {
        auto const before = chunks;
        chunks = add_chunks(unit, group, before);
        if (chunks > before) launches_[launches++] = {before, chunks - before, group};
      }
      places_[unit + 1] = {launches, places_[unit].offset + elements_of(unit)};
    }
  }

  bool owns(std::string_view tensor) const { return owned_.owns(tensor); }
  /// A tensor that trains and that the optimizer does not own; "" if there is none.
  std::string const& left_out() const { return left_out_; }
  /// The tensors of `among` that the optimizer does not own.
  [[gnu::cold]] TensorSelection rest(TensorSelection among) const {
    for (auto const& unit : units_)
      for (auto const& tensor : unit.layout->tensors())
        if (!unit.frozen && owns(tensor.name)) among.remove(tensor.name);
    return among;
  }

  /// Chunks of all launches. Chunks past those of the last launch are unused.
  FixedArray<OptimizerChunk> const& chunks() const { return chunks_; }
  /// Distinct settings. At least one.
  FixedArray<TensorSettings> const& groups() const { return groups_; }
  Launch const* begin(std::size_t unit) const { return launches_.begin() + places_[unit].first_launch; }
  Launch const* end(std::size_t unit) const { return launches_.begin() + places_[unit + 1].first_launch; }

  std::size_t units() const { return units_.size(); }
  /// Elements of each moment.
  std::int64_t elements() const { return places_.back().offset; }
  /// Offset of a unit's elements in each moment; for the last unit + 1, their end.
  std::int64_t offset(std::size_t unit) const { return places_[unit].offset; }
  /// The place of a part of the unit's shard among the unit's elements. @pre the optimizer owns its tensor
  [[gnu::cold]] std::int64_t place(std::size_t unit, Segment const& part) const {
    return part.offset + shift(unit, part.tensor);
  }
  /// Whether the unit trains, and the optimizer owns all its tensors.
  [[gnu::cold]] bool owns_all(std::size_t unit) const {
    bool all = !units_[unit].frozen;
    for (auto const& tensor : units_[unit].layout->tensors()) all = all && owns(tensor.name);
    return all;
  }

 private:
  struct Place {
    std::size_t first_launch = 0;
    std::int64_t offset = 0;
  };

  [[gnu::cold]] std::vector<Segment> segments(std::size_t unit) const {
    auto const& of = units_[unit];
    return of.layout->segments(of.frozen ? Range{} : of.shard);
  }
  TensorInfo const& tensor(std::size_t unit, std::size_t index) const { return units_[unit].layout->tensors()[index]; }
  /// The difference of an element's place in the unit's moments and in its shard. With a tensor past the last one: the
  /// end of the unit's moments.
  [[gnu::cold]] std::int64_t shift(std::size_t unit, std::size_t tensor) const {
    if (owns_all(unit)) return 0;
    std::int64_t place = 0;
    for (auto const& part : segments(unit)) {
      if (part.tensor == tensor) return place - part.offset;
      if (owns(this->tensor(unit, part.tensor).name)) place += align_up(part.count, layout_alignment);
    }
    return place;
  }
  [[gnu::cold]] std::int64_t elements_of(std::size_t unit) const {
    return owns_all(unit) ? units_[unit].shard.size() : shift(unit, units_[unit].layout->tensors().size());
  }
  [[gnu::cold]] std::size_t group_of(TensorInfo const& tensor) const {
    auto const settings = owned_.of(tensor);
    std::size_t group = 0;
    while (group < groups_.size() && !groups_[group].same_launch(settings)) ++group;
    return group;
  }
  [[gnu::cold]] void find_groups() {
    for (auto const& unit : units_) {
      for (auto const& tensor : unit.layout->tensors()) {
        if (unit.frozen) break;
        if (!owns(tensor.name)) {
          if (left_out_.empty()) left_out_ = tensor.name;
          continue;
        }
        auto const group = group_of(tensor);
        if (group < groups_.size()) continue;
        FixedArray<TensorSettings> more(group + 1);
        std::copy(groups_.begin(), groups_.end(), more.begin());
        more[group] = owned_.of(tensor);
        groups_ = std::move(more);
      }
    }
    if (groups_.empty()) groups_ = FixedArray<TensorSettings>(1);  // the engine has no parameters
  }
  static std::size_t chunk_count(Segment const& part) {
    return static_cast<std::size_t>((part.count + kernels::chunk_elements - 1) / kernels::chunk_elements);
  }
  /// Writes the chunks of a unit and a group from `at` on. @return their end
  [[gnu::cold]] std::size_t add_chunks(std::size_t unit, std::size_t group, std::size_t at) {
    for (auto const& part : segments(unit)) {
      auto const& of = tensor(unit, part.tensor);
      if (!owns(of.name) || group_of(of) != group) continue;
      auto const decay = owned_.of(of).weight_decay;
      auto const hash = hash_name(of.name);
      auto const moved = shift(unit, part.tensor);
      for (std::int64_t done = 0; done < part.count; done += kernels::chunk_elements)
        chunks_[at++] = {part.offset + done,
                         static_cast<std::int32_t>(std::min(kernels::chunk_elements, part.count - done)),
                         decay,
                         hash,
                         part.first + done,
                         moved};
    }
    return at;
  }

  OwnedTensors owned_;
  FixedArray<OwnedUnit> units_;
  FixedArray<TensorSettings> groups_;
  FixedArray<Place> places_;  ///< by unit; one more for the end
  FixedArray<Launch> launches_;
  FixedArray<OptimizerChunk> chunks_;
  std::string left_out_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
