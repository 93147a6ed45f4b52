// SPDX-License-Identifier: Apache-2.0
// Arrays of a run's state: values that engine and optimizer keep for each element, the rank that writes each part,
// and a copy in host memory.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Host memory for a copy, entered in the engine's account as MemoryTag::snapshot. It stays allocated for later copies.
template <class E>
class HostCopy {
 public:
  explicit HostCopy(E& engine) : engine_(&engine) {}
  HostCopy(HostCopy&&) = delete;
  ~HostCopy() { account(-reserved_); }

  /// Makes room for `bytes`; its content is lost if the memory has to grow. @throws what the device's allocation
  /// throws; then it has no memory
  void reserve(std::int64_t bytes) {
    if (memory_ && bytes <= reserved_) return;
    account(-reserved_);
    memory_.reset();
    reserved_ = 0;
    memory_ = std::make_unique<Memory>(engine_->device(), static_cast<std::size_t>(bytes));
    reserved_ = bytes;
    account(bytes);
  }
  /// @pre reserve()
  std::byte* data() const { return memory_->data(); }

 private:
  using Memory = PinnedArray<std::remove_cvref_t<typename E::Device>, std::byte>;

  void account(std::int64_t bytes) { engine_->account().reserve(MemoryTag::snapshot, bytes); }

  E* engine_;
  std::unique_ptr<Memory> memory_;
  std::int64_t reserved_ = 0;
};

/// Blocks of slices that lie end to end from `bytes` on, as write_rank_file asks for them. @param slices  outlive it
inline auto blocks_of(std::vector<Slice> const& slices, std::byte const* bytes) {
  return [&slices, bytes, current = std::size_t{0}, begun = std::int64_t{0}](std::size_t slice, std::int64_t begin,
                                                                             std::int64_t count) mutable {
    for (; current < slice; ++current) begun += slices[current].bytes();
    return std::span<std::byte const>(bytes + begun + begin, static_cast<std::size_t>(count));
  };
}

/// An optimizer, or another part of a run's state, that a checkpoint keeps: AdamW, Sgd, Muon, Ema.
template <class O>
concept CheckpointablePart = requires(O& optimizer, O const& constant, std::size_t index, std::int64_t steps) {
  { constant.name() } -> std::convertible_to<std::string_view>;                      // the same from release to release
  { constant.state_names() } -> std::convertible_to<std::vector<std::string_view>>;  // of its arrays: may be none
  *optimizer.state(index, index);  // array, unit: its elements for the unit's shard, in device memory
  { constant.steps() } -> std::same_as<std::int64_t>;
  optimizer.set_steps(steps);
};
/// A part that keeps elements for some tensors only has `owns(tensor)`, and `state(array, unit, segment)`, which
/// returns the elements of a part of the unit's shard.
template <class O>
concept KeepsSomeTensors = CheckpointablePart<O> &&
    requires(O& optimizer, TensorInfo const& tensor, Segment const& part) {
  { optimizer.owns(tensor) } -> std::convertible_to<bool>;
  *optimizer.state(std::size_t{}, std::size_t{}, part);
};
/// Several parts: `for_each_part(act)` calls `act(part)` for each.
template <class O>
concept CheckpointableParts = requires(O const& several) {
  several.for_each_part([](auto&) {});
};
/// An argument of save() and load(): a part of a run's state, or several.
template <class O>
concept Checkpointable = CheckpointablePart<O> || CheckpointableParts<O>;

/// Stands for an optimizer where there is none.
struct NoOptimizer {
  template <class Act>
  void for_each_part(Act&&) const {}
};

/// One part of a run's state, such as an optimizer. A checkpoint has an entry and some arrays of it.
class StatePart {
 public:
  virtual ~StatePart() = default;
  virtual std::int64_t steps() const = 0;
  virtual void set_steps(std::int64_t steps) = 0;
  virtual bool owns(TensorInfo const& tensor) const = 0;
  /// The elements of array `index` that belong to a part of the unit's shard. @pre owns() its tensor, which trains
  virtual std::byte* state(std::size_t index, std::size_t unit, Segment const& part) = 0;

