// SPDX-License-Identifier: Apache-2.0
// The weights of a run's checkpoint: a step-N folder, whatever ranks wrote it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "llama/adapter_files.hpp"
#include "llama/weights.hpp"

namespace fsdp::checkpoint {
class ShardedReader;
}

namespace llama {

/// Reads slices of tensors and checks their checksums. Tensors that the checkpoint lacks are the base's; adapters are
/// merged into their matrices. Used by one thread.
class CheckpointWeights final : public LlamaWeights {
 public:
  /// @param config      the run's model
  /// @param base        weights of frozen tensors; null if the checkpoint has all
  /// @param lora_scale  see Tuning
  /// @throws fsdp::ConfigError if a part is missing, damaged, or of another model
  CheckpointWeights(std::filesystem::path const& folder, LlamaConfig const& config,
                    std::shared_ptr<LlamaWeights const> base, float lora_scale);
  ~CheckpointWeights() override;

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  std::unique_ptr<fsdp::checkpoint::ShardedReader> reader_;
  std::shared_ptr<LlamaWeights const> base_;
  Adapters adapters_;
};

}  // namespace llama
