// SPDX-License-Identifier: Apache-2.0
#include "weights_file.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "fsdp/checkpoint/safetensors.hpp"

namespace nanogpt {
namespace {

std::vector<fsdp::checkpoint::TensorEntry> entries_of(std::vector<fsdp::TensorInfo> const& tensors) {
  std::vector<fsdp::checkpoint::TensorEntry> entries;
  for (auto const& tensor : tensors) entries.push_back({tensor.name, fsdp::DType::f32, tensor.shape});
  return entries;
}

}  // namespace

WeightsWriter::WeightsWriter(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors)
    : file_(std::make_unique<fsdp::checkpoint::SafetensorsWriter>(
          path, entries_of(tensors), std::map<std::string, std::string>{{"format", "pt"}})) {}
WeightsWriter::~WeightsWriter() = default;
void WeightsWriter::write(fsdp::TensorInfo const& tensor, std::span<float const> values) {
  file_->write(tensor.name, values);
}
void WeightsWriter::finish() { file_->finish(); }

WeightsReader::WeightsReader(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors)
    : file_(std::make_unique<fsdp::checkpoint::SafetensorsFile>(path)) {
  for (auto const& entry : file_->entries()) {
    bool const known =
        std::any_of(tensors.begin(), tensors.end(), [&](auto const& tensor) { return tensor.name == entry.name; });
    if (!known) fsdp::fail<fsdp::ConfigError>("'{}': the model has no tensor '{}'", path.string(), entry.name);
  }
  for (auto const& tensor : tensors)
    if (!file_->contains(tensor.name))
      fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}' is missing", path.string(), tensor.name);
}
WeightsReader::~WeightsReader() = default;
void WeightsReader::read(fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) const {
  file_->read(tensor.name, tensor.shape, first, out);
}

}  // namespace nanogpt
