// SPDX-License-Identifier: Apache-2.0
// Files of snapshots in a node's memory: where they lie (SnapshotPlace), their folders, their headers, and checks that
// they are complete; and the messages that ranks exchange when a snapshot begins.
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

#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/detail/checkpoint/rank_files.hpp"
#include "fsdp/detail/checkpoint/training_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// A rank's message about the last snapshot, and rank 0's answer.
struct SnapshotWord {
  char state =
      '=';  ///< '=' written, '~' being written, '!' failed, 'M' no memory for the next one, 'C' `extra` is no JSON
  std::string id;    ///< random id of this rank
  std::string what;  ///< is to be saved
  std::string error;

  std::string text() const { return formatted("{}{}{:016x}{}", state, id, checksum_of(what), error); }
  static constexpr std::size_t id_at = 1, what_at = 17, error_at = 33;
};

/// Answers with a state and rank 0's id, then a warning: '=' or '!' the snapshot begins, and the one before is whole or
/// not; '~' or 'M' it does not begin; 'C' and 'X' are errors.
std::string answer_to_words(std::vector<std::string> const& words);

/// A member's slices, as text for the rank that keeps a copy. @param manifest  see SnapshotHeader
std::string slices_text(std::vector<Slice> const& slices, std::string const& node, std::string_view manifest);
struct MemberSlices {
  std::vector<Slice> slices;
  std::string node, manifest;
  std::int64_t bytes = 0;
};
MemberSlices parse_slices(std::string const& text);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

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

std::string to_json_text(SnapshotHeader const& header);

/// @throws ConfigError if a field is missing or malformed, or the checksum differs
SnapshotHeader parse_snapshot_header(std::string_view text, std::string_view what);

/// Checksum of the shapes and types of a run's state: runs with equal checksums can load each other's state.
std::string model_checksum(Manifest const& manifest);

/// Makes a folder that its owner alone may enter, or checks that it is one. The folder above it is there.
/// @throws ConfigError if it belongs to another user, others may enter it, or it is no folder; ResourceError if it
/// cannot be made
void make_private_folder(std::filesystem::path const& folder);

/// The folder of a run's snapshots.
std::filesystem::path run_folder(SnapshotPlace const& place);
/// The folder of one snapshot.
std::filesystem::path step_folder(SnapshotPlace const& place, std::int64_t step, std::string_view id);

/// Removes one rank's slices. Files that are not there are no error, and neither are others.
void remove_slices(std::filesystem::path const& folder, std::string const& file) noexcept;

/// Writes one rank's slices from host memory, their header last.
/// @param slices  end to end in `bytes`
/// @throws ResourceError; then nothing is left of them
void write_slices(std::filesystem::path const& folder, SnapshotHeader header, std::vector<Slice> const& slices,
                  std::byte const* bytes);

/// The header of a rank's slices. @throws ConfigError
SnapshotHeader read_header(std::filesystem::path const& path);

/// Reads all slices of a rank, and compares their checksums.
/// @param path  of their header
/// @throws ConfigError if they are cut or altered
void expect_whole_slices(std::filesystem::path const& path, SnapshotHeader const& header);

/// Headers in a run's folder, in the order of their paths. None where the folder is not there.
std::vector<std::filesystem::path> headers_in(std::filesystem::path const& run_folder);

}  // namespace checkpoint
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::string answer_to_words(std::vector<std::string> const& words) {
  using W = SnapshotWord;
  auto const id = words[0].substr(W::id_at, 16);
  auto const find = [&](char state) -> std::string {
    for (std::size_t rank = 0; rank < words.size(); ++rank)
      if (words[rank][0] == state) return formatted("rank {}: {}", rank, words[rank].substr(W::error_at));
    return {};
  };
  for (std::size_t rank = 1; rank < words.size(); ++rank)
    if (words[rank].compare(W::what_at, 16, words[0], W::what_at, 16) != 0)
      return "X" + id + formatted("rank {} takes a snapshot of another step or state than rank 0", rank);
  if (auto const wrong = find('C'); !wrong.empty()) return "C" + id + wrong;
  if (auto const busy = find('~'); !busy.empty()) return "~" + id + "the one before is still being written";
  if (auto const memory = find('M'); !memory.empty()) return "M" + id + memory;
  if (auto const failed = find('!'); !failed.empty()) return "!" + id + failed;
  return "=" + id;
}

