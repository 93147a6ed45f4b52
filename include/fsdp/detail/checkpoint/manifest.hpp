// SPDX-License-Identifier: Apache-2.0
// The manifest of a sharded checkpoint: its tensors and arrays, the file of each slice, and a checksum (XXH64) of
// each block, so that a reader checks only the blocks that it reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/safetensors.hpp"
#include "fsdp/tensor.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

/// XXH64 with the seed 0.
std::uint64_t checksum_of(std::span<std::byte const> bytes);
inline std::uint64_t checksum_of(std::string_view text) { return checksum_of(std::as_bytes(std::span(text))); }

/// A checksum as written in files: 16 hexadecimal digits.
inline std::string checksum_text(std::uint64_t checksum) { return formatted("{:016x}", checksum); }

/// Bytes that one checksum covers: a slice's last block may be shorter.
inline constexpr std::int64_t block_bytes = std::int64_t{1} << 20;

constexpr std::int64_t block_count(std::int64_t bytes) { return (bytes + block_bytes - 1) / block_bytes; }

inline constexpr std::string_view manifest_name = "checkpoint.json";
inline constexpr std::string_view parameters_array = "parameters";  ///< the array of the master weights

/// An array with one value for each element of each tensor: the parameters, or a moment of an optimizer.
struct ArrayEntry {
  std::string name;
  DType dtype = DType::f32;

  friend bool operator==(ArrayEntry const&, ArrayEntry const&) = default;
};

/// A run of one tensor's elements in one array, in one rank's file.
struct Slice {
  std::string array, tensor;
  DType dtype = DType::f32;
  std::int64_t first = 0, count = 0;     ///< elements of the tensor
  std::int64_t offset = 0;               ///< of the slice's first byte in the file
  std::vector<std::uint64_t> checksums;  ///< one for each block of block_bytes

  std::int64_t bytes() const { return count * static_cast<std::int64_t>(size_of(dtype)); }
  /// The tensor's name in the file: that of parameters is the tensor's own.
  std::string key() const { return array == parameters_array ? tensor : array + "/" + tensor; }
};

/// @throws ConfigError if a file could not tell the tensors apart, or a name is not UTF-8
void expect_nameable(std::vector<TensorInfo> const& tensors, std::vector<ArrayEntry> const& arrays);

/// The file of one rank. It lies beside its description, `name` + ".json".
struct RankFile {
  std::string name;
  std::int64_t bytes = 0;
  std::int64_t header_bytes = 0;  ///< before the first slice
  std::uint64_t header_checksum = 0;
  std::vector<Slice> slices;  ///< end to end behind the header
};

/// An optimizer, or another part of a run's state.
struct StateEntry {
  std::string name;
  std::int64_t steps = 0;              ///< steps taken
  std::vector<std::string> arrays{};   ///< names of its arrays
  std::vector<std::string> tensors{};  ///< the tensors that have elements in these arrays
};

/// The manifest: written last, so that a folder with a manifest is a complete checkpoint.
struct Manifest {
  std::int64_t step = 0;
  std::int64_t save_number = 0;  ///< among the saves into its folder, from 1; 0: not known
  int world_size = 1;
  std::string strategy;             ///< strategy of the engine that saved, for people
  std::vector<TensorInfo> tensors;  ///< names and shapes, in declared order
  std::vector<ArrayEntry> arrays;   ///< the parameters first
  std::vector<std::string> frozen;  ///< names of tensors without optimizer state
  bool without_frozen = false;      ///< the parameters of these are not there either
  /// type of a tensor's parameters, where it is not the array's
  std::map<std::string, DType> types;
  std::vector<StateEntry> parts;                             ///< the optimizer, or several
  std::int64_t steps_taken = 0;                              ///< by the first optimizer
  std::vector<std::pair<std::string, std::uint64_t>> files;  ///< each rank's file: name, checksum of its description
  Json extra;                                                ///< the user's
};

std::string rank_file_name(int rank, int ranks);

/// The name of the file that describes a rank file. It appears when both are complete and on the disk.
inline std::string description_name(std::string const& file) { return file + ".json"; }

