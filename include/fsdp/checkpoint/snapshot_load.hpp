// SPDX-License-Identifier: Apache-2.0
// Loads a snapshot: slices are sent to the nodes whose ranks need them, and loaded like a checkpoint's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/load.hpp"
#include "fsdp/checkpoint/sharded_reader.hpp"
#include "fsdp/checkpoint/snapshot_broadcast.hpp"
#include "fsdp/checkpoint/snapshot_search.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

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
    auto const turn = engine.shards().enter("load_snapshot");
    RunState<E> const state(engine, optimizer);
    engine.seal();
    std::vector<int> mine;
    agreed(world, "a snapshot's slices", [&] {
      mine = slices_to_fetch(engine, state, found);
      return "";
    });
    auto const fetched = comm::consult(world, runs_text(mine), "slices to send", united_runs);
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
