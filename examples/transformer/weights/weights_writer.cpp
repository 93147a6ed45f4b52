// SPDX-License-Identifier: Apache-2.0
#include "transformer/weights/weights_writer.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/safetensors.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;
using fsdp::DType;
using Json = nlohmann::json;  // an object with a name for each tensor
using fsdp::checkpoint::TensorEntry;

std::vector<WeightsWriter::Tensor> of_one_type(std::vector<fsdp::TensorInfo> const& tensors, DType dtype) {
  std::vector<WeightsWriter::Tensor> list;
  for (auto const& tensor : tensors) list.push_back({tensor.name, tensor.shape, dtype});
  return list;
}

std::int64_t bytes_of(TensorEntry const& entry) {
  return entry.numel() * static_cast<std::int64_t>(fsdp::size_of(entry.dtype));
}

/// The tensors of each file: as many as fit, in order, and at least one.
std::vector<std::vector<TensorEntry>> divided(std::vector<WeightsWriter::Tensor> const& tensors, std::int64_t largest) {
  std::vector<std::vector<TensorEntry>> files(1);
  std::int64_t bytes = 0;
  for (auto const& tensor : tensors) {
    TensorEntry entry{tensor.name, tensor.dtype, tensor.shape};
    auto const own = bytes_of(entry);
    if (!files.back().empty() && own > largest - bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += own;
    files.back().push_back(std::move(entry));
  }
  return files;
}

/// "model.safetensors" becomes "model-00002-of-00003.safetensors".
fs::path part_name(fs::path const& path, std::size_t part, std::size_t parts) {
  auto const number = [](std::size_t n) {
    auto const digits = std::to_string(n);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return path.stem().string() + "-" + number(part + 1) + "-of-" + number(parts) + path.extension().string();
}

fs::path index_path(fs::path const& path) { return path.string() + ".index.json"; }

template <class T, class From>
std::vector<T> rounded(std::span<From const> values) {
  std::vector<T> narrow(values.size());
  std::transform(values.begin(), values.end(), narrow.begin(), [](From value) { return T(static_cast<float>(value)); });
  return narrow;
}

}  // namespace

WeightsWriter::WeightsWriter(WeightsPlace const& place, std::vector<Tensor> const& tensors) : path_(place.path) {
  auto files = divided(tensors, place.largest);
  auto names = Json::object();
  std::int64_t bytes = 0;
  for (std::size_t file = 0; file < files.size(); ++file) {
    auto const name = files.size() == 1 ? path_.filename() : part_name(path_, file, files.size());
    for (auto const& entry : files[file]) {
      places_.push_back(file);
      types_.push_back(entry.dtype);
      names[entry.name] = name.string();
      bytes += bytes_of(entry);
    }
    files_.push_back(std::make_unique<File>(path_.parent_path() / name, std::move(files[file]),
                                            std::map<std::string, std::string>{{"format", "pt"}}));
  }
  if (files_.size() > 1)
    index_ = Json{{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(names)}}.dump(2) + "\n";
}

WeightsWriter::WeightsWriter(fs::path const& path, std::vector<fsdp::TensorInfo> const& tensors, bool bf16)
    : WeightsWriter(WeightsPlace{path}, of_one_type(tensors, bf16 ? DType::bf16 : DType::f32)) {}

WeightsWriter::~WeightsWriter() = default;

template <class From>
void WeightsWriter::write_next(std::string const& name, std::span<From const> values) {
  FSDP_EXPECTS(written_ < places_.size(), "'{}': tensor '{}' was written after all {} tensors", path_.string(), name,
               places_.size());
  auto& file = *files_[places_[written_]];
  auto const write = [&]<class T>(T) {
    if constexpr (std::is_same_v<T, From>) {
      file.write(name, values);
    } else {
      auto const narrow = rounded<T>(values);
      file.write(name, std::span<T const>(narrow));
    }
  };
  switch (types_[written_]) {
    case DType::bf16: write(fsdp::bf16{}); break;
    case DType::f16: write(fsdp::fp16{}); break;
    default: write(0.0f);  // a tensor of another type is refused by the file
  }
  ++written_;
}

void WeightsWriter::write(std::string const& name, std::span<float const> values) { write_next(name, values); }
void WeightsWriter::write(std::string const& name, std::span<fsdp::bf16 const> values) { write_next(name, values); }

void WeightsWriter::finish() {
  FSDP_EXPECTS(written_ == places_.size(), "'{}': only {} of {} tensors were written", path_.string(), written_,
               places_.size());
  // Readers take model.safetensors before an index, and an index for all files that it names.
  std::error_code error;
  if (files_.size() > 1) {
    for (auto const& stale : {index_path(path_), path_})
      if (!fs::remove(stale, error) && error)
        fsdp::fail<fsdp::ResourceError>("'{}' cannot be removed: {}", stale.string(), error.message());
    fsdp::checkpoint::sync_folder(fsdp::checkpoint::folder_of(path_));
  }
  for (auto& file : files_) file->finish();
  if (files_.size() > 1) fsdp::checkpoint::replace_text_file(index_path(path_), index_);
}

}  // namespace transformer
