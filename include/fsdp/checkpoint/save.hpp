// SPDX-License-Identifier: Apache-2.0
// Saves a run: parameters, optimizer state and the caller's data, for any number of ranks to continue from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/checkpoint_folder.hpp"
#include "fsdp/checkpoint/file_lock.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/rank_file.hpp"
#include "fsdp/checkpoint/training_state.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace checkpoint {

/// A manifest of an engine and its run's state. `files` and `extra` are missing.
/// @pre the engine is sealed
/// @note Waits for compute.
template <class E>
Manifest described_run(E& engine, RunState<E> const& state, SaveOptions const& options) {
  Manifest manifest;
  manifest.parts = state.entries();
  manifest.steps_taken = manifest.parts.empty() ? 0 : manifest.parts[0].steps;
  manifest.step = options.step < 0 ? manifest.steps_taken : options.step;
  manifest.world_size = engine.world_size();
  manifest.strategy = std::string(engine.strategy().name);
  manifest.tensors = tensor_list(engine);
  manifest.arrays = state.arrays();
  manifest.frozen = frozen_tensors(engine);
  manifest.without_frozen = options.without_frozen && !manifest.frozen.empty();
  manifest.types = parameter_types(engine);
  return manifest;
}

/// A save that has begun: all ranks have agreed on it, and its hidden folder exists.
template <class E>
class Save {
 public:
  /// @throws OrderError on every rank if ranks save different things, or have stepped or discarded otherwise;
  /// ResourceError on every rank if the folder cannot be made; ConfigError on every rank if `extra` is no JSON
  /// @note Collective: yes.
  Save(E& engine, RunState<E> state, std::filesystem::path const& folder, Json extra, SaveOptions const& options)
      : engine_(&engine), state_(std::move(state)), folder_(folder), options_(options) {
    auto const turn = engine.shards().enter("save");
    expect_possible(options);
    engine.shards().passes().expect_at_rest("a checkpoint is to be saved");
    engine.shards().passes().expect_not_swapped("a checkpoint is to be saved");
    engine.seal();
    engine.synchronize();  // no rank saves if a stream of one has failed
    manifest_ = described_run(engine, state_, options);
    std::string parts;
    for (auto const& part : manifest_.parts)
      parts += formatted("{}{} ({} steps)", parts.empty() ? "" : ", ", part.name, part.steps);
    manifest_.extra = std::move(extra);
    fsdp::detail::expect_equal_texts<OrderError>(
        engine.world(),
        formatted("step {} to '{}', {}{}, keeping {}, named by {}, after {}", manifest_.step, folder.string(),
                  parts.empty() ? "no optimizer (0 steps)" : parts,
                  manifest_.without_frozen ? " without frozen parameters" : "", options.keep_last,
                  listed(options.pointers), engine.shards().history().text()),
        "what is saved");
    own_ = own_slices(engine, state_, manifest_.without_frozen);
    partial_ = agreed(engine.world(), "a checkpoint's folder", [&] {
      expect_writable(manifest_.extra, "extra");
      expect_nameable(manifest_.tensors, manifest_.arrays);
      if (folder.empty()) fail<ConfigError>("expected a folder for the checkpoint, got an empty path");
      if (!is_first()) return std::string();
      make_folders(folder);
      lock_ = std::make_unique<FileLock>(folder / ".lock");
      return reading_for_a_save([&] { return begin_checkpoint(folder, manifest_.step); });
    });
  }

