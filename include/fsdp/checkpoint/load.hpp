// SPDX-License-Identifier: Apache-2.0
// Loads a checkpoint of save() on any number of ranks, with any strategy and precision.
#pragma once

#include <algorithm>
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
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Fields of a checkpoint that are not engine or optimizer state.
struct LoadedCheckpoint {
  std::filesystem::path folder;
  std::int64_t step = 0;         ///< the step in its name
  int world_size = 1;            ///< ranks that saved it
  nlohmann::ordered_json extra;  ///< the caller's argument of save()
};

namespace checkpoint {

/// @throws ConfigError naming the first tensor that only one of them has, or whose shapes differ
inline void expect_same_tensors(Manifest const& manifest, std::vector<TensorInfo> const& tensors,
                                std::string_view what) {
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
}

/// "AdamW (exp_avg, exp_avg_sq)"
inline std::string to_text(StateEntry const& part) { return formatted("'{}' ({})", part.name, listed(part.arrays)); }

/// The part of a checkpoint that matches `part`: of those with its name, the one in the same place.
/// @param before  how many parts with this name come before it
/// @throws ConfigError if there is none, it has other arrays, or it has no state for a tensor of `part`
inline StateEntry const& matching_part(Manifest const& manifest, StateEntry const& part, int before,
                                       std::string_view what) {
  StateEntry const* found = nullptr;
  for (auto const& theirs : manifest.parts)
    if (theirs.name == part.name && before-- == 0) found = &theirs;
  if (manifest.parts.empty())
    fail<ConfigError>(
        "{} has only parameters, and no state for the optimizer {}; load it without an optimizer, or choose a "
        "checkpoint that was saved with one",
        what, to_text(part));
  if (found == nullptr || found->arrays.size() != part.arrays.size()) {
    std::string theirs;
    for (auto const& each : manifest.parts) theirs += formatted("{}{}", theirs.empty() ? "" : ", ", to_text(each));
    fail<ConfigError>("{} has the state of optimizer {}; this optimizer is {}", what, theirs, to_text(part));
  }
  auto const lists = [](std::vector<std::string> const& names, std::string const& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (auto const& tensor : part.tensors) {
    if (lists(found->tensors, tensor)) continue;
    if (lists(manifest.frozen, tensor))
      fail<ConfigError>(
          "{} has no state of optimizer '{}' for tensor '{}', which was frozen when it was saved; freeze it, or load "
          "the checkpoint without an optimizer",
          what, part.name, tensor);
    fail<ConfigError>(
        "{} has no state of optimizer '{}' for tensor '{}', which another optimizer updated (of several with one name, "
        "the order counts); give it to that one, or load the checkpoint without an optimizer",
        what, part.name, tensor);
  }
  return *found;
}

/// The state in a checkpoint for each part of a run.
struct FoundState {
  std::vector<std::string> arrays;  ///< name in the checkpoint, by array of the run
  std::vector<std::int64_t> steps;  ///< steps, by part of the run
};
/// @throws ConfigError as matching_part does
template <class E>
FoundState find_state(Manifest const& manifest, RunState<E> const& state, std::vector<StateEntry> const& entries,
                      std::string_view what) {
  FoundState found;
  found.arrays.emplace_back(parameters_array);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    int before = 0;
    for (std::size_t other = 0; other < i; ++other) before += entries[other].name == entries[i].name ? 1 : 0;
    auto const& theirs = matching_part(manifest, entries[i], before, what);
    for (std::size_t array = 0; array < theirs.arrays.size(); ++array) {
      // The part's name may precede it.
      if (!std::string_view(theirs.arrays[array]).ends_with(state.parts()[i]->arrays[array]))
        fail<ConfigError>("{} has the state of optimizer {}; this optimizer is {}", what, to_text(theirs),
                          to_text(entries[i]));
      found.arrays.push_back(theirs.arrays[array]);
    }
    found.steps.push_back(theirs.steps);
  }
  return found;
}

/// Calls `act(array, unit, Segment, TensorInfo)` for every part of a tensor that this rank keeps, in every array.
template <class E, class Act>
void for_each_own_segment(E& engine, RunState<E> const& state, Act&& act) {
  auto const shards = engine.shards();
  for (std::size_t array = 0; array < state.arrays().size(); ++array)
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& segment : shards[u].layout().segments(shards[u].shard()))
        if (auto const& tensor = shards[u].layout().tensors()[segment.tensor]; state.has(array, u, tensor))
          act(array, u, segment, tensor);
}

