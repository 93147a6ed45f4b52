// SPDX-License-Identifier: Apache-2.0
// Finds the newest snapshot all of whose slices are held by some node.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/detail/checkpoint/rank_files.hpp"
#include "fsdp/detail/checkpoint/snapshot_files.hpp"
#include "fsdp/detail/checkpoint/snapshot_nodes.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A snapshot that can be loaded. Its folder has the slices that this node holds; where it holds none there may be no
/// such folder.
struct FoundSnapshot {
  std::filesystem::path folder;  ///< on this node
  std::int64_t step = 0;
  std::string id;                              ///< drawn for each snapshot; equal on all ranks
  int ranks = 1;                               ///< of the run that took it
  nlohmann::ordered_json extra;                ///< the caller's argument of take()
  std::vector<int> holders;                    ///< by rank of that run: the rank that sends its slices
  std::map<std::string, std::string> headers;  ///< descriptions of slices that this node does not hold, by file
  checkpoint::FolderTexts texts;               ///< the manifest, and descriptions of those slices

  /// The snapshot's name in messages.
  std::string name() const { return formatted("the snapshot of step {}", step); }
};

namespace checkpoint {

/// Slices in a rank's report: "step id ranks rank" a line, lines that begin with '!' are for people.
struct HeldSlices {
  std::int64_t step = 0;
  std::string id;
  int ranks = 1, rank = 0;
};

/// The rank in the name of a header's file; 0 if the name has none. It does not open the file: ranks that share a node
/// remove files while others list them.
std::size_t number_of(std::filesystem::path const& header);

/// This rank's report of its node's snapshots. @param share, of  it reads each file of a rank that is `share` modulo
/// `of`. Slices that are cut or altered are removed
std::string report_of_slices(SnapshotPlace const& place, std::string_view model, std::size_t share, std::size_t of);

/// The newest step of which some rank holds the slices of every rank, as "step id ranks\n" and the holders' runs; "" if
/// there is none.
/// @param notes  lines for people
std::string newest_held(std::vector<std::string> const& reports, std::vector<std::string>& notes);

/// Gives `found` the descriptions of slices that this node does not hold, and the manifest.
/// @note Collective: yes; the holders broadcast descriptions that some node lacks.
template <class C>
void complete_descriptions(C& world, FoundSnapshot& found) {
  auto const held = [&](int rank) {
    std::error_code error;
    return std::filesystem::exists(found.folder / header_name(rank_file_name(rank, found.ranks)), error);
  };
  std::vector<int> missing;
  for (int rank = 0; rank < found.ranks; ++rank)
    if (!held(rank)) missing.push_back(rank);
  auto const union_of_missing = comm::ask_first_rank(world, runs_text(missing), "descriptions of slices", united_runs);
  if (!union_of_missing.empty()) {
    SnapshotBroadcast<C> send(world);
    for (auto const rank : parse_runs(union_of_missing)) {
      auto const name = rank_file_name(rank, found.ranks);
      auto const holder = found.holders[static_cast<std::size_t>(rank)];
      std::string description, header;
      if (world.rank() == holder) {
        try {
          description = read_text_file(found.folder / description_name(name));
          header = read_text_file(found.folder / header_name(name));
        } catch (ConfigError const&) {  // found by whoever parses an empty text
        }
      }
      send.text(description, holder);
      send.text(header, holder);
      if (held(rank)) continue;
      found.texts.descriptions[name] = description;
      found.headers[name] = header;
    }
  }
  auto const text_of_first = [&] {
    auto const name = header_name(rank_file_name(0, found.ranks));
    auto const received = found.headers.find(rank_file_name(0, found.ranks));
    return parse_snapshot_header(
        received != found.headers.end() ? received->second : read_text_file(found.folder / name), name);
  };
  agreed(world, "a snapshot's manifest", [&] {
    auto manifest = parse_manifest(text_of_first().manifest, found.name());
    found.extra = manifest.extra;
    for (auto& [name, checksum] : manifest.files) {
      auto const received = found.texts.descriptions.find(name);
      checksum = checksum_of(received != found.texts.descriptions.end()
                                 ? received->second
                                 : read_text_file(found.folder / description_name(name)));
    }
    found.texts.manifest = to_json_text(manifest);
    return "";
  });
}

}  // namespace checkpoint