  /// Bytes that this rank writes, without the header.
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (auto const& slice : own_.slices) sum += slice.bytes();
    return sum;
  }
  std::vector<Slice> const& slices() const { return own_.slices; }
  /// Enqueues a copy of bytes [begin, begin + bytes) of a slice to host memory, on compute.
  void copy(std::size_t slice, std::int64_t begin, std::int64_t bytes, std::byte* to) const {
    auto const& place = own_.places[slice];
    engine_->device().copy_async(engine_->compute(), to, state_.at(place.array, place.unit, place.part) + begin,
                                 static_cast<std::size_t>(bytes));
  }

  // The functions below touch files only. They may be called by any one thread.

  /// Writes this rank's file. @param block  see write_rank_file @throws ResourceError
  template <class Block>
  void write(Block&& block) const {
    if (std::error_code error; !std::filesystem::is_directory(folder_ / partial_, error))
      fail<ResourceError>(
          "'{}', which rank 0 created, is not visible here: checkpoints need a folder that all nodes share",
          (folder_ / partial_).string());
    write_rank_file(folder_ / partial_, rank_file_name(engine_->rank(), manifest_.world_size), own_.slices,
                    std::forward<Block>(block));
  }
  bool is_first() const { return engine_->rank() == 0; }
  std::filesystem::path const& folder() const { return folder_; }
  std::string const& partial() const { return partial_; }
  /// Reports that this rank could not write its file: rank 0 sees it in the folder.
  void give_up(std::string_view why) const {
    auto const name = rank_file_name(engine_->rank(), manifest_.world_size);
    std::error_code ignored;
    std::filesystem::remove(folder_ / partial_ / name, ignored);  // the disk may be full
    replace_text_file(folder_ / partial_ / (name + ".failed"), why);
  }
  /// Whether all ranks' files are there. Rank 0.
  /// @throws ResourceError if a rank has given up
  bool complete() const {
    if (std::error_code error; !std::filesystem::is_directory(folder_ / partial_, error))
      detail::throw_file_error(folder_ / partial_, "found", ENOENT);
    for (int rank = 0; rank < manifest_.world_size; ++rank) {
      std::error_code error;
      auto const name = rank_file_name(rank, manifest_.world_size);
      auto const failed = folder_ / partial_ / (name + ".failed");
      if (std::filesystem::exists(failed, error)) fail<ResourceError>("rank {}: {}", rank, read_text_file(failed));
      if (error) detail::throw_file_error(failed, "inspected", error.value());
      if (!std::filesystem::exists(folder_ / partial_ / description_name(name), error)) return false;
    }
    return true;
  }
  /// Rank 0 gives the checkpoint its name, and removes old checkpoints. @return its folder; "" on other ranks
  /// @throws ResourceError
  std::string commit() const {
    if (!is_first()) return {};
    return reading_for_a_save([&] {
      auto const place = commit_checkpoint(folder_, partial_, manifest_, options_);
      prune_checkpoints(folder_, options_.keep_last, place.filename().string());
      return place.string();
    });
  }

 private:
  E* engine_;
  RunState<E> state_;
  std::filesystem::path folder_;
  SaveOptions options_;
  Manifest manifest_;
  OwnSlices own_;
  std::string partial_;
  std::unique_ptr<FileLock> lock_;  // rank 0's
};

}  // namespace checkpoint

/// Saves the run as `folder`/step-N, sharded: each rank writes its slices of the parameters and of the optimizer's
/// state, in the types that they are kept in. Whatever happens under way, `folder`/latest names a whole checkpoint
/// before and after. load() and load_latest() read it, on any number of ranks and with any strategy and precision.
///
/// Gradients are not saved: between optimizer steps there are none, and those that are there are forgotten by whoever
/// goes on from here. A GradScaler's state() belongs in `extra`.
/// @param folder  all ranks reach it; it is made if need be
/// @param extra  what the caller needs to go on, as JSON: rank 0's is kept
/// @return the checkpoint's folder
/// @throws ResourceError on every rank if a file cannot be written: what was saved before is as it was; OrderError if
/// ranks save different things; ConfigError on every rank if `extra` is no JSON; UsageError on options that cannot be
/// followed, another engine's optimizer, and inside a use, an evaluation, or an optimizer step that has ended half-way
/// @note Collective: yes; blocks the calling thread until everything is on the disk. One block of a MiB of host memory.
template <class E, checkpoint::Checkpointable O>
std::filesystem::path save(E& engine, O& optimizer, std::filesystem::path const& folder,
                           nlohmann::ordered_json extra = nullptr, SaveOptions const& options = {}) {
  using namespace checkpoint;
  auto const turn = engine.shards().enter("save");
  Save<E> const now(engine, RunState<E>(engine, optimizer), folder, std::move(extra), options);
  auto& world = engine.world();
  try {
    agreed(world, "a checkpoint's files", [&] {
      std::vector<std::byte> staging(block_bytes);
      now.write([&](std::size_t slice, std::int64_t begin, std::int64_t bytes) {
        now.copy(slice, begin, bytes, staging.data());
        engine.device().synchronize(engine.compute());
        return std::span<std::byte const>(staging).first(static_cast<std::size_t>(bytes));
      });
      return "";
    });
    return agreed(world, "a checkpoint's end", [&] { return now.commit(); });
  } catch (...) {
    if (now.is_first()) discard_checkpoint(folder, now.partial());
    throw;
  }
}

/// Saves the parameters alone.
template <class E>
std::filesystem::path save(E& engine, std::filesystem::path const& folder, nlohmann::ordered_json extra = nullptr,
                           SaveOptions const& options = {}) {
  checkpoint::NoOptimizer none;
  return save(engine, none, folder, std::move(extra), options);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