/// Checks a tensor whose parameters the checkpoint lacks. @throws ConfigError if it trains
inline void expect_frozen(bool frozen, TensorInfo const& tensor, std::string_view what) {
  if (!frozen)
    fail<ConfigError>("{} was saved without the parameters of tensor '{}', which was frozen; freeze it", what,
                      tensor.name);
}

/// load() of a folder that ranks may reach by other paths.
/// @param name   of the checkpoint: equal on all ranks
/// @param texts  that are not files of the folder
template <class E, Checkpointable O>
LoadedCheckpoint load_named(E& engine, O& optimizer, std::filesystem::path const& checkpoint, std::string const& name,
                            FolderTexts const& texts = {}) {
  auto const turn = engine.shards().enter("load");
  RunState<E> const state(engine, optimizer);
  engine.seal();
  auto const shards = engine.shards();
  shards.abandon_pass("a checkpoint is to be loaded");
  auto const entries = state.entries();
  auto& world = engine.world();
  auto const path = checkpoint / manifest_name;
  fsdp::detail::expect_equal_texts(world, name, "which checkpoint");
  auto const text = agreed(world, "a checkpoint", [&] {
    if (world.rank() != 0) return std::string();
    return texts.manifest.empty() ? read_text_file(path) : texts.manifest;
  });
  std::optional<ShardedReader> reader;
  std::vector<float> values;
  FoundState found;
  agreed(world, "what a checkpoint has", [&] {
    auto const what = texts.manifest.empty() ? formatted("'{}'", path.string()) : name;
    auto manifest = parse_manifest(text, what);
    expect_same_tensors(manifest, tensor_list(engine), what);
    found = find_state(manifest, state, entries, what);
    reader.emplace(checkpoint, std::move(manifest), texts.descriptions);
    for_each_own_segment(engine, state, [&](auto array, auto u, Segment const& segment, TensorInfo const& tensor) {
      if (!reader->has(found.arrays[array], tensor.name)) return expect_frozen(shards[u].frozen, tensor, what);
      reader->read(found.arrays[array], tensor.name, segment.first, segment.count, [](auto...) {});
    });
    return "";
  });

  auto const& manifest = reader->manifest();
  shards.passes().begin_replacing("a load");
  engine.discard_gradients();
  agreed(world, "loading", [&] {
    for_each_own_segment(engine, state, [&](auto array, auto u, Segment const& segment, TensorInfo const& tensor) {
      if (!reader->has(found.arrays[array], tensor.name)) return;
      values.resize(static_cast<std::size_t>(segment.count));
      reader->read(found.arrays[array], tensor.name, segment.first, values);
      auto* const to = state.at(array, u, segment);
      if (array > 0) {
        fsdp::detail::with_type<bf16, fp16>(state.arrays()[array].dtype, to,
                                            [&](auto* moments) { fsdp::detail::put_values(engine, moments, values); });
        return;
      }
      auto const writing = shards.write(shards[u]);
      shards[u].with_shard([&](auto* shard) { fsdp::detail::put_values(engine, shard + segment.offset, values); });
    });
    return "";
  });
  for (std::size_t i = 0; i < found.steps.size(); ++i) state.parts()[i]->set_steps(found.steps[i]);
  shards.passes().end_replacing();
  return {checkpoint, manifest.step, manifest.world_size, manifest.extra};
}

}  // namespace checkpoint

/// Continues from a checkpoint: parameters, the optimizer's state and its count of steps are what they were when it was
/// saved, bit by bit where they are kept in the types that they were saved in, else rounded to nearest even. Gradients
/// are forgotten. A checkpoint that was saved without frozen parameters leaves those of the engine as they are. Each
/// rank reads, and checks, the blocks that its shards lie in.
/// @param checkpoint  the folder of one: what save() returned
/// @throws ConfigError on every rank if anything is missing, damaged, or not this model's or optimizer's: engine and
/// optimizer are as they were; UsageError in the middle of a backward pass. A forward pass under way is forgotten.
/// Where reading fails only later, all but another load or import is refused
/// @note Collective: yes; blocks the calling thread. Reads twice, first to check. A block of a MiB of host memory, and
/// at most a shard's part of one tensor.
template <class E, checkpoint::Checkpointable O>
LoadedCheckpoint load(E& engine, O& optimizer, std::filesystem::path const& checkpoint) {
  return checkpoint::load_named(engine, optimizer, checkpoint, formatted("the checkpoint '{}'", checkpoint.string()));
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
  });
  if (name.empty()) return std::nullopt;
  return load(engine, optimizer, folder / name);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
