// SPDX-License-Identifier: Apache-2.0
// Files of snapshots in a node's memory: their folders, their headers, and checks that they are complete.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/hash.hpp"
#include "fsdp/checkpoint/host_copy.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/rank_file.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The folder of snapshots, and the run to which they belong.
struct SnapshotPlace {
  std::filesystem::path
      folder;           ///< in this node's memory: "/dev/shm/NAME". It is made, and only its owner may enter it
  std::string run;      ///< tells runs apart that share the folder: the path of the run's checkpoints, say
  std::string build{};  ///< of the program. Snapshots of another build are skipped
};

namespace checkpoint {

/// [Note: Files of a snapshot]
/// `folder`/run-HASH/step-N.ID/ has the files of one snapshot that this node keeps. HASH is of SnapshotPlace::run; ID
/// is drawn for each snapshot. A rank's slices are in a file as checkpoints have it, beside its description. The
/// slices' header, rank-R-of-W.snapshot.json, is written last: with it, the slices are there. The manifest, and the
/// descriptions of slices that other nodes keep, are in FoundSnapshot: looking for a snapshot writes no file of it, so
/// a folder that is full or read-only is still read.

/// Header of one rank's slices in a snapshot.
struct SnapshotHeader {
  std::string run, build;
  std::string model;  ///< checksum of the tensors and arrays
  std::string id;
  std::int64_t step = 0;
  int ranks = 1, rank = 0;         ///< ranks of the run that took it, and this rank
  std::vector<std::string> nodes;  ///< nodes that keep these slices, as "host, rank"; the second one has the copy
  std::uint64_t description_checksum = 0;
  std::string manifest;  ///< rank 0's slices: of the whole, without the checksums of files
};

inline constexpr std::string_view header_ending = ".snapshot.json";
inline std::string header_name(std::string const& file) { return file + std::string(header_ending); }

inline std::string to_json_text(SnapshotHeader const& header) {
  Json json{{"format", "fsdp snapshot"}, {"version", 1},          {"run", header.run},          {"build", header.build},
            {"model", header.model},     {"id", header.id},       {"step", header.step},        {"ranks", header.ranks},
            {"rank", header.rank},       {"nodes", header.nodes}, {"manifest", header.manifest}};
  json["description_xxh64"] = checksum_text(header.description_checksum);
  json["xxh64"] = checksum_text(checksum_of(json.dump()));
  return json.dump(1) + "\n";
}

/// @throws ConfigError if a field is missing or malformed, or the checksum differs
inline SnapshotHeader parse_snapshot_header(std::string_view text, std::string_view what) {
  auto json = parse_object(text, what);
  Fields const fields(json, what);
  if (fields.text("format") != "fsdp snapshot") fields.wrong("format", "\"fsdp snapshot\"");
  if (auto const version = fields.whole("version", 1, 1'000'000); version > 1)
    fail<ConfigError>("{} was written by a newer fsdp (format {}; this one reads 1)", what, version);
  auto const checksum = fields.checksum("xxh64");
  json.erase("xxh64");
  if (checksum_of(json.dump(-1, ' ', false, Json::error_handler_t::replace)) != checksum)
    fail<ConfigError>("{} is damaged: checksum mismatch", what);
  SnapshotHeader header;
  header.run = fields.text("run");
  header.build = fields.text("build");
  header.model = fields.text("model");
  header.id = fields.text("id");
  if (header.id.empty() || header.id.find_first_not_of("0123456789abcdef") != std::string::npos)
    fields.wrong("id", "hexadecimal digits");
  header.step = fields.whole("step", 0, std::numeric_limits<std::int64_t>::max() / 2);
  header.ranks = static_cast<int>(fields.whole("ranks", 1, 1 << 24));
  header.rank = static_cast<int>(fields.whole("rank", 0, header.ranks - 1));
  for (auto const& node : fields.array("nodes"))
    header.nodes.push_back(node.is_string() ? node.get<std::string>() : "");
  header.description_checksum = fields.checksum("description_xxh64");
  header.manifest = fields.text("manifest");
  return header;
}

/// Checksum of the shapes and types of a run's state: runs with equal checksums can load each other's state.
inline std::string model_checksum(Manifest const& manifest) {
  std::string text;
  for (auto const& tensor : manifest.tensors) text += formatted("{} ({})\n", tensor.name, listed(tensor.shape));
  for (auto const& array : manifest.arrays) text += formatted("{} {}\n", array.name, name(array.dtype));
  for (auto const& [tensor, type] : manifest.types) text += formatted("{} {}\n", tensor, name(type));
  for (auto const& tensor : manifest.frozen) text += formatted("{} {}\n", tensor, manifest.without_frozen);
  return checksum_text(checksum_of(text));
}

/// Makes a folder that its owner alone may enter, or checks that it is one. The folder above it is there.
/// @throws ConfigError if it belongs to another user, others may enter it, or it is no folder; ResourceError if it
/// cannot be made
inline void make_private_folder(std::filesystem::path const& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) detail::throw_file_error(folder, "made", errno);
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) detail::throw_file_error(folder, "inspected", errno);
  if (!S_ISDIR(status.st_mode)) fail<ConfigError>("'{}' is not a folder; snapshots need one", folder.string());
  if (status.st_uid != ::geteuid())
    fail<ConfigError>("'{}' belongs to another user; snapshots need a folder of their own, such as /dev/shm/NAME",
                      folder.string());
  if ((status.st_mode & 077) != 0)
    fail<ConfigError>("other users may enter '{}'; snapshots need a folder of their own: chmod 700, or another folder",
                      folder.string());
}

