// SPDX-License-Identifier: Apache-2.0
// Nodes of a world: ranks that see one folder for snapshots.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/hash.hpp"
#include "fsdp/checkpoint/snapshot_files.hpp"
#include "fsdp/checkpoint/snapshot_runs.hpp"
#include "fsdp/consult.hpp"
#include "fsdp/error.hpp"

namespace fsdp::checkpoint {

/// 16 hexadecimal digits that nobody else draws.
inline std::string drawn_id() {
  std::random_device device;
  return formatted("{:08x}{:08x}", device(), device());
}

inline std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

/// The name that a folder has been given by the first who asked: equal for all who see the same folder.
/// @throws ResourceError
inline std::string name_of_folder(std::filesystem::path const& folder) {
  auto const path = folder / "node";
  auto const mine = drawn_id();
  auto const temporary = folder / ("node." + mine);
  OutputFile file(temporary, 0600);
  file.write(mine);
  file.finish();
  int const failed = ::link(temporary.c_str(), path.c_str()) == 0 ? 0 : errno;  // the first one stays
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  if (failed != 0 && failed != EEXIST) detail::throw_file_error(path, "made", failed);
  return reading_for_a_save([&] { return read_text_file(path, 64); });
}

/// Which ranks share a node.
class Nodes {
 public:
  /// @param of  the node of each rank; nodes are numbered by their lowest ranks
  explicit Nodes(std::vector<int> of) : of_(std::move(of)) {
    for (auto const node : of_) count_ = std::max(count_, node + 1);
  }

  int count() const { return count_; }
  int of(int rank) const { return of_[static_cast<std::size_t>(rank)]; }
  /// Its ranks, ascending.
  std::vector<int> ranks(int node) const {
    std::vector<int> ranks;
    for (std::size_t rank = 0; rank < of_.size(); ++rank)
      if (of_[rank] == node) ranks.push_back(static_cast<int>(rank));
    return ranks;
  }

 private:
  std::vector<int> of_;
  int count_ = 0;
};

/// Answers with the node of each rank, as runs_text(), or "!" and an error.
/// @param texts  "=NAME of the folder BOOT of the machine", or "!" and an error
inline std::string nodes_in(std::vector<std::string> const& texts) {
  std::map<std::string, std::pair<int, std::size_t>> nodes;  // by folder: number, lowest rank
  std::vector<int> of;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == '!') return formatted("!rank {}: {}", rank, texts[rank].substr(1));
    auto const space = texts[rank].find(' ');
    auto const [node, first] =
        nodes.try_emplace(texts[rank].substr(1, space - 1), static_cast<int>(nodes.size()), rank).first->second;
    if (texts[rank].substr(space) != texts[first].substr(space))
      return formatted(
          "!ranks {} and {} are on different machines and see the same folder for snapshots; give a folder in the "
          "memory of each machine, such as /dev/shm/NAME",
          first, rank);
    of.push_back(node);
  }
  return runs_text(of);
}

/// Makes the folder for snapshots, and finds the ranks that share it.
/// @throws ConfigError on every rank if one cannot have its folder, or machines share one
/// @note Collective: yes; rank 0 receives some 60 characters of every rank, and answers with as much for each node.
template <class C>
Nodes find_nodes(C& world, SnapshotPlace const& place) {
  std::string mine;
  try {
    if (place.folder.empty()) fail<ConfigError>("expected a folder for snapshots, got an empty path");
    make_private_folder(place.folder);
    make_private_folder(run_folder(place));
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    mine = formatted("={} {}", name_of_folder(place.folder), boot.empty() ? host_name() : boot);
  } catch (std::exception const& error) {
    mine = std::string("!") + error.what();
  }
  auto const answer = comm::consult(world, mine, "nodes of snapshots", nodes_in);
  if (answer[0] == '!') fail<ConfigError>("snapshots: {}", answer.substr(1));
  return Nodes(parse_runs(answer));
}

}  // namespace fsdp::checkpoint
