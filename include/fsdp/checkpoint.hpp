// SPDX-License-Identifier: Apache-2.0
// Checkpoints: saves a run, at once or while training continues, and loads it on any number of ranks, with any
// strategy and precision. Buffers of modules in checkpoints.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/clock.hpp"
#include "fsdp/detail/checkpoint/folder.hpp"
#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/detail/checkpoint/rank_files.hpp"
#include "fsdp/detail/checkpoint/training_state.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/error.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/json.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/module_buffers.hpp"

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
    auto const entry = engine.shards().enter("save");
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
  std::vector<Slice> const& slices() const { return own_.slices; }  ///< slices of this rank's file, in their order
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
  bool is_first() const { return engine_->rank() == 0; }           ///< whether this rank is rank 0, which commits
  std::filesystem::path const& folder() const { return folder_; }  ///< folder of the run's checkpoints
  std::string const& partial() const { return partial_; }          ///< name of the hidden folder inside folder()
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
  auto const entry = engine.shards().enter("save");
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

/// Fields of a checkpoint that are not engine or optimizer state.
struct LoadedCheckpoint {
  std::filesystem::path folder;  ///< folder of the checkpoint, such as "out/step-100"
  std::int64_t step = 0;         ///< the step in its name
  int world_size = 1;            ///< ranks that saved it
  nlohmann::ordered_json extra;  ///< the caller's argument of save()
};

