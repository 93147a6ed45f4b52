// SPDX-License-Identifier: Apache-2.0
#include "weights_file.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "fsdp/checkpoint/safetensors.hpp"

namespace nanogpt {
namespace {

std::vector<fsdp::checkpoint::TensorEntry> entries_of(std::vector<fsdp::TensorInfo> const& tensors, bool bf16) {
  std::vector<fsdp::checkpoint::TensorEntry> entries;
  for (auto const& tensor : tensors)
    entries.push_back({tensor.name, bf16 ? fsdp::DType::bf16 : fsdp::DType::f32, tensor.shape});
  return entries;
}

}  // namespace

WeightsWriter::WeightsWriter(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors, bool bf16)
    : file_(std::make_unique<fsdp::checkpoint::SafetensorsWriter>(
          path, entries_of(tensors, bf16), std::map<std::string, std::string>{{"format", "pt"}})),
      bf16_(bf16) {}
WeightsWriter::~WeightsWriter() = default;
void WeightsWriter::write(fsdp::TensorInfo const& tensor, std::span<float const> values) {
  if (!bf16_) return file_->write(tensor.name, values);
  std::vector<fsdp::bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float value) { return fsdp::bf16(value); });
  file_->write(tensor.name, std::span<fsdp::bf16 const>(rounded));
}
void WeightsWriter::finish() { file_->finish(); }

}  // namespace nanogpt
