// SPDX-License-Identifier: Apache-2.0
#include "gpt2/weights_folder.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/json.hpp"
#include "fsdp/checkpoint/safetensors_file.hpp"
#include "fsdp/error.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;
using fsdp::DType;

constexpr std::string_view file_name = "model.safetensors";
constexpr std::string_view index_name = "model.safetensors.index.json";
constexpr std::string_view head_name = "lm_head.weight";
constexpr std::int64_t longest_index = 1 << 26;  // bytes

bool is_weight_type(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

}  // namespace

WeightsFolder::WeightsFolder(fs::path const& folder, GptConfig const& config, Orientation orientation)
    : WeightsSource(folder, config) {
  open_files();
  check_tensors(orientation);
}

WeightsFolder::~WeightsFolder() = default;

void WeightsFolder::open_files() {
  std::error_code error;
  std::map<std::string, std::string> index;
  if (fs::exists(path() / file_name, error)) {
    names_.emplace_back(file_name);
  } else if (fs::exists(path() / index_name, error)) {
    index = read_index(path() / index_name);
    for (auto const& [tensor, file] : index)
      if (std::find(names_.begin(), names_.end(), file) == names_.end()) names_.push_back(file);
  } else {
    fsdp::fail<fsdp::ConfigError>("'{}' has no weights: expected {} or {}{}", path().string(), file_name, index_name,
                                  fs::exists(path() / "pytorch_model.bin", error)
                                      ? " (pytorch_model.bin is a pickle and is not read; write safetensors with "
                                        "save_pretrained(..., safe_serialization=True))"
                                      : "");
  }
  for (auto const& name : names_) files_.push_back(std::make_unique<File>(path() / name));
  find_tensors(index);
}

/// Which file has which tensor, by their names.
std::map<std::string, std::string> WeightsFolder::read_index(fs::path const& path) const {
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const json = fsdp::checkpoint::parse_object(fsdp::checkpoint::read_text_file(path, longest_index), what);
  std::map<std::string, std::string> index;
  for (auto const& item : fsdp::checkpoint::Fields(json, what).object("weight_map").items()) {
    auto const name = item.value().is_string() ? item.value().get<std::string>() : std::string();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos)
      fsdp::fail<fsdp::ConfigError>(
          "{}: tensor '{}': expected the name of a file in the same folder, got {}", what, item.key(),
          item.value().dump(-1, ' ', false, fsdp::checkpoint::Json::error_handler_t::replace));
    index.emplace(item.key(), name);
  }
  if (index.empty()) fsdp::fail<fsdp::ConfigError>("{}: 'weight_map' names no tensor", what);
  return index;
}

void WeightsFolder::find_tensors(std::map<std::string, std::string> const& index) {
  auto const where = [&](std::size_t file) { return (path() / names_[file]).string(); };
  auto listed = index;  // what is left has not been found
  for (std::size_t file = 0; file < files_.size(); ++file) {
    auto const note = [&](std::string const& theirs) {  // its name with us
      if (!index.empty()) {
        auto const found = listed.find(theirs);
        if (found == listed.end() || found->second != names_[file])
          fsdp::fail<fsdp::ConfigError>("'{}' has a tensor '{}' that {} does not list", where(file), theirs,
                                        index_name);
        listed.erase(found);
      }
      return our_name(theirs);
    };
    for (auto const& other : files_[file]->other_types())
      if (!note(other.first).empty())
        static_cast<void>(files_[file]->entry(other.first));  // throws: no weight has such a type
    for (auto const& entry : files_[file]->entries()) {
      auto const ours = note(entry.name);
      if (ours.empty()) continue;
      auto const [place, fresh] = places_.try_emplace(ours, Place{file, entry.name});
      if (!fresh)
        fsdp::fail<fsdp::ConfigError>("'{}': '{}' and '{}' name the same tensor of the model; expected one of them",
                                      path().string(), place->second.name, entry.name);
    }
  }
  if (!listed.empty())
    fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}' is missing, though {} lists it",
                                  (path() / listed.begin()->second).string(), listed.begin()->first, index_name);
}