namespace checkpoint {

/// @throws ConfigError naming the first tensor that only one of them has, or whose shapes differ
void expect_same_tensors(Manifest const& manifest, std::vector<TensorInfo> const& tensors, std::string_view what);

/// "AdamW (exp_avg, exp_avg_sq)"
inline std::string to_text(StateEntry const& part) { return formatted("'{}' ({})", part.name, listed(part.arrays)); }

/// The part of a checkpoint that matches `part`: of those with its name, the one in the same place.
/// @param before  how many parts with this name come before it
/// @throws ConfigError if there is none, it has other arrays, or it has no state for a tensor of `part`
StateEntry const& matching_part(Manifest const& manifest, StateEntry const& part, int before, std::string_view what);

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
void expect_frozen(bool frozen, TensorInfo const& tensor, std::string_view what);

/// load() of a folder that ranks may reach by other paths.
/// @param name   of the checkpoint: equal on all ranks
/// @param texts  that are not files of the folder
template <class E, Checkpointable O>
LoadedCheckpoint load_named(E& engine, O& optimizer, std::filesystem::path const& checkpoint, std::string const& name,
                            FolderTexts const& texts = {}) {
  auto const entry = engine.shards().enter("load");
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

/// State of this rank's part of a background save.
enum class SaveProgress {
  none,     ///< nothing was saved since the last wait()
  writing,  ///< the thread writes
  written,  ///< the thread has ended; on rank 0 the checkpoint is complete
  failed,   ///< the thread has ended with an error, which wait() throws on every rank
};

/// Saves in the background: training waits only for a copy to host memory. One save is under way at a time; the next
/// waits for it.
///
/// The checkpoint is there when all ranks have written their files, which rank 0's thread waits for: nobody need call
/// anything for that. Whether it is there, wait() says, and the next save: without them a failure is only printed. The
/// copy stays allocated, in the engine's account as MemoryTag::snapshot. After a failure the saver, the engine and the
/// optimizers may be used as before. The engine and the optimizers must outlive the saver.
template <class E>
class BackgroundSaver {
 public:
  /// @param patience  how long rank 0's thread waits for the others' files when it has written its own
  explicit BackgroundSaver(E& engine, std::chrono::milliseconds patience = std::chrono::minutes(10))
      : engine_(&engine), patience_(patience), copy_(engine) {}
  BackgroundSaver(BackgroundSaver&&) = delete;
  /// Waits for this rank's thread: on rank 0 until all ranks have written, one could not, or patience is at its end.
  /// Reports a failure that nobody has asked for.
  ~BackgroundSaver() {
    stop_waiting_ = std::uncaught_exceptions() > exceptions_;  // peers may never come
    if (thread_.joinable()) thread_.join();
    if (!failure_.empty()) std::fprintf(stderr, "fsdp: a checkpoint was not saved: %s\n", failure_.c_str());
  }

  /// Waits for the last save, copies the state, and returns; a thread writes it. See fsdp::save().
  /// @throws the last save's failure, on every rank, and then nothing is saved; else as fsdp::save() does for what
  /// precedes writing
  /// @note Collective: yes; blocks the calling thread until the state is in host memory.
  template <checkpoint::Checkpointable O>
  void save(O& optimizer, std::filesystem::path const& folder, nlohmann::ordered_json extra = nullptr,
            SaveOptions const& options = {}) {
    auto const entry = engine_->shards().enter("BackgroundSaver::save");
    engine_->shards().passes().expect_at_rest("a checkpoint is to be saved");
    wait();
    auto now = std::make_shared<checkpoint::Save<E>>(*engine_, checkpoint::RunState<E>(*engine_, optimizer), folder,
                                                     std::move(extra), options);
    try {
      checkpoint::agreed(engine_->world(), "memory for a checkpoint", [&] {
        copy_.reserve(now->bytes());
        return "";
      });
    } catch (...) {
      if (now->is_first()) checkpoint::discard_checkpoint(now->folder(), now->partial());
      throw;
    }
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < now->slices().size(); ++i) {
      auto const bytes = now->slices()[i].bytes();
      now->copy(i, 0, bytes, copy_.data() + offset);
      offset += bytes;
    }
    engine_->device().synchronize(engine_->compute());
    failure_.clear();
    folder_.clear();
    stop_waiting_ = all_written_ = false;
    saving_ = {now->folder(), now->partial()};
    progress_ = SaveProgress::writing;
    thread_ = std::thread([this, now = std::move(now)] { run(*now); });
    under_way_ = true;
  }

  /// Waits until the last save is on the disk.
  /// @return its folder; empty if there was none since the last call
  /// @throws ResourceError or ConfigError on every rank if it could not be saved on one
  /// @note Collective: yes; blocks the calling thread.
  std::filesystem::path wait() {
    if (!under_way_) return {};
    under_way_ = false;
    try {
      auto folder = finish();
      progress_ = SaveProgress::none;
      return folder;
    } catch (...) {
      progress_ = SaveProgress::none;
      if (engine_->rank() == 0) discard();
      throw;
    }
  }

  /// State of this rank's part of the save, without waiting: other ranks may give another answer.
  /// @note Collective: no; any thread.
  SaveProgress progress() const noexcept { return progress_; }

 private:
  std::filesystem::path finish() {
    auto& world = engine_->world();
    if (world.rank() != 0) thread_.join();
    try {
      // Rank 0's thread waits for the others' files: it learns here that some will not come.
      checkpoint::agreed(world, "a checkpoint's files", [&] {
        if (world.rank() != 0 && !failure_.empty()) throw ResourceError(std::exchange(failure_, {}));
        return "";
      });
    } catch (...) {
      stop_waiting_ = true;
      if (thread_.joinable()) thread_.join();
      failure_.clear();
      throw;
    }
    all_written_ = true;
    if (thread_.joinable()) thread_.join();
    return checkpoint::agreed(world, "a checkpoint's end", [&] {
      if (!failure_.empty()) throw ResourceError(std::exchange(failure_, {}));
      return folder_;
    });
  }

  /// Removes files of a failed save, unless another save has begun.
  void discard() const {
    try {
      checkpoint::FileLock const lock(saving_.first / ".lock");
      checkpoint::discard_checkpoint(saving_.first, saving_.second);
    } catch (Error const&) {
    }
  }

  template <class S>
  void run(S const& now) noexcept {
    try {
      now.write(checkpoint::blocks_of(now.slices(), copy_.data()));
      if (now.is_first()) {
        wait_for_files(now);
        if (!stop_waiting_) folder_ = now.commit();
      }
      progress_ = SaveProgress::written;
    } catch (std::exception const& error) {
      try {
        failure_ = error.what();
        now.give_up(failure_);
      } catch (...) {
        if (failure_.empty()) failure_ = "no memory";
      }
      progress_ = SaveProgress::failed;
    }
  }

  /// Rank 0, until the others' files are there or it is asked to stop. After `patience`, commit() names the missing
  /// files.
  template <class S>
  void wait_for_files(S const& now) const {
    using Clock = AwakeClock;
    auto const complete = [&now] {
      Clock::LongCall const call;  // the file system may be slow
      return now.complete();
    };
    // A file system of several nodes may show files of other nodes a little later.
    auto const grace = std::min<std::chrono::milliseconds>(patience_ / 2, std::chrono::minutes(1));
    auto until = Clock::now() + patience_;
    bool told = false;
    while (!complete() && !stop_waiting_) {
      if (all_written_ && !std::exchange(told, true)) until = std::min(until, Clock::now() + grace);
      if (Clock::now() > until) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  E* engine_;
  std::chrono::milliseconds patience_;
  checkpoint::HostCopy<E> copy_;
  std::thread thread_;
  std::atomic<bool> stop_waiting_{false};
  std::atomic<bool> all_written_{false};  ///< all ranks' threads have written
  std::atomic<SaveProgress> progress_{SaveProgress::none};
  bool under_way_ = false;
  int exceptions_ = std::uncaught_exceptions();
  std::pair<std::filesystem::path, std::string> saving_;  ///< the last save's folder, and the hidden one in it
  // Owned by the thread until it is joined:
  std::string failure_, folder_;
};

namespace detail {

inline std::string hexadecimal(std::vector<std::byte> const& bytes) {
  constexpr char const* digits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (auto const byte : bytes) {
    text += digits[std::to_integer<unsigned>(byte) >> 4];
    text += digits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}
inline int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }
/// @return false if `text` has another length, or is no hexadecimal number
inline bool parse_hexadecimal(std::string_view text, std::vector<std::byte>& out) {
  if (text.size() != 2 * out.size()) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto const high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    out[i] = static_cast<std::byte>(high * 16 + low);
  }
  return true;
}

}  // namespace detail

/// Buffers as JSON, with every bit: `fsdp::save(engine, adamw, folder, {{"buffers", buffers_to_json(engine,
/// buffers)}})`. A checkpoint keeps rank 0's, once; call average_buffers or broadcast_buffers first.
/// @throws UsageError if two buffers have one name, or one has no memory
/// @note Stream: behind compute. The calling thread waits for the values.
/// @note Collective: no.
template <class E>
[[gnu::cold]] checkpoint::Json buffers_to_json(E& engine, std::vector<ModuleBuffer> const& buffers) {
  auto const entry = engine.shards().enter("buffers_to_json");
  detail::expect_buffers(engine.rank(), "buffers_to_json", buffers);
  auto all = checkpoint::Json::object();
  for (auto const& buffer : buffers) {
    std::vector<std::byte> values(buffer.bytes);
    engine.device().copy_async(engine.compute(), values.data(), buffer.data, buffer.bytes);
    engine.device().synchronize(engine.compute());
    all[buffer.name] = {{"type", buffer.type}, {"shape", buffer.shape}, {"bytes", detail::hexadecimal(values)}};
  }
  return all;
}

/// Sets buffers to what buffers_to_json() returned, on any number of ranks:
/// `buffers_from_json(engine, buffers, loaded.extra.at("buffers"))`.
/// @throws ConfigError if a buffer is missing, or has another type or shape: no buffer has changed then
/// @note Stream: behind compute. The calling thread waits until the values are there.
/// @note Collective: no; all ranks call it.
template <class E>
[[gnu::cold]] void buffers_from_json(E& engine, std::vector<ModuleBuffer> const& buffers,
                                     checkpoint::Json const& saved) {
  auto const entry = engine.shards().enter("buffers_from_json");
  detail::expect_buffers(engine.rank(), "buffers_from_json", buffers);
  std::vector<std::vector<std::byte>> all;
  for (auto const& buffer : buffers) {
    if (!saved.is_object() || !saved.contains(buffer.name))
      fail<ConfigError>("rank {}: the saved buffers have no buffer '{}', which the modules have", engine.rank(),
                        buffer.name);
    auto const& found = saved.at(buffer.name);
    auto const has = [&](char const* key, checkpoint::Json const& value) {
      return found.is_object() && found.contains(key) && found.at(key) == value;
    };
    auto const text_at = [&](char const* key) {
      return found.is_object() && found.contains(key) ? found.at(key).dump() : std::string("none");
    };
    auto& values = all.emplace_back(buffer.bytes);
    if (!has("type", buffer.type) || !has("shape", buffer.shape) || !found.contains("bytes") ||
        !found.at("bytes").is_string() || !detail::parse_hexadecimal(found.at("bytes").get<std::string>(), values))
      fail<ConfigError>(
          "rank {}: saved buffer '{}': expected type {}, shape ({}) and {} bytes as hexadecimal digits, got type {}, "
          "shape {}",
          engine.rank(), buffer.name, buffer.type, listed(buffer.shape), buffer.bytes, text_at("type"),
          text_at("shape"));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i)
    engine.device().copy_async(engine.compute(), buffers[i].data, all[i].data(), all[i].size());
  engine.device().synchronize(engine.compute());
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY void expect_same_tensors(Manifest const& manifest, std::vector<TensorInfo> const& tensors,
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

FSDP_BODY StateEntry const& matching_part(Manifest const& manifest, StateEntry const& part, int before,
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

FSDP_BODY void expect_frozen(bool frozen, TensorInfo const& tensor, std::string_view what) {
  if (!frozen)
    fail<ConfigError>("{} was saved without the parameters of tensor '{}', which was frozen; freeze it", what,
                      tensor.name);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
