// SPDX-License-Identifier: Apache-2.0
// The nodes of a world: ranks that see one folder for snapshots form a node. Texts and files from one rank to all.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/detail/checkpoint/snapshot_files.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// Encodes numbers: a word "count:first:by" for each run of numbers that grow by `by`, 0 or 1.
std::string runs_text(std::vector<int> const& values);
std::vector<int> parse_runs(std::string const& text);

/// Answer of rank 0: the union of the numbers that ranks list, as runs_text(), from texts of runs_text().
std::string united_runs(std::vector<std::string> const& texts);

/// Broadcasts bytes over a communicator of its own. @tparam C  Communicator
template <Communicator C>
class SnapshotBroadcast {
 public:
  /// @note Collective: yes, all of it.
  explicit SnapshotBroadcast(C& world)
      : comm_(world.split(0, world.rank(), "snapshot slices")),
        memory_(static_cast<float*>(comm_.allocate(chunk_words * sizeof(float)))),
        stream_(comm_.device().make_stream("snapshot slices", StreamPriority::normal)) {}
  SnapshotBroadcast(SnapshotBroadcast const&) = delete;
  SnapshotBroadcast& operator=(SnapshotBroadcast const&) = delete;
  ~SnapshotBroadcast() { comm_.deallocate(memory_, chunk_words * sizeof(float)); }

  /// `bytes` of rank `root` to all; the same number on all ranks.
  void bytes(std::span<std::byte> bytes, int root) {
    for (std::size_t begin = 0; begin < bytes.size(); begin += chunk_words * sizeof(float)) {
      auto const part = bytes.subspan(begin, std::min(bytes.size() - begin, chunk_words * sizeof(float)));
      auto const& device = comm_.device();
      if (last_.sequence != 0) comm_.wait_for_peers(stream_, last_, WaitSite::gather_peers_read);
      if (comm_.rank() == root) device.copy_async(stream_, memory_, part.data(), part.size());
      last_ = comm_.broadcast(stream_, memory_, (part.size() + sizeof(float) - 1) / sizeof(float), root,
                              Label{"snapshot", "load"});
      if (comm_.rank() != root) device.copy_async(stream_, part.data(), memory_, part.size());
      device.synchronize(stream_);
    }
  }
  /// The text of rank `root` to all, of any length.
  void text(std::string& text, int root) {
    std::uint64_t size = text.size();
    bytes(std::as_writable_bytes(std::span(&size, 1)), root);
    text.resize(size);
    bytes(std::as_writable_bytes(std::span(text)), root);
  }

 private:
  static constexpr std::size_t chunk_words = std::size_t{1} << 20;

  C comm_;
  float* memory_;
  Ticket last_{};
  typename C::Device::Stream stream_;
};

/// A random id of 16 hexadecimal digits.
std::string drawn_id();

std::string host_name();

/// [Note: Names of folders]
/// Ranks that see one folder form a node. The file `node` in it has a name that the first rank has drawn: machines that
/// share a folder read the same one, and are refused. Slices do not refer to it. Where there is no name, and none can
/// be written, or `node` is damaged, the folder's place in its machine stands for it: its slices are read, and whether
/// machines share it is not known.

/// A rank's view of its folder for snapshots.
struct FolderName {
  std::string name;    ///< equal for all who see the same folder; empty: it has none
  std::string place;   ///< device and inode: equal for all of a machine who see the same folder; not empty
  std::string reason;  ///< why the folder has no name
};

/// @return the name; empty: there is none @throws ConfigError if the file cannot be read or is damaged
std::string read_folder_name(std::filesystem::path const& path);

/// Reads the name of a folder, or gives it one.
/// @throws ResourceError if the folder cannot be looked at
FolderName name_of_folder(std::filesystem::path const& folder);

/// The division of ranks into nodes.
class Nodes {
 public:
  /// @param of  the node of each rank; nodes are numbered by their lowest ranks
  explicit Nodes(std::vector<int> of);

  int count() const { return count_; }
  int of(int rank) const { return of_[static_cast<std::size_t>(rank)]; }
  /// Ranks of a node, ascending.
  std::vector<int> ranks(int node) const;

 private:
  std::vector<int> of_;
  int count_ = 0;
};

/// Answer of rank 0: the node of each rank, as runs_text(), or "!" and an error.
/// @param texts  "=NAME PLACE BOOT REASON": a FolderName, "-" for none, and the machine; or "!" and an error
/// @param notes  gets a line for each folder without a name
std::string nodes_in(std::vector<std::string> const& texts, std::vector<std::string>& notes);