  std::string name;
  std::vector<std::string> arrays;
  DType type = DType::f32;  ///< of their elements
};

template <CheckpointablePart O>
class StatePartOf final : public StatePart {
 public:
  explicit StatePartOf(O& optimizer) : optimizer_(&optimizer) {
    name = std::string(optimizer.name());
    for (auto const array : optimizer.state_names()) arrays.emplace_back(array);
    type = dtype_of<std::remove_cvref_t<decltype(*optimizer.state(0, 0))>>;
  }
  std::int64_t steps() const override { return optimizer_->steps(); }
  void set_steps(std::int64_t steps) override { optimizer_->set_steps(steps); }
  bool owns(TensorInfo const& tensor) const override {
    if constexpr (KeepsSomeTensors<O>) return optimizer_->owns(tensor);
    return true;
  }
  std::byte* state(std::size_t index, std::size_t unit, Segment const& part) override {
    if constexpr (KeepsSomeTensors<O>) return reinterpret_cast<std::byte*>(optimizer_->state(index, unit, part));
    return reinterpret_cast<std::byte*>(optimizer_->state(index, unit) + part.offset);
  }

 private:
  O* optimizer_;
};

/// Names of the frozen tensors. They have parameters only.
template <class E>
std::vector<std::string> frozen_tensors(E& engine) {
  std::vector<std::string> names;
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u)
    for (auto const& tensor : shards[u].layout().tensors())
      if (shards[u].frozen) names.push_back(tensor.name);
  return names;
}

/// Types of parameters that are not stored as Master, because they are frozen or fp32; by tensor.
template <class E>
std::map<std::string, DType> parameter_types(E& engine) {
  std::map<std::string, DType> types;
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u)
    for (auto const& tensor : shards[u].layout().tensors())
      if (auto const type = shards[u].types().master; type != dtype_of<typename E::Master>) types[tensor.name] = type;
  return types;
}

/// The arrays of an engine and of the parts of its run's state.
template <class E>
class RunState {
 public:
  /// @throws UsageError if a part belongs to another engine
  template <Checkpointable O>
  RunState(E& engine, O& optimizer) : engine_(&engine) {
    add(optimizer);
    for (std::size_t i = 0; i < parts_.size(); ++i)
      for (std::size_t other = 0; other < i; ++other) expect_apart(*parts_[other], *parts_[i]);
    arrays_.push_back({std::string(parameters_array), dtype_of<typename E::Master>});
    places_.emplace_back();
    for (std::size_t i = 0; i < parts_.size(); ++i)
      for (std::size_t array = 0; array < parts_[i]->arrays.size(); ++array) {
        arrays_.push_back({prefix(i) + parts_[i]->arrays[array], parts_[i]->type});
        places_.emplace_back(i, array);
      }
  }