DType dtype_named(std::string_view text, Fields const& fields, char const* field);

std::string to_json_text(RankFile const& file);

/// @throws ConfigError if a field is missing or malformed
RankFile parse_rank_file(std::string_view text, std::string_view what);

/// Format 1: one optimizer, or none, with state for every tensor that is not frozen. Format 2 lists several, and the
/// tensors of each. Format 3: as format 2, without the parameters of frozen tensors.
bool has_one_optimizer(Manifest const& manifest);

std::string to_json_text(Manifest const& manifest);

/// @pre tensors, arrays and frozen tensors are there
void parse_parts(Manifest& manifest, Fields const& fields, bool one, std::string_view what);

void expect_file_of_each_rank(Manifest const& manifest, Fields const& fields);

/// @throws ConfigError if a field is missing or malformed, or the checksum differs
Manifest parse_manifest(std::string_view text, std::string_view what);

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_CHECKPOINT_BODIES

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

FSDP_BODY std::uint64_t checksum_of(std::span<std::byte const> bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

FSDP_BODY void expect_nameable(std::vector<TensorInfo> const& tensors, std::vector<ArrayEntry> const& arrays) {
  for (auto const& tensor : tensors) expect_writable(tensor.name, formatted("the name of tensor '{}'", tensor.name));
  std::set<std::string> keys;
  for (auto const& array : arrays) {
    for (auto const& tensor : tensors) {
      Slice slice;
      slice.array = array.name;
      slice.tensor = tensor.name;
      if (!keys.insert(slice.key()).second)
        fail<ConfigError>(
            "the checkpoint would store {} of tensor '{}' as '{}', a name that is taken; rename the tensor", array.name,
            tensor.name, slice.key());
    }
  }
}

FSDP_BODY std::string rank_file_name(int rank, int ranks) {
  return formatted("rank-{:05d}-of-{:05d}.safetensors", rank, ranks);
}

FSDP_BODY DType dtype_named(std::string_view text, Fields const& fields, char const* field) {
  for (auto const type : {DType::f32, DType::bf16, DType::f16})
    if (text == name(type)) return type;
  fields.wrong(field, "fp32, bf16 or fp16");
}

FSDP_BODY std::string to_json_text(RankFile const& file) {
  Json json{{"file", file.name},
            {"bytes", file.bytes},
            {"header_bytes", file.header_bytes},
            {"header_xxh64", checksum_text(file.header_checksum)},
            {"block_bytes", block_bytes}};
  auto slices = Json::array();
  for (auto const& slice : file.slices) {
    auto sums = Json::array();
    for (auto const sum : slice.checksums) sums.push_back(checksum_text(sum));
    slices.push_back({{"array", slice.array},
                      {"tensor", slice.tensor},
                      {"dtype", name(slice.dtype)},
                      {"first", slice.first},
                      {"count", slice.count},
                      {"xxh64", std::move(sums)}});
  }
  json["slices"] = std::move(slices);
  return json.dump(1) + "\n";
}

FSDP_BODY RankFile parse_rank_file(std::string_view text, std::string_view what) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max() / 16;
  auto const json = parse_object(text, what);
  Fields const fields(json, what);
  RankFile file;
  file.name = fields.text("file");
  if (file.name.find('/') != std::string::npos) fields.wrong("file", "a name without a folder");
  file.bytes = fields.whole("bytes", 0, most);
  constexpr auto longest = static_cast<std::int64_t>(detail::longest_header + detail::length_bytes);
  file.header_bytes = fields.whole("header_bytes", 8, longest);
  file.header_checksum = fields.checksum("header_xxh64");
  fields.whole("block_bytes", block_bytes, block_bytes);
  auto offset = file.header_bytes;
  for (auto const& item : fields.array("slices")) {
    Fields const each(item, what);
    Slice slice;
    slice.array = each.text("array");
    slice.tensor = each.text("tensor");
    slice.dtype = dtype_named(each.text("dtype"), each, "dtype");
    slice.first = each.whole("first", 0, largest_numel);
    slice.count = each.whole("count", 0, largest_numel);
    slice.offset = offset;
    for (auto const& sum : each.array("xxh64"))
      slice.checksums.push_back(each.checksum_from(sum.is_string() ? sum.get<std::string>() : "", "xxh64"));
    if (static_cast<std::int64_t>(slice.checksums.size()) != block_count(slice.bytes()))
      each.wrong("xxh64", formatted("{} checksums, one for each MiB", block_count(slice.bytes())));
    if (__builtin_add_overflow(offset, slice.bytes(), &offset))
      each.wrong("count", "a number of elements that fits into a file");
    file.slices.push_back(std::move(slice));
  }
  if (offset != file.bytes) fields.wrong("bytes", formatted("{}, the size of the header and all slices", offset));
  return file;
}

