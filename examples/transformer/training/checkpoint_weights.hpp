// SPDX-License-Identifier: Apache-2.0
// Reads weights from a run's checkpoint, a step-N folder, written by any number of ranks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/version.hpp"
#include "transformer/tuning/merged_weights.hpp"
#include "transformer/weights/tensor_list.hpp"
#include "transformer/weights/weights_source.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {
class ShardedReader;
}

namespace transformer {

/// Reads slices of tensors, a block of a MiB at a time, and checks their checksums. Tensors that the checkpoint lacks
/// are the base's; adapters are merged into their matrices. Used by one thread.
class CheckpointWeights final : public WeightsSource {
 public:
  /// @param tensors     of the run's model, without adapters
  /// @param base        weights of frozen tensors; null if the checkpoint has all
  /// @param lora_scale  see Tuning
  /// @throws fsdp::ConfigError if a part is missing, damaged, or of another model
  CheckpointWeights(std::filesystem::path const& folder, std::vector<WeightTensor> const& tensors,
                    std::shared_ptr<WeightsSource const> base, float lora_scale);
  ~CheckpointWeights() override;

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  std::unique_ptr<fsdp::checkpoint::ShardedReader> reader_;
  std::shared_ptr<WeightsSource const> base_;
  HostAdapters adapters_;
};

}  // namespace transformer