void WeightsFolder::check_tensors(Orientation orientation) {
  // Without wte the head's matrix is it: they are tied.
  auto const head = places_.find(head_name);
  bool const both = head != places_.end() && places_.contains(token_table);
  if (head != places_.end() && !both) places_.emplace(token_table, head->second);
  for (auto& tensor : gpt_tensors(config())) {
    auto const found = places_.find(tensor.name);
    if (found == places_.end())
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}' is missing",
                                    (names_.size() == 1 ? path() / names_[0] : path()).string(), tensor.name);
    if (orientation == Orientation::out_in) tensor.transposed = false;
    auto const& place = found->second;
    auto const& entry = files_[place.file]->entry(place.name);
    auto const file = (path() / names_[place.file]).string();
    if (entry.shape != tensor.conv1d_shape())
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}': expected shape ({}) by config.json, got ({})", file, place.name,
                                    fsdp::listed(tensor.conv1d_shape()), fsdp::listed(entry.shape));
    if (!is_weight_type(entry.dtype))
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}': expected dtype F32, BF16 or F16, got {}", file, place.name,
                                    fsdp::checkpoint::detail::format_name(entry.dtype));
    auto name = tensor.name;
    tensors_.emplace(std::move(name), Stored{std::move(tensor), place});
  }
  for (auto const& [name, place] : places_)
    if (!tensors_.contains(name) && name != head_name)
      fsdp::fail<fsdp::ConfigError>("'{}' has a tensor '{}' that the model of config.json does not have",
                                    (path() / names_[place.file]).string(), place.name);
  if (both) expect_tied(head->second);
  places_.clear();
}

void WeightsFolder::expect_tied(Place const& head) const {
  auto const& table = tensors_.find(token_table)->second;
  auto const& shape = table.tensor.shape;
  auto const count = table.tensor.numel();
  constexpr std::int64_t most = 1 << 16;
  std::vector<float> one(static_cast<std::size_t>(std::min(count, most))), other(one.size());
  for (std::int64_t first = 0; first < count; first += most) {
    auto const size = static_cast<std::size_t>(std::min(most, count - first));
    files_[table.place.file]->read(table.place.name, shape, first, std::span(one).first(size));
    files_[head.file]->read(head.name, shape, first, std::span(other).first(size));
    if (std::memcmp(one.data(), other.data(), size * sizeof(float)) != 0)
      fsdp::fail<fsdp::ConfigError>(
          "'{}': '{}' differs from '{}': nanogpt supports tied embeddings only; this model has a separate lm_head",
          path().string(), head.name, table.place.name);
  }
}

void WeightsFolder::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  auto const found = tensors_.find(name);
  FSDP_EXPECTS(found != tensors_.end(), "'{}': there is no tensor '{}'", path().string(), name);
  auto const& stored = found->second;
  if (stored.tensor.transposed) return read_transposed(stored, first, out);
  files_[stored.place.file]->read(stored.place.name, stored.tensor.shape, first, out);
}

void WeightsFolder::read_transposed(Stored const& stored, std::int64_t first, std::span<float> out) const {
  if (out.empty()) return;
  constexpr std::int64_t band = 64, widest = 1024;
  auto const& file = *files_[stored.place.file];
  auto const shape = stored.tensor.conv1d_shape();
  auto const in = shape[0], rows = shape[1];  // of ours: `rows` of `in` elements
  auto const end = first + static_cast<std::int64_t>(out.size());
  FSDP_EXPECTS(first >= 0 && end <= in * rows, "'{}': elements {} to {} are read of tensor '{}', which has {}",
               path().string(), first, end, stored.tensor.name, in * rows);
  auto const end_row = (end - 1) / in + 1;
  for (auto row = first / in; row < end_row; row += widest) {
    auto const count = std::min(widest, end_row - row);
    auto const stride = count + 16;  // a power of two would make a column's lines share a set of the cache
    std::vector<float> block(static_cast<std::size_t>(band * stride));
    for (std::int64_t column = 0; column < in; column += band) {
      auto const height = std::min(band, in - column);
      for (std::int64_t i = 0; i < height; ++i)
        file.read(stored.place.name, shape, (column + i) * rows + row,
                  std::span(block).subspan(static_cast<std::size_t>(i * stride), static_cast<std::size_t>(count)));
      for (std::int64_t r = 0; r < count; ++r) {
        auto const begin = (row + r) * in + column;  // of our elements, the block's in this row
        auto const from = std::max(begin, first), to = std::min(begin + height, end);
        for (auto at = from; at < to; ++at)
          out[static_cast<std::size_t>(at - first)] = block[static_cast<std::size_t>((at - begin) * stride + r)];
      }
    }
  }
}

}  // namespace nanogpt