  /// The parameters, and the arrays of each part. If there are several parts, their names come before their arrays'.
  std::vector<ArrayEntry> const& arrays() const { return arrays_; }
  std::vector<std::unique_ptr<StatePart>> const& parts() const { return parts_; }
  /// The part of an array, and the array's index there. @pre index > 0
  std::pair<std::size_t, std::size_t> place(std::size_t index) const { return places_[index]; }
  /// Whether array `index` has elements for the tensor. Frozen units have parameters only.
  bool has(std::size_t index, std::size_t unit, TensorInfo const& tensor) const {
    return index == 0 || (!engine_->shards()[unit].frozen && parts_[places_[index].first]->owns(tensor));
  }
  /// The elements of array `index` that belong to a part of the unit's shard, in device memory. @pre has()
  std::byte* at(std::size_t index, std::size_t unit, Segment const& part) const {
    if (index > 0) return parts_[places_[index].first]->state(places_[index].second, unit, part);
    auto const& of = engine_->shards()[unit];
    return static_cast<std::byte*>(of.shard_data) + static_cast<std::size_t>(part.offset) * size_of(of.types().master);
  }
  /// The manifest's entries for the parts. @note Waits for compute.
  std::vector<StateEntry> entries() const {
    std::vector<StateEntry> entries;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      StateEntry entry{parts_[i]->name, parts_[i]->steps(), {}, {}};
      for (std::size_t array = 1; array < arrays_.size(); ++array)
        if (places_[array].first == i) entry.arrays.push_back(arrays_[array].name);
      auto const shards = engine_->shards();
      for (std::size_t u = 0; u < shards.size(); ++u)
        for (auto const& tensor : shards[u].layout().tensors())
          if (!shards[u].frozen && parts_[i]->owns(tensor)) entry.tensors.push_back(tensor.name);
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  template <Checkpointable O>
  void add(O& optimizer) {
    if constexpr (CheckpointableParts<O>) {
      optimizer.for_each_part([this](auto& part) { this->add(part); });
    } else {
      if constexpr (requires { optimizer.engine(); })
        FSDP_EXPECTS(static_cast<void const*>(&optimizer.engine()) == engine_,
                     "rank {}: the optimizer '{}' belongs to another engine; pass the optimizer of this engine",
                     engine_->rank(), std::string_view(optimizer.name()));
      parts_.push_back(std::make_unique<StatePartOf<O>>(optimizer));
    }
  }
  /// Parts of one name are told apart by their tensors.
  void expect_apart(StatePart const& one, StatePart const& other) const {
    if (one.name != other.name) return;
    auto const shards = engine_->shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& tensor : shards[u].layout().tensors())
        FSDP_EXPECTS(shards[u].frozen || !one.owns(tensor) || !other.owns(tensor),
                     "rank {}: two parts of the run's state are called '{}' and keep tensor '{}'; give them names of "
                     "their own: fsdp::Ema slow{{engine, 0.9999f, \"slow\"}}",
                     engine_->rank(), one.name, tensor.name);
  }
  /// "AdamW." and, for the second one, "AdamW2."
  std::string prefix(std::size_t part) const {
    if (parts_.size() == 1) return {};
    int number = 1;
    for (std::size_t i = 0; i < part; ++i) number += parts_[i]->name == parts_[part]->name ? 1 : 0;
    return number == 1 ? parts_[part]->name + "." : formatted("{}{}.", parts_[part]->name, number);
  }

  E* engine_;
  std::vector<std::unique_ptr<StatePart>> parts_;
  std::vector<ArrayEntry> arrays_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;
};

/// Place of a slice on this rank.
struct SlicePlace {
  std::size_t array = 0, unit = 0;
  Segment part{};  ///< of the unit's shard
};
struct OwnSlices {
  std::vector<Slice> slices;
  std::vector<SlicePlace> places;  ///< place of each slice
};

/// Slices that this rank writes: one of each unit (see FlatParam::slice), so that each element is written once, whether
/// it is sharded or replicated.
/// @param without_frozen  see SaveOptions
/// @pre the engine is sealed
template <class E>
OwnSlices own_slices(E& engine, RunState<E> const& state, bool without_frozen) {
  OwnSlices own;
  auto const shards = engine.shards();
  for (std::size_t array = 0; array < state.arrays().size(); ++array) {
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      if (without_frozen && unit.frozen) continue;
      auto const dtype = array == 0 ? unit.types().master : state.arrays()[array].dtype;
      auto const slice = unit.slice();
      auto const begin = unit.shard().begin + slice.begin;
      for (auto segment : unit.layout().segments({begin, begin + slice.size()})) {
        auto const& tensor = unit.layout().tensors()[segment.tensor];
        if (!state.has(array, u, tensor)) continue;
        own.slices.push_back({state.arrays()[array].name, tensor.name, dtype, segment.first, segment.count, 0, {}});
        segment.offset += slice.begin;
        own.places.push_back({array, u, segment});
      }
    }
  }
  return own;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Joins several parts of a run's state, for save() and load(): `fsdp::TrainingState state{both, ema}`. The parts must
/// outlive it.
template <checkpoint::Checkpointable... Part>
class TrainingState {
 public:
  explicit TrainingState(Part&... parts) : parts_(&parts...) {}
  /// Calls `act(part)` for each in turn.
  template <class Act>
  void for_each_part(Act&& act) const {
    std::apply([&](auto*... part) { (act(*part), ...); }, parts_);
  }

 private:
  std::tuple<Part*...> parts_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
