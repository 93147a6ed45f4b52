// SPDX-License-Identifier: Apache-2.0
// Snapshots of a run in the memory of its nodes. They are cheap enough for every few steps, and survive the loss of
// a node.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/communicator.hpp"
#include "fsdp/detail/checkpoint/rank_files.hpp"
#include "fsdp/detail/checkpoint/snapshot_files.hpp"
#include "fsdp/detail/checkpoint/snapshot_mirror.hpp"
#include "fsdp/detail/checkpoint/snapshot_nodes.hpp"
#include "fsdp/detail/checkpoint/snapshot_search.hpp"
#include "fsdp/detail/checkpoint/training_state.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/error.hpp"
#include "fsdp/finite_state.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Result of Snapshots::take().
struct SnapshotTaken {
  bool begun = false;   ///< the state has been copied, and is being written
  std::string warning;  ///< an error of this snapshot or the one before; empty: none. Equal on all ranks
};

/// Keeps the newest states of a run in the memory of its nodes: each rank's slices in a file of its node, and a copy in
/// the next node's. Training waits for a copy to host memory; a thread writes the files, and a stream of its own moves
/// the copies. find_snapshot() and load_snapshot() resume from them, on any number of ranks.
///
/// The newest two whole snapshots are kept. The previous snapshot stays complete until the new one is.
/// Snapshots replace no checkpoints: a node that is lost together with its mirror takes them along, and so does the end
/// of all nodes. A state with an infinity or NaN is not kept: no run could go on from it. The engine and the optimizers
/// must outlive this object. Host memory, counted as MemoryTag::snapshot: a rank's state twice (its slices, and those
/// that it mirrors); in files up to four times.
template <class E>
class Snapshots {
 public:
  /// @throws ConfigError on every rank if a rank cannot have its folder, or machines share one
  /// @note Collective: yes.
  Snapshots(E& engine, SnapshotPlace place)
      : engine_(&engine),
        place_(std::move(place)),
        nodes_(checkpoint::find_nodes(engine.world(), place_)),
        memory_(engine) {
    auto const mine = nodes_.of(engine.rank());
    is_first_of_node_ = nodes_.ranks(mine).front() == engine.rank();
    if (nodes_.count() > 1) mirror_.emplace(engine.world(), engine.account(), nodes_);
  }
  Snapshots(Snapshots&&) = delete;
  /// Waits for this rank's thread. The snapshots stay.
  ~Snapshots() {
    if (thread_.joinable()) thread_.join();
  }

  /// Nodes of the world. One node mirrors nothing: its snapshots outlive ranks, not the node.
  int nodes() const { return nodes_.count(); }

  /// The step of the last snapshot that is known to be complete on all ranks; -1: none. Equal on all ranks.
  std::int64_t newest_whole() const { return whole_step_; }

