// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/checkpoint_weights.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/training/whole_checkpoints.hpp"
#include "transformer/tuning/tuning.hpp"

namespace transformer {

namespace ckpt = fsdp::checkpoint;

CheckpointWeights::CheckpointWeights(std::filesystem::path const& folder, std::vector<WeightTensor> const& tensors,
                                     std::shared_ptr<WeightsSource const> base, float lora_scale)
    : WeightsSource(folder), base_(std::move(base)), adapters_{{}, lora_scale} {
  auto const file = folder / ckpt::manifest_name;
  auto const what = fsdp::formatted("'{}'", file.string());
  reader_ = std::make_unique<ckpt::ShardedReader>(folder, ckpt::parse_manifest(ckpt::read_text_file(file), what));
  auto const& stored = reader_->manifest().tensors;
  for (auto const& tensor : tensors) {
    auto const found =
        std::find_if(stored.begin(), stored.end(), [&](auto const& each) { return each.name == tensor.name; });
    if (found == stored.end()) fsdp::fail<fsdp::ConfigError>("{}: tensor '{}' is missing", what, tensor.name);
    if (found->shape != tensor.shape)
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}': expected shape ({}), got ({})", what, tensor.name,
                                    fsdp::listed(tensor.shape), fsdp::listed(found->shape));
    if (base_ == nullptr && !reader_->has(ckpt::parameters_array, tensor.name))
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}' was frozen, and its values are not in the checkpoint", what,
                                    tensor.name);
  }
  for (auto const& tensor : stored) {
    if (!is_adapter(tensor.name)) continue;
    auto& values = adapters_.of[adapted_weight(tensor.name)].values_of(tensor);
    values.resize(static_cast<std::size_t>(tensor.numel));
    reader_->read(ckpt::parameters_array, tensor.name, 0, values);
  }
}

CheckpointWeights::~CheckpointWeights() = default;

void CheckpointWeights::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  if (reader_->has(ckpt::parameters_array, name))
    with_others(path(), [&] { reader_->read(ckpt::parameters_array, name, first, out); });
  else
    base_->read(name, first, out);
  adapters_.add_to(name, first, out);
}

}  // namespace transformer
