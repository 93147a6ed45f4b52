// SPDX-License-Identifier: Apache-2.0
// Weights in a sharded checkpoint of a run: a step-N folder, whatever ranks wrote it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "gpt2/weights_source.hpp"

namespace fsdp::checkpoint {
class ShardedReader;
}

namespace nanogpt {

/// Reads slices as they are asked for, a block of a MiB at a time, and checks their checksums. Adapters are merged into
/// their matrices. Used by one thread.
class CheckpointWeights final : public GptWeights {
 public:
  /// @param config      the run's model
  /// @param lora_scale  see Tuning
  /// @throws fsdp::ConfigError if a part is missing, damaged, or of another model
  CheckpointWeights(std::filesystem::path const& folder, GptConfig const& config, float lora_scale);
  ~CheckpointWeights() override;

  void read(std::string_view name, std::int64_t first, std::span<float> out) const override;

 private:
  std::unique_ptr<fsdp::checkpoint::ShardedReader> reader_;
  float lora_scale_;
};

}  // namespace nanogpt