/// Looks for the newest snapshot of the run of which all slices are held, on the nodes of these ranks. Reads all slices
/// there, and compares their checksums; each rank reads its share of its node's. Slices that are cut or altered are
/// removed. Nothing else is written but the folder's name, if it has none; that may fail.
/// @param model  as model_checksum() gives it; empty: any. Snapshots of another one are skipped
/// @param notes  rank 0: a line for each snapshot that is skipped, and for each folder without a name
/// @return the same on all ranks, but for the folder; nullopt if there is none
/// @throws ConfigError on every rank if a rank cannot have its folder, or machines share one
/// @note Collective: yes; rank 0 receives a line for every slice that is held.
template <class C>
std::optional<FoundSnapshot> find_snapshot(C& world, SnapshotPlace const& place, std::vector<std::string>& notes,
                                           std::string_view model = {}) {
  using namespace checkpoint;
  auto const nodes = find_nodes(world, place, &notes);
  auto const here = nodes.ranks(nodes.of(world.rank()));
  auto const share = static_cast<std::size_t>(std::find(here.begin(), here.end(), world.rank()) - here.begin());
  auto const report = report_of_slices(place, model, share, here.size());
  std::vector<std::string> said;
  auto const answer = comm::ask_first_rank(world, report, "snapshots", [&](std::vector<std::string> const& reports) {
    said.clear();
    return newest_held(reports, said);
  });
  if (world.rank() == 0) notes.insert(notes.end(), said.begin(), said.end());
  if (answer.empty()) return std::nullopt;
  FoundSnapshot found;
  auto const line = answer.find('\n');
  std::istringstream(answer.substr(0, line)) >> found.step >> found.id >> found.ranks;
  found.holders = parse_runs(answer.substr(line + 1));
  found.folder = step_folder(place, found.step, found.id);
  complete_descriptions(world, found);
  return found;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::size_t number_of(std::filesystem::path const& header) {
  std::size_t number = 0;
  auto const name = header.filename().string();
  for (std::size_t i = std::string_view("rank-").size(); i < name.size() && name[i] >= '0' && name[i] <= '9'; ++i)
    number = number * 10 + static_cast<std::size_t>(name[i] - '0');
  return number;
}

FSDP_BODY std::string report_of_slices(SnapshotPlace const& place, std::string_view model, std::size_t share,
                                       std::size_t of) {
  std::string report;
  auto const skip = [&](std::filesystem::path const& path, std::string_view why) {
    report += formatted("!snapshot '{}' is skipped: {}\n", path.string(), why);
  };
  for (auto const& path : headers_in(run_folder(place))) {
    if (number_of(path) % of != share) continue;
    std::optional<SnapshotHeader> header;
    try {
      header = read_header(path);
      if (header->run != place.run)
        skip(path, formatted("it belongs to another run, '{}'", header->run));
      else if (header->build != place.build)
        skip(path, formatted("another build took it ('{}'; this is '{}')", header->build, place.build));
      else if (!model.empty() && header->model != model)
        skip(path, "it belongs to another model");
      else if (path !=
               step_folder(place, header->step, header->id) / header_name(rank_file_name(header->rank, header->ranks)))
        skip(path, formatted("it is of step {}, rank {} of {}", header->step, header->rank, header->ranks));
      else {
        expect_whole_slices(path, *header);
        report += formatted("{} {} {} {}\n", header->step, header->id, header->ranks, header->rank);
      }
    } catch (std::exception const& error) {
      skip(path, error.what());
      auto const name = path.filename().string();
      remove_slices(folder_of(path), name.substr(0, name.size() - header_ending.size()));
    }
  }
  return report;
}

FSDP_BODY std::string newest_held(std::vector<std::string> const& reports, std::vector<std::string>& notes) {
  std::map<std::tuple<std::int64_t, std::string, int>, std::map<int, int>> held;  // by snapshot: holders
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    std::istringstream lines(reports[rank]);
    for (std::string line; std::getline(lines, line);) {
      if (line[0] == '!') {
        notes.push_back(formatted("rank {}: {}", rank, line.substr(1)));
        continue;
      }
      HeldSlices slices;
      std::istringstream(line) >> slices.step >> slices.id >> slices.ranks >> slices.rank;
      held[{slices.step, slices.id, slices.ranks}].try_emplace(slices.rank, static_cast<int>(rank));
    }
  }
  for (auto snapshot = held.rbegin(); snapshot != held.rend(); ++snapshot) {
    auto const& [step, id, ranks] = snapshot->first;
    auto const& holders = snapshot->second;
    if (holders.size() == static_cast<std::size_t>(ranks)) {
      std::vector<int> all;
      for (auto const& [of, holder] : holders) all.push_back(holder);
      return formatted("{} {} {}\n{}", step, id, ranks, runs_text(all));
    }
    int missing = 0;
    while (holders.contains(missing)) ++missing;
    notes.push_back(formatted("the snapshot of step {} is skipped: no node holds the slices of rank {}{}", step,
                              missing, static_cast<int>(holders.size()) + 1 < ranks ? " and of others" : ""));
  }
  return {};
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