FSDP_BODY bool has_one_optimizer(Manifest const& manifest) {
  return manifest.parts.empty() ||
         (manifest.parts.size() == 1 &&
          manifest.parts[0].tensors.size() + manifest.frozen.size() == manifest.tensors.size());
}

FSDP_BODY std::string to_json_text(Manifest const& manifest) {
  bool const several = manifest.without_frozen || !has_one_optimizer(manifest);
  int const version = manifest.without_frozen ? 3 : several ? 2 : 1;
  Json json{{"format", "fsdp sharded checkpoint"},
            {"version", version},
            {"step", manifest.step},
            {"save_number", manifest.save_number},
            {"world_size", manifest.world_size},
            {"strategy", manifest.strategy}};
  auto tensors = Json::array(), arrays = Json::array(), files = Json::array();
  for (auto const& tensor : manifest.tensors) {
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}});
    auto const type = manifest.types.find(tensor.name);
    if (type != manifest.types.end()) tensors.back()["dtype"] = name(type->second);
  }
  for (auto const& array : manifest.arrays) arrays.push_back({{"name", array.name}, {"dtype", name(array.dtype)}});
  for (auto const& [file, checksum] : manifest.files)
    files.push_back({{"name", file}, {"description_xxh64", checksum_text(checksum)}});
  json["tensors"] = std::move(tensors);
  json["arrays"] = std::move(arrays);
  if (!manifest.frozen.empty()) json["frozen"] = manifest.frozen;
  if (several) {
    auto parts = Json::array();
    for (auto const& part : manifest.parts)
      parts.push_back({{"name", part.name}, {"steps", part.steps}, {"arrays", part.arrays}, {"tensors", part.tensors}});
    json["optimizers"] = std::move(parts);
  } else {
    json["optimizer"] = {{"name", manifest.parts.empty() ? "" : manifest.parts[0].name},
                         {"steps", manifest.steps_taken}};
  }
  json["files"] = std::move(files);
  json["extra"] = manifest.extra;
  json["xxh64"] = checksum_text(checksum_of(json.dump()));
  return json.dump(1) + "\n";
}

FSDP_BODY void parse_parts(Manifest& manifest, Fields const& fields, bool one, std::string_view what) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max() / 2;
  if (one) {
    Fields const optimizer(fields.object("optimizer"), what);
    StateEntry part{optimizer.text("name"), optimizer.whole("steps", 0, most), {}, {}};
    manifest.steps_taken = part.steps;
    if (part.name.empty()) return;
    for (std::size_t i = 1; i < manifest.arrays.size(); ++i) part.arrays.push_back(manifest.arrays[i].name);
    std::set<std::string_view> const frozen(manifest.frozen.begin(), manifest.frozen.end());
    for (auto const& tensor : manifest.tensors)
      if (!frozen.contains(tensor.name)) part.tensors.push_back(tensor.name);
    manifest.parts.push_back(std::move(part));
    return;
  }
  for (auto const& item : fields.array("optimizers")) {
    Fields const each(item, what);
    StateEntry part{each.text("name"), each.whole("steps", 0, most), {}, {}};
    auto const names = [&](char const* field, std::vector<std::string>& to) {
      for (auto const& name : each.array(field)) {
        if (!name.is_string()) each.wrong(field, "names");
        to.push_back(name.get<std::string>());
      }
    };
    names("arrays", part.arrays);
    names("tensors", part.tensors);
    manifest.parts.push_back(std::move(part));
  }
  if (!manifest.parts.empty()) manifest.steps_taken = manifest.parts[0].steps;
}

