// SPDX-License-Identifier: Apache-2.0
#include "transformer/weights/weights_folder.hpp"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/json.hpp"
#include "fsdp/safetensors.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;
using fsdp::DType;
using Json = nlohmann::json;  // an object with a name for each tensor

constexpr std::string_view file_name = "model.safetensors";
constexpr std::string_view index_name = "model.safetensors.index.json";
constexpr std::string_view pickle_names[] = {"pytorch_model.bin", "pytorch_model.bin.index.json"};
constexpr std::int64_t longest_index = 1 << 26;  // bytes

bool is_weight_type(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }

/// A hint for a message if the folder has weights of a format that is not read; "" if it has none.
std::string hint_on_pickles(fs::path const& folder) {
  std::error_code error;
  for (auto const name : pickle_names)
    if (fs::exists(folder / name, error))
      return fsdp::formatted(
          " ({} is a pickle and is not read; write safetensors with save_pretrained(..., safe_serialization=True))",
          name);
  return {};
}

}  // namespace

WeightsFolder::WeightsFolder(fs::path const& folder, TensorList const& list) : WeightsSource(folder) {
  open_files(list);
  check_tensors(list);
}

WeightsFolder::~WeightsFolder() = default;

void WeightsFolder::open_files(TensorList const& list) {
  std::error_code error;
  std::map<std::string, std::string> index;
  if (fs::exists(path() / file_name, error)) {
    names_.emplace_back(file_name);
  } else if (fs::exists(path() / index_name, error)) {
    index = read_index(path() / index_name);
    std::set<std::string_view> seen;
    for (auto const& [tensor, file] : index)
      if (seen.insert(file).second) names_.push_back(file);
  } else {
    fsdp::fail<fsdp::ConfigError>("'{}' has no weights: expected {} or {}{}", path().string(), file_name, index_name,
                                  hint_on_pickles(path()));
  }
  for (auto const& name : names_) files_.push_back(std::make_unique<File>(path() / name));
  find_tensors(list, index);
}

/// Which file has which tensor, by their names.
std::map<std::string, std::string> WeightsFolder::read_index(fs::path const& path) const {
  auto const what = fsdp::formatted("'{}'", path.string());
  auto const json = fsdp::checkpoint::parse_object<Json>(fsdp::checkpoint::read_text_file(path, longest_index), what);
  auto const map = json.find("weight_map");
  if (map == json.end() || !map->is_object())
    fsdp::fail<fsdp::ConfigError>("{}: 'weight_map': expected an object", what);
  std::map<std::string, std::string> index;
  for (auto const& item : map->items()) {
    auto const name = item.value().is_string() ? item.value().get<std::string>() : std::string();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos)
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}': expected the name of a file in the same folder, got {}", what,
                                    item.key(), item.value().dump(-1, ' ', false, Json::error_handler_t::replace));
    index.emplace(item.key(), name);
  }
  if (index.empty()) fsdp::fail<fsdp::ConfigError>("{}: 'weight_map' names no tensor", what);
  return index;
}

void WeightsFolder::find_tensors(TensorList const& list, std::map<std::string, std::string> const& index) {
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
      return list.our_name(theirs);
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

void WeightsFolder::check_tensors(TensorList const& list) {
  std::vector<std::pair<TiedName const*, Place>> both;
  for (auto const& tied : list.tied) {
    auto const other = places_.find(tied.name);
    if (other == places_.end()) continue;
    auto const place = other->second;
    places_.erase(other);
    if (!places_.try_emplace(tied.tensor, place).second) both.emplace_back(&tied, place);
  }
  for (auto const& tensor : list.tensors) {
    auto const found = places_.find(tensor.name);
    if (found == places_.end())
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}' is missing",
                                    (names_.size() == 1 ? path() / names_[0] : path()).string(), tensor.name);
    auto const& place = found->second;
    auto const& entry = files_[place.file]->entry(place.name);
    auto const file = (path() / names_[place.file]).string();
    if (entry.shape != tensor.stored_shape())
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}': expected shape ({}) by config.json, got ({})", file, place.name,
                                    fsdp::listed(tensor.stored_shape()), fsdp::listed(entry.shape));
    if (!is_weight_type(entry.dtype))
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}': expected dtype F32, BF16 or F16, got {}", file, place.name,
                                    fsdp::checkpoint::detail::format_name(entry.dtype));
    tensors_.emplace(tensor.name, Stored{tensor, place});
  }
  for (auto const& [name, place] : places_)
    if (!tensors_.contains(name))
      fsdp::fail<fsdp::ConfigError>("'{}' has a tensor '{}' that the model of config.json does not have",
                                    (path() / names_[place.file]).string(), place.name);
  for (auto const& [tied, place] : both) expect_equal(*tied, place);
  places_.clear();
}

void WeightsFolder::expect_equal(TiedName const& tied, Place const& other) const {
  auto const& [tensor, place] = find(tied.tensor);
  auto const shape = tensor.stored_shape();
  auto const count = tensor.numel();
  constexpr std::int64_t most = 1 << 16;
  std::vector<float> one(static_cast<std::size_t>(std::min(count, most))), another(one.size());
  for (std::int64_t first = 0; first < count; first += most) {
    auto const size = static_cast<std::size_t>(std::min(most, count - first));
    files_[place.file]->read(place.name, shape, first, std::span(one).first(size));
    files_[other.file]->read(other.name, shape, first, std::span(another).first(size));
    if (std::memcmp(one.data(), another.data(), size * sizeof(float)) != 0)
      fsdp::fail<fsdp::ConfigError>("'{}': '{}' differs from '{}': {}", path().string(), other.name, place.name,
                                    tied.reason);
  }
}

WeightsFolder::Stored const& WeightsFolder::find(std::string_view name) const {
  auto const found = tensors_.find(name);
  FSDP_EXPECTS(found != tensors_.end(), "'{}': there is no tensor '{}'", path().string(), name);
  return found->second;
}

void WeightsFolder::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  auto const& stored = find(name);
  if (stored.tensor.transposed) return read_transposed(stored, first, out);
  files_[stored.place.file]->read(stored.place.name, stored.tensor.shape, first, out);
}

void WeightsFolder::read_transposed(Stored const& stored, std::int64_t first, std::span<float> out) const {
  if (out.empty()) return;
  constexpr std::int64_t band = 64, widest = 1024;
  auto const& file = *files_[stored.place.file];
  auto const shape = stored.tensor.stored_shape();
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

}  // namespace transformer
