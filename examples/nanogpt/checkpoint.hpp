// SPDX-License-Identifier: Apache-2.0
// Full fp32 weights between an engine and a safetensors file, unit by unit.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/safetensors.hpp"
#include "fsdp/full_state.hpp"
#include "saved_model.hpp"

namespace nanogpt {

/// Writes the engine's weights to `path`; rank 0 writes, at most one unit is in its memory at a time.
/// @note Collective: yes.
template <class E>
void save_weights(E& engine, std::filesystem::path const& path) {
  std::optional<fsdp::checkpoint::SafetensorsWriter> writer;
  if (engine.rank() == 0) {
    std::vector<fsdp::checkpoint::TensorEntry> entries;
    for (auto const& tensor : fsdp::tensor_list(engine)) entries.push_back({tensor.name, fsdp::DType::f32, tensor.shape});
    writer.emplace(path, std::move(entries), std::map<std::string, std::string>{{"format", "pt"}});
  }
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) { writer->write(tensor.name, values); });
  if (writer) writer->finish();
}

/// Reads this rank's part of the weights.
/// @throws fsdp::ConfigError if the file lacks a tensor, has one of another shape, or has one that the model lacks
template <class E>
void load_weights(E& engine, std::filesystem::path const& path) {
  fsdp::checkpoint::SafetensorsFile const file(path);
  auto const tensors = fsdp::tensor_list(engine);
  for (auto const& entry : file.entries()) {
    bool const known = std::any_of(tensors.begin(), tensors.end(), [&](auto const& tensor) { return tensor.name == entry.name; });
    if (!known) fsdp::fail<fsdp::ConfigError>("'{}': the model has no tensor '{}'", path.string(), entry.name);
  }
  for (auto const& tensor : tensors)
    if (!file.contains(tensor.name)) fsdp::fail<fsdp::ConfigError>("'{}': tensor '{}' is missing", path.string(), tensor.name);
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    file.read(tensor.name, tensor.shape, first, out);
  });
}

}  // namespace nanogpt
