// SPDX-License-Identifier: Apache-2.0
#include "gpt2/checkpoint_weights.hpp"

#include <algorithm>
#include <utility>

#include "fsdp/checkpoint/files.hpp"
#include "fsdp/checkpoint/manifest.hpp"
#include "fsdp/checkpoint/sharded_reader.hpp"
#include "fsdp/error.hpp"
#include "gpt2/tensor_names.hpp"
#include "transformer/training/whole_checkpoints.hpp"
#include "transformer/tuning/merged_weights.hpp"
#include "transformer/tuning/tuning.hpp"

namespace nanogpt {

CheckpointWeights::CheckpointWeights(std::filesystem::path const& folder, GptConfig const& config, float lora_scale)
    : GptWeights(folder, config), lora_scale_(lora_scale) {
  namespace ckpt = fsdp::checkpoint;
  auto const file = folder / ckpt::manifest_name;
  auto const what = fsdp::formatted("'{}'", file.string());
  auto manifest = ckpt::parse_manifest(ckpt::read_text_file(file), what);
  for (auto const& tensor : gpt_tensors(config)) {
    auto const found = std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                                    [&](auto const& each) { return each.name == tensor.name; });
    if (found == manifest.tensors.end()) fsdp::fail<fsdp::ConfigError>("{}: tensor '{}' is missing", what, tensor.name);
    if (found->shape != tensor.shape)
      fsdp::fail<fsdp::ConfigError>("{}: tensor '{}': expected shape ({}), got ({})", what, tensor.name,
                                    fsdp::listed(tensor.shape), fsdp::listed(found->shape));
  }
  reader_ = std::make_unique<ckpt::ShardedReader>(folder, std::move(manifest));
}

CheckpointWeights::~CheckpointWeights() = default;

void CheckpointWeights::read(std::string_view name, std::int64_t first, std::span<float> out) const {
  auto const parameters = fsdp::checkpoint::parameters_array;
  try {
    reader_->read(parameters, name, first, out);
    HostAdapter adapter;
    for (auto const& tensor : reader_->manifest().tensors) {
      if (!is_adapter(tensor.name) || adapted_weight(tensor.name) != name) continue;
      auto& values = adapter.values_of(tensor);
      values.resize(static_cast<std::size_t>(tensor.numel));
      reader_->read(parameters, tensor.name, 0, values);
    }
    if (adapter.is_whole()) adapter.add_to(out, first, lora_scale_);
  } catch (fsdp::ConfigError const& error) {
    fail_with_others(path(), error.what());
  }
}

}  // namespace nanogpt