  /// Copies the state, and returns; a thread writes it. If the snapshot before is still being written on some rank, or
  /// there is no memory, nothing is copied. A snapshot that could not be written is reported by the next call.
  /// @param step   number of the state, for its name: higher is newer
  /// @param extra  what the caller needs to go on, as JSON: that of rank 0 is kept
  /// @throws OrderError on every rank if ranks save different things; UsageError as fsdp::save() does; ConfigError on
  /// every rank if `extra` is no JSON
  /// @note Collective: yes; blocks until the state is in host memory. Ranks that keep each other's slices exchange
  /// their lists.
  template <checkpoint::Checkpointable O>
  SnapshotTaken take(O& optimizer, std::int64_t step, nlohmann::ordered_json extra = nullptr,
                     bool without_frozen = false) {
    using namespace checkpoint;
    auto const entry = engine_->shards().enter("Snapshots::take");
    RunState<E> const state(*engine_, optimizer);
    engine_->shards().passes().expect_at_rest("a snapshot is to be taken");
    engine_->shards().passes().expect_not_swapped("a snapshot is to be taken");
    engine_->seal();
    engine_->synchronize();
    SaveOptions options;
    options.step = step;
    options.without_frozen = without_frozen;
    auto manifest = described_run(*engine_, state, options);
    auto own = own_slices(*engine_, state, manifest.without_frozen);

    SnapshotWord word;
    word.id = drawn_id();
    word.what = formatted("step {} after {}", step, engine_->shards().history().text());
    auto text = text_of_whole(manifest, std::move(extra), word);
    std::vector<MemberSlices> members;
    if (mirror_)
      for (auto const& member : mirror_->exchange(slices_text(own.slices, host_name(), text)))
        members.push_back(parse_slices(member));
    std::int64_t bytes = 0;
    for (auto const& slice : own.slices) bytes += slice.bytes();
    auto const kept = mirror_ ? mirror_->kept() : std::vector<std::size_t>{};
    auto total = whole_words(bytes);
    for (auto const member : kept) total += whole_words(members[member].bytes);
    if (word.state != 'C') make_room(total, word);
    auto const answer = comm::ask_first_rank(engine_->world(), word.text(), "a snapshot", answer_to_words);
    auto const taken = outcome(answer, step);
    if (!taken.begun) return taken;

    step_ = step;
    SnapshotHeader header;
    header.run = place_.run;
    header.build = place_.build;
    header.model = model_checksum(manifest);
    header.id = answer.substr(SnapshotWord::id_at, 16);
    header.step = step;
    header.ranks = manifest.world_size;
    folder_ = step_folder(place_, step, header.id);
    copy_to_host(own, state);
    auto files = start_mirror(std::move(own.slices), std::move(members), kept, std::move(text), bytes);
    state_ = State::writing;
    thread_ = std::thread([this, header = std::move(header), files = std::move(files),
                           fixed = std::set<std::string>(manifest.frozen.begin(), manifest.frozen.end())] {
      write(header, files, fixed);
    });
    return taken;
  }

  /// Waits until the last snapshot is written on all ranks.
  /// @return a warning if it could not be; equal on all ranks
  /// @note Collective: yes; blocks.
  std::string wait() {
    if (thread_.joinable()) thread_.join();
    auto const mine = state_ == State::failed ? formatted("rank {}: {}", engine_->rank(), failure_) : std::string();
    auto const why = comm::ask_first_rank(engine_->world(), mine, "a snapshot's end", comm::first_text);
    if (why.empty()) keep_last();
    return why.empty() ? why : formatted("the snapshot of step {} was not kept: {}", step_, why);
  }

  /// Removes all snapshots of the run from all nodes: those of earlier starts too. @note Collective: yes; blocks.
  void clear() {
    wait();
    std::error_code ignored;
    if (is_first_of_node_)
      for (auto const& entry : std::filesystem::directory_iterator(checkpoint::run_folder(place_), ignored))
        std::filesystem::remove_all(entry.path(), ignored);
    whole_.clear();
    whole_step_ = step_ = -1;
    state_ = State::none;
    static_cast<void>(comm::ask_first_rank(engine_->world(), std::string(), "snapshots are removed", comm::no_text));
  }

 private:
  enum class State : unsigned char { none, writing, written, failed };
  /// One file of the snapshot in progress.
  struct Written {
    int rank;
    std::vector<checkpoint::Slice> slices;
    std::vector<std::string> nodes;
    std::string manifest;
    std::int64_t offset;  ///< of its first byte in host memory
  };

  static std::int64_t whole_words(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }
  static std::string node_name(int rank, std::string const& host) { return formatted("{}, rank {}", host, rank); }

