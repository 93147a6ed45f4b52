// SPDX-License-Identifier: Apache-2.0
// Full fp32 weights between an engine and a safetensors file, unit by unit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/full_state.hpp"

namespace fsdp::checkpoint {
class SafetensorsWriter;
class SafetensorsFile;
}  // namespace fsdp::checkpoint

namespace nanogpt {

/// The file that a model's weights are written to. It is compiled apart from the engines, like WeightsReader: what
/// reads and writes JSON takes long.
class WeightsWriter {
 public:
  /// @param tensors  what will be written
  WeightsWriter(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors);
  WeightsWriter(WeightsWriter const&) = delete;
  WeightsWriter& operator=(WeightsWriter const&) = delete;
  ~WeightsWriter();
  void write(fsdp::TensorInfo const& tensor, std::span<float const> values);
  /// All tensors are written: the file gets its name.
  void finish();

 private:
  std::unique_ptr<fsdp::checkpoint::SafetensorsWriter> file_;
};

/// The file that a model's weights are read from.
class WeightsReader {
 public:
  /// @param tensors  what the model has
  /// @throws fsdp::ConfigError if the file lacks a tensor, has one of another shape, or has one that the model lacks
  WeightsReader(std::filesystem::path const& path, std::vector<fsdp::TensorInfo> const& tensors);
  WeightsReader(WeightsReader const&) = delete;
  WeightsReader& operator=(WeightsReader const&) = delete;
  ~WeightsReader();
  /// Reads out.size() elements of the tensor, from its element `first` on.
  void read(fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) const;

 private:
  std::unique_ptr<fsdp::checkpoint::SafetensorsFile> file_;
};

/// Writes the engine's weights to `path`; rank 0 writes, at most one unit is in its memory at a time.
/// @note Collective: yes.
template <class E>
void save_weights(E& engine, std::filesystem::path const& path) {
  std::optional<WeightsWriter> writer;
  if (engine.rank() == 0) writer.emplace(path, fsdp::tensor_list(engine));
  fsdp::export_full(
      engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) { writer->write(tensor, values); });
  if (writer) writer->finish();
}

/// Reads this rank's part of the weights.
/// @throws fsdp::ConfigError if the file lacks a tensor, has one of another shape, or has one that the model lacks
template <class E>
void load_weights(E& engine, std::filesystem::path const& path) {
  WeightsReader const file(path, fsdp::tensor_list(engine));
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    file.read(tensor, first, out);
  });
}

}  // namespace nanogpt