FSDP_BODY void expect_file_of_each_rank(Manifest const& manifest, Fields const& fields) {
  std::set<std::string_view> names;
  for (auto const& file : manifest.files) names.insert(file.first);
  if (manifest.files.size() != static_cast<std::size_t>(manifest.world_size) || names.size() != manifest.files.size())
    fields.wrong("files", formatted("one entry for each of {} ranks", manifest.world_size));
}

FSDP_BODY Manifest parse_manifest(std::string_view text, std::string_view what) {
  auto json = parse_object(text, what);
  Fields const fields(json, what);
  if (fields.text("format") != "fsdp sharded checkpoint") fields.wrong("format", "\"fsdp sharded checkpoint\"");
  auto const version = fields.whole("version", 1, 1'000'000);
  if (version > 3)
    fail<ConfigError>("{} was written by a newer fsdp (format {}; this one reads 1 to 3)", what, version);
  auto const checksum = fields.checksum("xxh64");
  json.erase("xxh64");
  if (checksum_of(json.dump(-1, ' ', false, Json::error_handler_t::replace)) != checksum)
    fail<ConfigError>("{} is damaged: checksum mismatch", what);

  Manifest manifest;
  manifest.step = fields.whole("step", 0, std::numeric_limits<std::int64_t>::max());
  if (json.contains("save_number"))  // earlier versions do not write it
    manifest.save_number = fields.whole("save_number", 0, std::numeric_limits<std::int64_t>::max() / 2);
  manifest.world_size = static_cast<int>(fields.whole("world_size", 1, 1 << 24));
  manifest.strategy = fields.text("strategy");
  for (auto const& item : fields.array("tensors")) {
    Fields const each(item, what);
    TensorInfo tensor;
    tensor.name = each.text("name");
    for (auto const& extent : each.array("shape")) {
      if (!extent.is_number_unsigned() || extent.get<std::uint64_t>() > std::uint64_t{largest_numel})
        each.wrong("shape", "whole numbers");
      tensor.shape.push_back(extent.get<std::int64_t>());
    }
    tensor.numel = 1;
    for (auto const extent : tensor.shape)
      if (__builtin_mul_overflow(tensor.numel, extent, &tensor.numel) || tensor.numel > largest_numel)
        each.wrong("shape", "a shape with fewer elements");
    if (item.contains("dtype")) manifest.types[tensor.name] = dtype_named(each.text("dtype"), each, "dtype");
    manifest.tensors.push_back(std::move(tensor));
  }
  for (auto const& item : fields.array("arrays")) {
    Fields const each(item, what);
    manifest.arrays.push_back({each.text("name"), dtype_named(each.text("dtype"), each, "dtype")});
  }
  if (manifest.arrays.empty() || manifest.arrays.front().name != parameters_array)
    fields.wrong("arrays", "the parameters as its first entry");
  if (json.contains("frozen")) {  // no tensor is, where it is missing
    for (auto const& item : fields.array("frozen")) {
      if (!item.is_string()) fields.wrong("frozen", "names of tensors");
      manifest.frozen.push_back(item.get<std::string>());
    }
  }
  manifest.without_frozen = version == 3;
  parse_parts(manifest, fields, version == 1, what);
  for (auto const& item : fields.array("files")) {
    Fields const each(item, what);
    auto name = each.text("name");
    if (name.find('/') != std::string::npos) each.wrong("name", "a name without a folder");
    manifest.files.emplace_back(std::move(name), each.checksum("description_xxh64"));
    if (manifest.files.size() > static_cast<std::size_t>(manifest.world_size)) break;
  }
  expect_file_of_each_rank(manifest, fields);
  manifest.extra = fields.at("extra");
  return manifest;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
