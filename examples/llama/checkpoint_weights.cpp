// SPDX-License-Identifier: Apache-2.0
#include "llama/checkpoint_weights.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/sharded_reader.hpp"
#include "fsdp/error.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace llama {

namespace ckpt = fsdp::checkpoint;

CheckpointWeights::CheckpointWeights(std::filesystem::path const& folder, LlamaConfig const& config,
                                     std::shared_ptr<LlamaWeights const> base, float lora_scale)
    : LlamaWeights(folder, config), base_(std::move(base)) {
  auto const file = folder / ckpt::manifest_name;
  auto const what = fsdp::formatted("'{}'", file.string());
  reader_ = std::make_unique<ckpt::ShardedReader>(folder, ckpt::parse_manifest(ckpt::read_text_file(file), what));
  auto const& tensors = reader_->manifest().tensors;
  for (auto const& tensor : llama_tensors(config)) {
    auto const found =
        std::find_if(tensors.begin(), tensors.end(), [&](auto const& each) { return each.name == tensor.name; });
    if (found == tensors.end()) fsdp::fail<fsdp::ConfigError>("{}: tensor '{}' is missing", what, tensor.name);
    if (found->shape != tensor.shape)
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}': expected shape ({}), got ({})", what, tensor.name,
                                    fsdp::listed(tensor.shape), fsdp::listed(found->shape));
    if (base_ == nullptr && !reader_->has(ckpt::parameters_array, tensor.name))
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}' was frozen, and its values are not in the checkpoint", what,
                                    tensor.name);
  }
  adapters_.scale = lora_scale;
  for (auto const& tensor : tensors) {
    if (!is_adapter(tensor.name)) continue;
    auto& values = adapters_.of[adapted_weight(tensor.name)].values_of(tensor);
    values.resize(static_cast<std::size_t>(tensor.numel));
    reader_->read(ckpt::parameters_array, tensor.name, 0, values);
  }
}

CheckpointWeights::~CheckpointWeights() = default;

void CheckpointWeights::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  if (!reader_->has(ckpt::parameters_array, name)) {
    base_->read(name, first, out);
  } else {
    try {
      reader_->read(ckpt::parameters_array, name, first, out);
    } catch (fsdp::ConfigError const& error) {
      fail_with_others(path(), error.what());
    }
  }
  if (auto const found = adapters_.of.find(std::string(name)); found != adapters_.of.end())
    found->second.add_to(out, first, adapters_.scale);
}

}  // namespace llama