  /// On rank 0: the manifest of the whole, which is written with the slices of rank 0. If the caller's values cannot be
  /// written, `word` says so to all ranks.
  std::string text_of_whole(checkpoint::Manifest& manifest, nlohmann::ordered_json extra,
                            checkpoint::SnapshotWord& word) const {
    if (engine_->rank() != 0) return {};
    try {
      checkpoint::expect_writable(extra, "extra");
      checkpoint::expect_nameable(manifest.tensors, manifest.arrays);
      manifest.extra = std::move(extra);
      for (int rank = 0; rank < manifest.world_size; ++rank)
        manifest.files.emplace_back(checkpoint::rank_file_name(rank, manifest.world_size), 0);
      return checkpoint::to_json_text(manifest);
    } catch (ConfigError const& error) {
      word.state = 'C', word.error = error.what();
    }
    return {};
  }
  /// Reserves host memory; if the snapshot before is being written, or there is no memory, `word` says so to all ranks.
  void make_room(std::int64_t bytes, checkpoint::SnapshotWord& word) {
    if (state_ == State::writing) {
      word.state = '~';
      return;
    }
    if (state_ == State::failed) word.state = '!', word.error = failure_;
    try {
      if (thread_.joinable()) thread_.join();
      memory_.reserve(bytes);
    } catch (std::exception const& error) {
      word.state = 'M', word.error = error.what();
    }
  }
  /// Decides by the ranks' words whether the snapshot of `step` begins, and whether the one before was kept.
  SnapshotTaken outcome(std::string const& answer, std::int64_t step) {
    auto const said = answer.substr(checkpoint::SnapshotWord::what_at);
    if (answer[0] == 'C') fail<ConfigError>("{}", said);
    if (answer[0] == 'X') fail<OrderError>("rank {}: a snapshot: {}", engine_->rank(), said);
    if (answer[0] == '~' || answer[0] == 'M')
      return {false, formatted("the snapshot of step {} is left out: {}", step, said)};
    SnapshotTaken taken{true, {}};
    if (answer[0] == '!') taken.warning = formatted("the snapshot of step {} was not kept: {}", step_, said);
    if (answer[0] == '=') keep_last();
    return taken;
  }
  /// Copies this rank's slices to host memory, one behind the other. Blocks.
  template <class State>
  void copy_to_host(checkpoint::OwnSlices const& own, State const& state) {
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < own.slices.size(); ++i) {
      auto const& at = own.places[i];
      engine_->device().copy_async(engine_->compute(), memory_.data() + offset, state.at(at.array, at.unit, at.part),
                                   static_cast<std::size_t>(own.slices[i].bytes()));
      offset += own.slices[i].bytes();
    }
    engine_->device().synchronize(engine_->compute());
  }
  /// Starts to exchange slices with the ranks that mirror them.
  /// @param kept   indices in `members` whose slices this rank mirrors   @param bytes  of this rank's slices
  /// @return the files that this rank writes, its own first
  std::vector<Written> start_mirror(std::vector<checkpoint::Slice> own, std::vector<checkpoint::MemberSlices> members,
                                    std::vector<std::size_t> const& kept, std::string whole, std::int64_t bytes) {
    std::vector<Written> files;
    auto const this_node = node_name(engine_->rank(), checkpoint::host_name());
    files.push_back({engine_->rank(), std::move(own), {this_node}, std::move(whole), 0});
    if (!mirror_) return files;
    auto const keeper = mirror_->keeper();
    files[0].nodes.push_back(node_name(keeper, members[mirror_->group().index(keeper)].node));
    std::int64_t most = 0;
    for (auto const& member : members) most = std::max(most, member.bytes);
    std::vector<checkpoint::KeptBytes> places;
    auto offset = whole_words(bytes);
    for (auto const index : kept) {
      auto& member = members[index];
      auto const rank = mirror_->group().ranks[index];
      places.push_back({index, memory_.data() + offset, member.bytes});
      files.push_back({rank,
                       std::move(member.slices),
                       {node_name(rank, member.node), this_node},
                       std::move(member.manifest),
                       offset});
      offset += whole_words(member.bytes);
    }
    mirror_->start(memory_.data(), bytes, most, places);
    return files;
  }

  /// The thread's function: writes this rank's slices, then those that it mirrors.
  void write(checkpoint::SnapshotHeader header, std::vector<Written> const& files,
             std::set<std::string> const& fixed) noexcept {
    try {
      if (is_first_of_node_) remove_others();
      checkpoint::make_private_folder(checkpoint::run_folder(place_));
      checkpoint::make_private_folder(folder_);
      for (auto const& file : files) {
        if (&file == files.data() + 1) mirror_->wait();
        header.rank = file.rank;
        header.nodes = file.nodes;
        header.manifest = file.manifest;
        expect_finite(file, fixed);
        checkpoint::write_slices(folder_, header, file.slices, memory_.data() + file.offset);
      }
      state_ = State::written;
    } catch (std::exception const& error) {
      try {
        failure_ = error.what();
        for (auto const& file : files)
          checkpoint::remove_slices(folder_, checkpoint::rank_file_name(file.rank, header.ranks));
        if (files.size() > 1) mirror_->wait();  // it writes into host memory
      } catch (std::exception const&) {
      }
      state_ = State::failed;
    }
  }
  /// @param fixed  tensors that do not train: a mask of infinities may be among them
  /// @throws ResourceError
  void expect_finite(Written const& file, std::set<std::string> const& fixed) const {
    std::byte const* at = memory_.data() + file.offset;
    for (auto const& slice : file.slices) {
      std::span<std::byte const> const bytes(at, static_cast<std::size_t>(slice.bytes()));
      at += slice.bytes();
      if (!fixed.contains(slice.tensor) && !checkpoint::are_finite(bytes, slice.dtype))
        fail<ResourceError>("{} is not finite", checkpoint::described(slice));
    }
  }
  /// Records that the last snapshot is complete on all ranks.
  void keep_last() {
    if (step_ < 0) return;
    whole_ = folder_;
    whole_step_ = step_;
  }
  /// Removes all snapshots but the last complete one and the one in progress.
  void remove_others() const {
    std::error_code ignored;
    for (auto const& entry : std::filesystem::directory_iterator(checkpoint::run_folder(place_), ignored))
      if (!whole_.empty() && entry.path() != whole_ && entry.path() != folder_)
        std::filesystem::remove_all(entry.path(), ignored);
  }

  E* engine_;
  SnapshotPlace place_;
  checkpoint::Nodes nodes_;
  bool is_first_of_node_ = false;
  checkpoint::HostCopy<E> memory_;
  std::optional<checkpoint::SnapshotMirror<typename E::Comm>> mirror_;  // ends before its memory
  std::int64_t step_ = -1;                                              ///< of the last snapshot that has begun
  std::filesystem::path folder_;                                        ///< its folder
  std::filesystem::path whole_;   ///< folder of the last one that is known to be whole on all ranks
  std::int64_t whole_step_ = -1;  ///< its step
  std::atomic<State> state_{State::none};
  std::string failure_;  ///< the thread's, until it has ended
  std::thread thread_;
};

