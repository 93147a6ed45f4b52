// SPDX-License-Identifier: Apache-2.0
// The snapshots of a run: where they lie, and whether a resumed run goes on from one or from a checkpoint.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/error.hpp"
#include "fsdp/snapshots.hpp"
#include "transformer/launch/agree.hpp"
#include "transformer/run/settings.hpp"
#include "transformer/training/prepared.hpp"
#include "transformer/training/state.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace transformer {

/// Where a run in `out_dir` keeps its snapshots: the folder of that name, for this build of this program. If
/// $FSDP_SNAPSHOT_NODE is set, a dot and its value follow the folder's name: processes of one machine stand for nodes.
/// @throws fsdp::ResourceError if the program's own file cannot be read
fsdp::SnapshotPlace snapshot_place(std::filesystem::path const& folder, std::filesystem::path const& out_dir);

/// The run that choose_run() finds in out_dir; nullopt if it refuses.
std::optional<ChosenRun> run_on_disk(Settings const& settings);

/// The id of a run's first start, which differs from that of a run that replaces it; empty: not known.
std::string lineage_of(RunState const& run);

/// A note that a resumed run had snapshots, but this start has none. @return empty if it had none
std::string note_on_snapshots_of(RunState const& run);

/// Rank 0: why the snapshot does not continue the run in out_dir, or is older than its checkpoint; empty: it is loaded.
std::string refusal_of(fsdp::FoundSnapshot const& found, std::optional<RunState> const& on_disk, std::string out_dir);

/// Refuses a folder for snapshots that some rank cannot have.
/// @param lines  get a line for each folder in which nothing can be written, unless it is there
/// @throws AgreedError on every rank
/// @note Collective: yes.
template <class C>
void expect_snapshot_folder(C& world, Settings const& settings, std::vector<std::string>& lines) {
  fsdp::SnapshotPlace place;
  agree(world, [&] { place = snapshot_place(settings.snapshot_folder, settings.out_dir); });
  std::vector<std::string> notes;
  try {
    static_cast<void>(fsdp::checkpoint::find_nodes(world, place, &notes));
  } catch (fsdp::ConfigError const& error) {  // on every rank
    throw AgreedError(fmt::format("setting 'snapshot_folder': {}", error.what()));
  }
  for (auto& note : notes)
    if (std::find(lines.begin(), lines.end(), note) == lines.end()) lines.push_back(std::move(note));
}

/// Looks for a snapshot that is newer than the checkpoint in out_dir: `ready.resumed` becomes its state. Lines say
/// which snapshots were skipped. Nothing happens unless the run may resume, no checkpoint was named, and this start
/// names a folder: one that a checkpoint names may be anybody's, for checkpoints come from elsewhere too.
/// @throws AgreedError on every rank if a folder is refused
/// @note Collective: yes.
template <class C>
void look_for_snapshot(C& world, Prepared& ready) {
  auto const& settings = ready.settings;
  if (!may_resume(settings) || !settings.checkpoint.empty()) return;
  ready.on_disk = run_on_disk(settings);
  auto const on_disk = ready.on_disk ? ready.on_disk->run : std::nullopt;
  auto const folder =
      fsdp::comm::ask_first_rank(world, settings.snapshot_folder, "the folder of snapshots", fsdp::comm::text_of_first);
  if (folder.empty()) {
    if (auto note = on_disk ? note_on_snapshots_of(*on_disk) : std::string(); !note.empty())
      ready.lines.push_back(std::move(note));
    return;
  }
  fsdp::SnapshotPlace place;
  agree(world, [&] { place = snapshot_place(folder, settings.out_dir); });
  std::optional<fsdp::FoundSnapshot> found;
  try {
    found = fsdp::find_snapshot(world, place, ready.lines);
  } catch (fsdp::ConfigError const& error) {  // on every rank
    throw AgreedError(fmt::format("setting 'snapshot_folder': {}", error.what()));
  }
  ready.keeps_snapshots = true;
  std::string why;
  if (found && world.rank() == 0) why = refusal_of(*found, on_disk, settings.out_dir);
  why = fsdp::comm::ask_first_rank(world, why, "whether a snapshot is loaded", fsdp::comm::text_of_first);
  if (!found || !why.empty()) {
    if (why.empty()) why = ready.lines.empty() ? "no node has one" : "no node has a whole one";
    ready.lines.push_back(fmt::format("note: no snapshot is loaded: {}", why));
    return;
  }
  agree(world, [&] { ready.resumed = read_run(found->folder, found->texts.manifest); });
  ready.lines.push_back(
      fmt::format("note: {} is loaded: {}", found->name(),
                  on_disk ? fmt::format("'{}' has a checkpoint of iteration {}", settings.out_dir, on_disk->iteration)
                          : fmt::format("'{}' has no undamaged checkpoint", settings.out_dir)));
  ready.snapshot = std::move(found);
}

}  // namespace transformer
