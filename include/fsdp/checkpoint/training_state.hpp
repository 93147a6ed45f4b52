// SPDX-License-Identifier: Apache-2.0
// What a run's state is made of: the arrays that engine and optimizer keep for every element, and who writes which
// part.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/full_state.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::checkpoint {

/// An optimizer whose state can be saved. fsdp::AdamW and fsdp::Sgd are.
template <class O>
concept Checkpointable = requires(O& optimizer, O const& constant, std::size_t index, std::int64_t steps) {
  { constant.name() } -> std::convertible_to<std::string_view>;                      // the same from release to release
  { constant.state_names() } -> std::convertible_to<std::vector<std::string_view>>;  // of its arrays: may be none
  *optimizer.state(index, index);  // array, unit: its elements for the unit's shard, in device memory
  { constant.steps() } -> std::same_as<std::int64_t>;
  optimizer.set_steps(steps);
};

/// In the place of an optimizer where there is none.
struct NoOptimizer {
  std::string_view name() const { return ""; }
  std::vector<std::string_view> state_names() const { return {}; }
  float* state(std::size_t, std::size_t) const { return nullptr; }
  std::int64_t steps() const { return 0; }
  void set_steps(std::int64_t) const {}
};

/// @throws UsageError if the optimizer says that it is another engine's
template <class E, Checkpointable O>
void expect_own_optimizer(E const& engine, O const& optimizer) {
  if constexpr (requires { optimizer.engine(); })
    FSDP_EXPECTS(static_cast<void const*>(&optimizer.engine()) == &engine,
                 "rank {}: the optimizer '{}' belongs to another engine; pass the optimizer of this engine",
                 engine.rank(), std::string_view(optimizer.name()));
}

/// The arrays of an engine and an optimizer: the parameters, and the optimizer's in its order.
template <class E, Checkpointable O>
std::vector<ArrayEntry> array_list(E&, O const& optimizer) {
  std::vector<ArrayEntry> arrays{{std::string(parameters_array), dtype_of<typename E::Master>}};
  using Moment = std::remove_cvref_t<decltype(*std::declval<O&>().state(0, 0))>;
  for (auto const name : optimizer.state_names()) arrays.push_back({std::string(name), dtype_of<Moment>});
  return arrays;
}

/// The tensors that have parameters only.
template <class E>
std::vector<std::string> frozen_tensors(E& engine) {
  std::vector<std::string> names;
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u)
    for (auto const& tensor : shards[u].layout().tensors())
      if (shards[u].frozen) names.push_back(tensor.name);
  return names;
}

/// By tensor: the type of parameters that are kept in another than Master, because they are frozen or fp32.
template <class E>
std::map<std::string, DType> parameter_types(E& engine) {
  std::map<std::string, DType> types;
  auto const shards = engine.shards();
  for (std::size_t u = 0; u < shards.size(); ++u)
    for (auto const& tensor : shards[u].layout().tensors())
      if (auto const type = shards[u].types().master; type != dtype_of<typename E::Master>) types[tensor.name] = type;
  return types;
}

/// A unit's shard of array `index` of array_list, in device memory.
template <class E, Checkpointable O>
std::byte* array_of(E& engine, O& optimizer, std::size_t index, std::size_t unit) {
  if (index == 0) return static_cast<std::byte*>(engine.shards()[unit].shard_data);
  return reinterpret_cast<std::byte*>(optimizer.state(index - 1, unit));
}

/// Where a slice lies on this rank.
struct SlicePlace {
  std::size_t array = 0, unit = 0;
  std::int64_t offset = 0;  ///< of its first element, in the unit's shard
};
struct OwnSlices {
  std::vector<Slice> slices;
  std::vector<SlicePlace> places;  ///< of each slice
};

/// What this rank writes: of every unit its slice of the world's, so that each element is written once, whatever is
/// sharded or replicated.
/// @pre the engine is sealed
template <class E>
OwnSlices own_slices(E& engine, std::vector<ArrayEntry> const& arrays) {
  OwnSlices own;
  auto const shards = engine.shards();
  for (std::size_t array = 0; array < arrays.size(); ++array) {
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto const& unit = shards[u];
      if (array > 0 && unit.frozen) continue;  // optimizers keep nothing for it
      auto const dtype = array == 0 ? unit.types().master : arrays[array].dtype;
      auto const part = unit.norm_slice();
      auto const begin = unit.shard().begin + part.begin;
      for (auto const& segment : unit.layout().segments({begin, begin + part.size()})) {
        auto const& tensor = unit.layout().tensors()[segment.tensor];
        own.slices.push_back({arrays[array].name, tensor.name, dtype, segment.first, segment.count, 0, {}});
        own.places.push_back({array, u, part.begin + segment.offset});
      }
    }
  }
  return own;
}

}  // namespace fsdp::checkpoint