namespace checkpoint {

/// Ranks of the snapshot whose slices this rank needs, and this node does not hold.
template <class E>
std::vector<int> slices_to_fetch(E& engine, RunState<E> const& state, FoundSnapshot const& found) {
  auto const what = found.name();
  auto manifest = parse_manifest(found.texts.manifest, what);
  expect_same_tensors(manifest, tensor_list(engine), what);
  auto const has = find_state(manifest, state, state.entries(), what);
  ShardedReader const reader(found.folder, std::move(manifest), found.texts.descriptions);
  std::set<std::string> needed;
  for_each_own_segment(engine, state, [&](auto array, auto, Segment const& segment, TensorInfo const& tensor) {
    if (reader.has(has.arrays[array], tensor.name))
      reader.for_each_file(has.arrays[array], tensor.name, segment.first, segment.count,
                           [&](std::string const& file) { needed.insert(file); });
  });
  std::vector<int> ranks;
  for (int rank = 0; rank < found.ranks; ++rank)
    if (auto const name = rank_file_name(rank, found.ranks); needed.contains(name) && found.headers.contains(name))
      ranks.push_back(rank);
  return ranks;
}

/// Receives one rank's slices into this node's folder, or sends them.
/// @param needs  this rank writes them
/// @return what a file's failure has thrown; nullptr: nothing
template <class C>
std::exception_ptr fetch_slices(SnapshotBroadcast<C>& send, C& world, FoundSnapshot const& found, int rank,
                                bool needs) {
  auto const name = rank_file_name(rank, found.ranks);
  auto const holder = found.holders[static_cast<std::size_t>(rank)];
  auto const temporary = found.folder / formatted("{}.{}.tmp", name, world.rank());
  std::exception_ptr failure;
  auto const attempt = [&](auto&& act) {
    try {
      if (!failure) act();
    } catch (std::exception const&) {
      failure = std::current_exception();  // peers go on: all have to take part in the broadcasts
    }
  };
  std::optional<InputFile> in;
  std::optional<OutputFile> out;
  std::string size;
  attempt([&] {
    if (world.rank() == holder) size = formatted("{}", in.emplace(found.folder / name).size());
    if (!needs) return;
    make_private_folder(folder_of(found.folder));
    make_private_folder(found.folder);
    out.emplace(temporary, 0600);
  });
  send.text(size, holder);
  std::int64_t const total = size.empty() ? 0 : std::stoll(size);
  std::vector<std::byte> block(static_cast<std::size_t>(std::min<std::int64_t>(total, block_bytes)));
  for (std::int64_t begin = 0; begin < total; begin += block_bytes) {
    auto const part = std::span(block).first(static_cast<std::size_t>(std::min(block_bytes, total - begin)));
    attempt([&] {
      if (in) in->read(begin, part);
    });
    send.bytes(part, holder);
    attempt([&] {
      if (out) out->write(part);
    });
  }
  attempt([&] {
    if (!out) return;
    out->finish();
    checkpoint::rename(temporary, found.folder / name);
    for (auto const& [file, text] : {std::pair(description_name(name), &found.texts.descriptions.at(name)),
                                     std::pair(header_name(name), &found.headers.at(name))})
      write_beside(found.folder / file, found.folder / formatted("{}.{}.tmp", file, world.rank()), *text, 0600);
  });
  std::error_code ignored;
  if (failure) std::filesystem::remove(temporary, ignored);
  return failure;
}

}  // namespace checkpoint

