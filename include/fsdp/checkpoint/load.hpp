// SPDX-License-Identifier: Apache-2.0
// Going on from a checkpoint that save() wrote, on any number of ranks, with any strategy and precision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/full_state.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/sharded_reader.hpp"
#include "fsdp/checkpoint/training_state.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"

namespace fsdp {

/// What a checkpoint says beside the state that has been loaded.
struct LoadedCheckpoint {
  std::filesystem::path folder;
  std::int64_t step = 0;         ///< of its name
  int world_size = 1;            ///< ranks that saved it
  nlohmann::ordered_json extra;  ///< what the caller gave to save()
};

namespace checkpoint {

/// @param frozen  the model's tensors that need parameters only
/// @throws ConfigError naming the first tensor that one has and the other has not, or has with another shape; or arrays
/// that the optimizer does not have; or a tensor that trains, and was frozen when it was saved
inline void expect_same_state(Manifest const& manifest, std::vector<TensorInfo> const& tensors,
                              std::vector<std::string> const& frozen, std::vector<ArrayEntry> const& arrays,
                              std::string_view optimizer, std::string_view what) {
  auto const find = [](std::vector<TensorInfo> const& list, std::string const& name) {
    return std::find_if(list.begin(), list.end(), [&](TensorInfo const& each) { return each.name == name; });
  };
  for (auto const& tensor : tensors) {
    auto const theirs = find(manifest.tensors, tensor.name);
    if (theirs == manifest.tensors.end())
      fail<ConfigError>("{} has no tensor '{}', which the model needs", what, tensor.name);
    if (theirs->shape != tensor.shape)
      fail<ConfigError>("{}: tensor '{}' has shape ({}); the model's has shape ({})", what, tensor.name,
                        listed(theirs->shape), listed(tensor.shape));
  }
  for (auto const& tensor : manifest.tensors)
    if (find(tensors, tensor.name) == tensors.end())
      fail<ConfigError>("{} has a tensor '{}' that the model does not have", what, tensor.name);
  if (optimizer.empty()) return;
  bool same = manifest.optimizer == optimizer && manifest.arrays.size() == arrays.size();
  for (std::size_t i = 0; same && i < arrays.size(); ++i) same = manifest.arrays[i].name == arrays[i].name;
  auto const has = [](std::vector<std::string> const& list, std::string const& name) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  for (auto const& tensor : tensors)
    if (same && has(manifest.frozen, tensor.name) && !has(frozen, tensor.name))
      fail<ConfigError>(
          "{} has no state of optimizer '{}' for tensor '{}', which was frozen when it was saved; freeze it, or load "
          "the checkpoint without an optimizer",
          what, optimizer, tensor.name);
  if (same) return;
  auto const names = [](std::vector<ArrayEntry> const& list) {
    std::vector<std::string> texts;
    for (auto const& array : list) texts.push_back(array.name);
    return listed(texts);
  };
  if (manifest.optimizer.empty())
    fail<ConfigError>(
        "{} has only parameters, and no state for the optimizer '{}' ({}); load it without an optimizer, or choose a "
        "checkpoint that was saved with one",
        what, optimizer, names(arrays));
  fail<ConfigError>("{} has the state of optimizer '{}' ({}); this optimizer is '{}' ({})", what, manifest.optimizer,
                    names(manifest.arrays), optimizer, names(arrays));
}

/// Calls `act(array, unit, Segment)` for every part of a tensor that this rank keeps, in every array. Frozen units have
/// parameters only.
template <class E, class Act>
void for_each_own_segment(E& engine, std::size_t arrays, Act&& act) {
  auto const shards = engine.shards();
  for (std::size_t array = 0; array < arrays; ++array)
    for (std::size_t u = 0; u < shards.size(); ++u) {
      if (array > 0 && shards[u].frozen) continue;
      for (auto const& segment : shards[u].layout().segments(shards[u].shard())) act(array, u, segment);
    }
}

}  // namespace checkpoint

/// Continues from a checkpoint: parameters, the optimizer's state and its count of steps are what they were when it was
/// saved, bit by bit where they are kept in the types that they were saved in, else rounded to nearest even. Gradients
/// are forgotten. Each rank reads, and checks, the blocks that its shards lie in.
/// @param checkpoint  the folder of one: what save() returned
/// @throws ConfigError on every rank if anything is missing, damaged, or not this model's or optimizer's: engine and
/// optimizer are as they were; UsageError in the middle of a backward pass. A forward pass under way is forgotten.
/// Where reading fails only later, all but another load or import is refused
/// @note Collective: yes; blocks the calling thread. Reads twice, first to check. A block of a MiB of host memory, and
/// at most a shard's part of one tensor.
template <class E, checkpoint::Checkpointable O>
LoadedCheckpoint load(E& engine, O& optimizer, std::filesystem::path const& checkpoint) {
  using namespace fsdp::checkpoint;
  auto const turn = engine.shards().enter("load");
  expect_own_optimizer(engine, optimizer);
  engine.seal();
  auto const shards = engine.shards();
  shards.abandon_pass("a checkpoint is to be loaded");
  auto const arrays = array_list(engine, optimizer);
  auto& world = engine.world();
  auto const path = checkpoint / manifest_name;
  fsdp::detail::expect_equal_texts(world, formatted("the checkpoint '{}'", checkpoint.string()), "which checkpoint");
  auto const text =
      agreed(world, "a checkpoint", [&] { return world.rank() == 0 ? read_text_file(path) : std::string(); })[0];
  std::optional<ShardedReader> reader;
  std::vector<float> values;
  auto const each = [&](auto const& act) {
    for_each_own_segment(engine, arrays.size(), [&](std::size_t array, std::size_t u, Segment const& segment) {
      act(array, u, segment, shards[u].layout().tensors()[segment.tensor]);
    });
  };
  agreed(world, "what a checkpoint has", [&] {
    auto const what = formatted("'{}'", path.string());
    auto manifest = parse_manifest(text, what);
    expect_same_state(manifest, tensor_list(engine), frozen_tensors(engine), arrays, optimizer.name(), what);
    reader.emplace(checkpoint, std::move(manifest));
    each([&](std::size_t array, std::size_t, Segment const& segment, TensorInfo const& tensor) {
      reader->read(arrays[array].name, tensor.name, segment.first, segment.count, [](auto...) {});
    });
    return "";
  });

  auto const& manifest = reader->manifest();
  shards.gate().begin_replacing("a load");
  engine.discard_gradients();
  agreed(world, "loading", [&] {
    each([&](std::size_t array, std::size_t u, Segment const& segment, TensorInfo const& tensor) {
      values.resize(static_cast<std::size_t>(segment.count));
      reader->read(arrays[array].name, tensor.name, segment.first, values);
      if (array > 0) return fsdp::detail::put_values(engine, optimizer.state(array - 1, u) + segment.offset, values);
      auto const writing = shards.write(shards[u]);
      shards[u].with_shard([&](auto* shard) { fsdp::detail::put_values(engine, shard + segment.offset, values); });
    });
    return "";
  });
  optimizer.set_steps(manifest.steps_taken);
  shards.gate().end_replacing();
  return {checkpoint, manifest.step, manifest.world_size, manifest.extra};
}

/// Continues from the parameters of a checkpoint alone.
template <class E>
LoadedCheckpoint load(E& engine, std::filesystem::path const& checkpoint) {
  checkpoint::NoOptimizer none;
  return load(engine, none, checkpoint);
}

/// Continues from the checkpoint that `folder`/latest names; see load().
/// @param pointer  the file that names it
/// @return nullopt if there is no such file: nothing has been saved yet, and nothing has changed
/// @throws ConfigError on every rank, as load() does
/// @note Collective: yes.
template <class E, checkpoint::Checkpointable O>
std::optional<LoadedCheckpoint> load_latest(E& engine, O& optimizer, std::filesystem::path const& folder,
                                            std::string_view pointer = "latest") {
  auto& world = engine.world();
  auto const name = checkpoint::agreed(world, "which checkpoint", [&] {
    return world.rank() == 0 ? checkpoint::read_pointer(folder / pointer).value_or("") : std::string();
  })[0];
  if (name.empty()) return std::nullopt;
  return load(engine, optimizer, folder / name);
}

}  // namespace fsdp