/// The folder of a run's snapshots.
inline std::filesystem::path run_folder(SnapshotPlace const& place) {
  return place.folder / ("run-" + checksum_text(checksum_of(place.run)));
}
/// The folder of one snapshot.
inline std::filesystem::path step_folder(SnapshotPlace const& place, std::int64_t step, std::string_view id) {
  return run_folder(place) / formatted("step-{}.{}", step, id);
}

/// Removes one rank's slices. Files that are not there are no error, and neither are others.
inline void remove_slices(std::filesystem::path const& folder, std::string const& file) noexcept {
  std::error_code ignored;
  for (auto const& name : {header_name(file), description_name(file), description_name(file) + ".tmp", file})
    std::filesystem::remove(folder / name, ignored);
}

/// Writes one rank's slices from host memory, their header last.
/// @param slices  end to end in `bytes`
/// @throws ResourceError; then nothing is left of them
inline void write_slices(std::filesystem::path const& folder, SnapshotHeader header, std::vector<Slice> const& slices,
                         std::byte const* bytes) {
  auto const file = rank_file_name(header.rank, header.ranks);
  try {
    auto const description = write_rank_file(folder, file, slices, blocks_of(slices, bytes), 0600);
    header.description_checksum = checksum_of(description);
    write_beside(folder / header_name(file), folder / (header_name(file) + ".tmp"), to_json_text(header), 0600);
  } catch (...) {
    remove_slices(folder, file);
    throw;
  }
}

/// The header of a rank's slices. @throws ConfigError
inline SnapshotHeader read_header(std::filesystem::path const& path) {
  return parse_snapshot_header(read_text_file(path), formatted("'{}'", path.string()));
}

/// Reads all slices of a rank, and compares their checksums.
/// @param path  of their header
/// @throws ConfigError if they are cut or altered
inline void expect_whole_slices(std::filesystem::path const& path, SnapshotHeader const& header) {
  auto const folder = folder_of(path);
  auto const file = rank_file_name(header.rank, header.ranks);
  auto const what = formatted("'{}'", (folder / description_name(file)).string());
  auto const text = read_text_file(folder / description_name(file));
  if (checksum_of(text) != header.description_checksum) fail<ConfigError>("{} is damaged: checksum mismatch", what);
  auto description = parse_rank_file(text, what);
  if (description.name != file)
    fail<ConfigError>("{} describes file '{}', expected '{}'", what, description.name, file);
  RankFileReader reader(folder, std::move(description));
  for (auto const& slice : reader.description().slices) reader.read(slice, 0, slice.count, [](auto...) {});
}

/// Headers in a run's folder, in the order of their paths. None where the folder is not there.
inline std::vector<std::filesystem::path> headers_in(std::filesystem::path const& run_folder) {
  namespace fs = std::filesystem;
  std::vector<fs::path> headers;
  std::error_code error;
  for (fs::directory_iterator step(run_folder, error), end; !error && step != end; step.increment(error))
    for (fs::directory_iterator file(step->path(), error), none; !error && file != none; file.increment(error))
      if (file->path().filename().string().ends_with(header_ending)) headers.push_back(file->path());
  std::sort(headers.begin(), headers.end());
  return headers;
}

}  // namespace checkpoint
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