FSDP_BODY std::string slices_text(std::vector<Slice> const& slices, std::string const& node,
                                  std::string_view manifest) {
  auto list = Json::array();
  for (auto const& slice : slices)
    list.push_back({slice.array, slice.tensor, name(slice.dtype), slice.first, slice.count});
  return Json{{"node", node}, {"slices", std::move(list)}, {"manifest", manifest}}.dump();
}

FSDP_BODY MemberSlices parse_slices(std::string const& text) {
  constexpr char const* what = "a snapshot's slices";
  auto const json = parse_object(text, what);
  Fields const fields(json, what);
  MemberSlices member{{}, fields.text("node"), fields.text("manifest"), 0};
  for (auto const& item : fields.array("slices")) {
    Slice slice;
    slice.array = item.at(0).get<std::string>();
    slice.tensor = item.at(1).get<std::string>();
    for (auto const type : {DType::f32, DType::bf16, DType::f16})
      if (item.at(2).get<std::string>() == name(type)) slice.dtype = type;
    slice.first = item.at(3).get<std::int64_t>();
    slice.count = item.at(4).get<std::int64_t>();
    member.bytes += slice.bytes();
    member.slices.push_back(std::move(slice));
  }
  return member;
}

FSDP_BODY std::string to_json_text(SnapshotHeader const& header) {
  Json json{{"format", "fsdp snapshot"}, {"version", 1},          {"run", header.run},          {"build", header.build},
            {"model", header.model},     {"id", header.id},       {"step", header.step},        {"ranks", header.ranks},
            {"rank", header.rank},       {"nodes", header.nodes}, {"manifest", header.manifest}};
  json["description_xxh64"] = checksum_text(header.description_checksum);
  json["xxh64"] = checksum_text(checksum_of(json.dump()));
  return json.dump(1) + "\n";
}

FSDP_BODY SnapshotHeader parse_snapshot_header(std::string_view text, std::string_view what) {
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

FSDP_BODY std::string model_checksum(Manifest const& manifest) {
  std::string text;
  for (auto const& tensor : manifest.tensors) text += formatted("{} ({})\n", tensor.name, listed(tensor.shape));
  for (auto const& array : manifest.arrays) text += formatted("{} {}\n", array.name, name(array.dtype));
  for (auto const& [tensor, type] : manifest.types) text += formatted("{} {}\n", tensor, name(type));
  for (auto const& tensor : manifest.frozen) text += formatted("{} {}\n", tensor, manifest.without_frozen);
  return checksum_text(checksum_of(text));
}

FSDP_BODY void make_private_folder(std::filesystem::path const& folder) {
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

FSDP_BODY std::filesystem::path run_folder(SnapshotPlace const& place) {
  return place.folder / ("run-" + checksum_text(checksum_of(place.run)));
}

FSDP_BODY std::filesystem::path step_folder(SnapshotPlace const& place, std::int64_t step, std::string_view id) {
  return run_folder(place) / formatted("step-{}.{}", step, id);
}

FSDP_BODY void remove_slices(std::filesystem::path const& folder, std::string const& file) noexcept {
  std::error_code ignored;
  for (auto const& name : {header_name(file), description_name(file), description_name(file) + ".tmp", file})
    std::filesystem::remove(folder / name, ignored);
}

FSDP_BODY void write_slices(std::filesystem::path const& folder, SnapshotHeader header,
                            std::vector<Slice> const& slices, std::byte const* bytes) {
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

FSDP_BODY SnapshotHeader read_header(std::filesystem::path const& path) {
  return parse_snapshot_header(read_text_file(path), formatted("'{}'", path.string()));
}

FSDP_BODY void expect_whole_slices(std::filesystem::path const& path, SnapshotHeader const& header) {
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

FSDP_BODY std::vector<std::filesystem::path> headers_in(std::filesystem::path const& run_folder) {
  namespace fs = std::filesystem;
  std::vector<fs::path> headers;
  std::error_code error;
  for (fs::directory_iterator step(run_folder, error), end; !error && step != end; step.increment(error))
    for (fs::directory_iterator file(step->path(), error), none; !error && file != none; file.increment(error))
      if (file->path().filename().string().ends_with(header_ending)) headers.push_back(file->path());
  std::sort(headers.begin(), headers.end());
  return headers;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
