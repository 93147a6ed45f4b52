// SPDX-License-Identifier: Apache-2.0
// Any bytes, and good ones with changes, as what a checkpoint says of itself and as a safetensors file: refused by
// name, or what is said is possible.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/detail/checkpoint/folder.hpp"
#include "fsdp/detail/checkpoint/manifest.hpp"
#include "fsdp/error.hpp"
#include "fsdp/safetensors.hpp"
#include "tests/fuzz/targets/changed.hpp"

namespace {

using namespace fsdp::checkpoint;

void expect(bool holds) {
  if (!holds) std::abort();
}

std::string good_manifest(bool several = false) {
  Manifest manifest;
  manifest.step = 12;
  manifest.world_size = 2;
  manifest.tensors.resize(2);
  manifest.tensors[0].name = "a", manifest.tensors[0].shape = {2, 3};
  manifest.tensors[1].name = "b", manifest.tensors[1].shape = {};
  manifest.arrays = {{"parameters", fsdp::DType::f32}, {"exp_avg", fsdp::DType::bf16}};
  manifest.parts = {{"AdamW", 3, {"exp_avg"}, {"a", "b"}}};
  if (several) manifest.parts = {{"Sgd", 3, {}, {"a"}}, {"AdamW", 3, {"exp_avg"}, {"b"}}};
  manifest.files = {{"rank-00000-of-00002.safetensors", 1}, {"rank-00001-of-00002.safetensors", 2}};
  manifest.extra = {{"iteration", 12}};
  return to_json_text(manifest);
}
/// With the checksum that makes it believed, if it is JSON.
std::string believed(std::string const& text) {
  auto json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return text;
  json.erase("xxh64");
  auto const bytes = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  json["xxh64"] = checksum_text(checksum_of(bytes));
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}
std::string good_description() {
  RankFile file{"rank-00000-of-00001.safetensors", 120 + 24 + 8, 120, 3, {}};
  file.slices = {{"parameters", "a", fsdp::DType::f32, 0, 6, 0, {1}},
                 {"exp_avg", "b", fsdp::DType::bf16, 2, 4, 0, {2}}};
  return to_json_text(file);
}
std::string good_tensors() {
  return safetensors_header({{"a", fsdp::DType::f32, {2, 3}}, {"b", fsdp::DType::bf16, {4}}}, {{"format", "pt"}}, "x") +
         std::string(32, 'x');
}

void read_manifest(std::string const& text) {
  auto const manifest = parse_manifest(text, "it");
  expect(manifest.step >= 0 && manifest.world_size > 0 && !manifest.arrays.empty());
  for (auto const& tensor : manifest.tensors) expect(tensor.numel >= 0);
  for (auto const& [name, checksum] : manifest.files) expect(name.find('/') == std::string::npos);
}
void read_description(std::string const& text) {
  auto const file = parse_rank_file(text, "it");
  auto end = file.header_bytes;
  for (auto const& slice : file.slices) {
    expect(slice.offset == end && slice.first >= 0 && slice.count >= 0);
    expect(static_cast<std::int64_t>(slice.checksums.size()) == block_count(slice.bytes()));
    end += slice.bytes();
  }
  expect(end == file.bytes && file.name.find('/') == std::string::npos);
}
void read_tensors(std::string const& bytes) {
  static auto const path = std::filesystem::path("/dev/shm") / ("fsdp-fuzz-" + std::to_string(::getpid()));
  std::ofstream(path, std::ios::binary) << bytes;
  std::vector<float> values;
  try {
    SafetensorsFile const file(path);
    for (auto const& entry : file.entries()) {
      expect(entry.numel() >= 0 && entry.numel() <= static_cast<std::int64_t>(bytes.size()));
      if (entry.dtype == fsdp::DType::f64 || entry.dtype == fsdp::DType::i64) continue;
      values.resize(static_cast<std::size_t>(entry.numel()));
      file.read(entry.name, entry.shape, 0, values);
    }
  } catch (...) {
    std::filesystem::remove(path);
    throw;
  }
  std::filesystem::remove(path);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static auto const manifest = good_manifest(), several = good_manifest(true), description = good_description(),
                    tensors = good_tensors();
  if (size == 0) return 0;
  std::string const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  using fsdp::testing::changed;
  try {
    switch (data[0] % 8) {
      case 0: read_manifest(rest); break;
      case 1: read_manifest(believed(rest)); break;
      case 2: read_manifest(believed(changed((data[0] & 8) != 0 ? several : manifest, rest))); break;
      case 3: read_description(rest); break;
      case 4: read_description(changed(description, rest)); break;
      case 5: read_tensors(rest); break;
      case 6: read_tensors(changed(tensors, rest)); break;
      default:
        if (auto const name = CheckpointName::parse(rest)) expect(CheckpointName::parse(name->text()) == name);
    }
  } catch (fsdp::ConfigError const&) {
  }
  return 0;
}