/// Makes the folder for snapshots, and finds the ranks that share it. Where files cannot be written, that is noted: see
/// [Note: Names of folders].
/// @param notes  rank 0: gets a line for each folder without a name; nullptr: nobody wants them
/// @throws ConfigError on every rank if one cannot have its folder, or machines share one
/// @note Collective: yes; rank 0 receives some 80 characters of every rank, and answers with as much for each node.
template <class C>
Nodes find_nodes(C& world, SnapshotPlace const& place, std::vector<std::string>* notes = nullptr) {
  std::string mine;
  try {
    if (place.folder.empty()) fail<ConfigError>("expected a folder for snapshots, got an empty path");
    make_private_folder(place.folder);
    try {
      make_private_folder(run_folder(place));
    } catch (ResourceError const&) {  // snapshots fail until it can be made, and say so
    }
    auto const name = name_of_folder(place.folder);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    mine = formatted("={} {} {} {}", name.name.empty() ? "-" : name.name, name.place, boot.empty() ? host_name() : boot,
                     name.reason);
  } catch (std::exception const& error) {
    mine = std::string("!") + error.what();
  }
  std::vector<std::string> said;
  auto const answer =
      comm::ask_first_rank(world, mine, "nodes of snapshots", [&](std::vector<std::string> const& texts) {
        said.clear();
        return nodes_in(texts, said);
      });
  if (answer[0] == '!') fail<ConfigError>("snapshots: {}", answer.substr(1));
  if (notes != nullptr && world.rank() == 0) notes->insert(notes->end(), said.begin(), said.end());
  return Nodes(parse_runs(answer));
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::string runs_text(std::vector<int> const& values) {
  std::string text;
  for (std::size_t begin = 0; begin < values.size();) {
    std::size_t end = begin + 1;
    int const by = end < values.size() && values[end] == values[begin] + 1 ? 1 : 0;
    while (end < values.size() && values[end] == values[end - 1] + by) ++end;
    text += formatted("{}:{}:{} ", end - begin, values[begin], by);
    begin = end;
  }
  return text;
}

FSDP_BODY std::vector<int> parse_runs(std::string const& text) {
  std::vector<int> values;
  std::istringstream words(text);
  std::size_t count = 0;
  int value = 0, by = 0;
  for (char colon = 0; words >> count >> colon >> value >> colon >> by;)
    for (std::size_t i = 0; i < count; ++i, value += by) values.push_back(value);
  return values;
}

FSDP_BODY std::string united_runs(std::vector<std::string> const& texts) {
  std::set<int> all;
  for (auto const& text : texts)
    for (auto const value : parse_runs(text)) all.insert(value);
  return runs_text({all.begin(), all.end()});
}

FSDP_BODY std::string drawn_id() {
  std::random_device device;
  return formatted("{:08x}{:08x}", device(), device());
}

FSDP_BODY std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

FSDP_BODY std::string read_folder_name(std::filesystem::path const& path) {
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, error))) return {};
  constexpr std::string_view remedy = "remove it, and the next start writes another one";
  std::string name;
  try {
    name = read_text_file(path, 16);
  } catch (ConfigError const& wrong) {
    fail<ConfigError>("{}; {}", wrong.what(), remedy);
  }
  if (name.size() != 16 || name.find_first_not_of("0123456789abcdef") != std::string::npos)
    fail<ConfigError>("'{}' is damaged: expected 16 hexadecimal digits; {}", path.string(), remedy);
  return name;
}

FSDP_BODY FolderName name_of_folder(std::filesystem::path const& folder) {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) detail::throw_file_error(folder, "inspected", errno);
  FolderName result;
  result.place = formatted("{:x}:{:x}", status.st_dev, status.st_ino);
  auto const path = folder / "node";
  auto const mine = drawn_id();
  auto const temporary = folder / ("node." + mine);
  try {
    result.name = read_folder_name(path);
    if (!result.name.empty()) return result;
    OutputFile file(temporary, 0600);
    file.write(mine);
    file.finish();
    if (::link(temporary.c_str(), path.c_str()) != 0 && errno != EEXIST)  // the first one stays
      detail::throw_file_error(path, "made", errno);
  } catch (Error const& error) {
    result.reason = error.what();
    if (auto const at = result.reason.find("." + mine); at != std::string::npos)
      result.reason.erase(at, mine.size() + 1);  // equal at the next attempt, so that it is said once
  }
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);
  try {
    result.name = read_folder_name(path);  // another rank may have had the last bytes
    if (!result.name.empty()) result.reason.clear();
  } catch (ConfigError const& error) {
    result.reason = error.what();
  }
  return result;
}

FSDP_BODY std::string nodes_in(std::vector<std::string> const& texts, std::vector<std::string>& notes) {
  struct Word {
    std::string name, place, boot, reason;
  };
  std::vector<Word> words;
  std::map<std::string, std::string> named;  // by place and machine
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] == '!') return formatted("!rank {}: {}", rank, texts[rank].substr(1));
    Word word;
    std::istringstream text(texts[rank].substr(1));
    text >> word.name >> word.place >> word.boot >> std::ws;
    std::getline(text, word.reason, '\0');
    word.place += " " + word.boot;
    if (word.name != "-") named.try_emplace(word.place, word.name);
    words.push_back(std::move(word));
  }
  std::map<std::string, std::pair<int, std::size_t>> nodes;  // by folder: number, lowest rank
  std::vector<int> of;
  for (std::size_t rank = 0; rank < words.size(); ++rank) {
    auto const& word = words[rank];
    auto const other = named.find(word.place);
    auto const folder = word.name != "-" ? word.name : other != named.end() ? other->second : word.place;
    auto const [found, is_new] = nodes.try_emplace(folder, static_cast<int>(nodes.size()), rank);
    auto const [node, first] = found->second;
    if (word.boot != words[first].boot)
      return formatted(
          "!ranks {} and {} are on different machines and see the same folder for snapshots; give a folder in the "
          "memory of each machine, such as /dev/shm/NAME",
          first, rank);
    if (is_new && !word.reason.empty())
      notes.push_back(formatted("rank {}: the folder for snapshots has no name: {}", rank, word.reason));
    of.push_back(node);
  }
  return runs_text(of);
}

FSDP_BODY Nodes::Nodes(std::vector<int> of) : of_(std::move(of)) {
  for (auto const node : of_) count_ = std::max(count_, node + 1);
}

FSDP_BODY std::vector<int> Nodes::ranks(int node) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < of_.size(); ++rank)
    if (of_[rank] == node) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