/// Continues from a snapshot, as load() does from a checkpoint. Slices that a rank needs and its node does not hold are
/// broadcast by their holders, and are held by that node from then on.
/// @param found  what find_snapshot() returned, on these ranks
/// @throws ConfigError on every rank if slices cannot be read or do not fit the engine, ResourceError if a node has no
/// room for them: engine and optimizer are as they were. Else as load() does
/// @note Collective: yes; blocks the calling thread.
template <class E, checkpoint::Checkpointable O>
LoadedCheckpoint load_snapshot(E& engine, O& optimizer, FoundSnapshot const& found) {
  using namespace checkpoint;
  auto& world = engine.world();
  {
    auto const entry = engine.shards().enter("load_snapshot");
    RunState<E> const state(engine, optimizer);
    engine.seal();
    std::vector<int> mine;
    agreed(world, "a snapshot's slices", [&] {
      mine = slices_to_fetch(engine, state, found);
      return "";
    });
    auto const fetched = comm::ask_first_rank(world, runs_text(mine), "slices to send", united_runs);
    if (!fetched.empty()) {
      SnapshotBroadcast<typename E::Comm> send(world);
      std::exception_ptr failure;
      for (auto const rank : parse_runs(fetched)) {
        bool const needs = std::find(mine.begin(), mine.end(), rank) != mine.end();
        if (auto const why = fetch_slices(send, world, found, rank, needs)) failure = why;
      }
      agreed(world, "slices of a snapshot", [&] {
        if (failure) std::rethrow_exception(failure);
        return "";
      });
    }
  }
  return load_named(engine, optimizer, found.folder, formatted("{} {}", found.name(), found.id), found.texts);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
