// SPDX-License-Identifier: Apache-2.0
// Copies full weights between an engine and files, unit by unit.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/engine.hpp"
#include "fsdp/error.hpp"
#include "fsdp/full_state.hpp"
#include "transformer/tuning/merged_weights.hpp"
#include "transformer/tuning/tuning.hpp"
#include "transformer/weights/weights_source.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace transformer {

/// The tensors of a model that a file gets.
enum class Weights {
  merged,   ///< those of a model without adapters: adapters are added to the matrices that they belong to
  adapters  ///< adapters alone
};

/// How weights are written.
struct SavedAs {
  Weights which = Weights::merged;
  bool bf16 = false;                                         ///< otherwise fp32
  std::function<std::string(std::string_view name)> name{};  ///< a tensor's name in the file; empty: its own
};

/// Writes the engine's weights; rank 0 writes, and holds at most one unit and its adapters in memory at a time.
/// @throws fsdp::ResourceError on every rank if a file cannot be written
/// @note Collective: yes.
template <class E>
void save_weights(E& engine, WeightsPlace const& place, Tuning const& tuning, SavedAs const& as = {}) {
  std::optional<WeightsWriter> writer;
  MergedWeights merged(tuning.lora_scale);
  std::string problem;
  bool const adapters = as.which == Weights::adapters;
  auto const name_of = [&](fsdp::TensorInfo const& tensor) { return as.name ? as.name(tensor.name) : tensor.name; };
  std::vector<WeightsWriter::Tensor> tensors;
  for (auto const& tensor : fsdp::tensor_list(engine))
    if (is_adapter(tensor.name) == adapters)
      tensors.push_back({name_of(tensor), tensor.shape, as.bf16 ? fsdp::DType::bf16 : fsdp::DType::f32});
  fsdp::checkpoint::agreed(engine.world(), "the weights' file", [&] {
    if (engine.rank() == 0) writer.emplace(place, tensors);
    return "";
  });
  // A file that fails does not end the collectives that other ranks take part in.
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    try {
      if (!writer) return;
      if (is_adapter(tensor.name) && !adapters) return merged.keep(tensor, values);
      if (is_adapter(tensor.name) == adapters)
        writer->write(name_of(tensor), adapters ? values : merged.merge(tensor.name, values));
    } catch (fsdp::ResourceError const& error) {
      problem = error.what();
      writer.reset();
    }
  });
  fsdp::checkpoint::agreed(engine.world(), "the weights' file", [&] {
    if (!problem.empty()) throw fsdp::ResourceError(problem);
    if (writer) writer->finish();
    return "";
  });
}

/// Reads this rank's part of the weights, and no more than that of the files. Adapters stay as they are.
/// @throws fsdp::ConfigError if a file cannot be read
/// @note Collective: no (sealing is, the first time).
template <class E>
void load_weights(E& engine, WeightsSource const& weights) {
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    if (is_adapter(tensor.name)) return false;
    weights.read(tensor.name, first, out);
    return true;
  });
}

}  // namespace transformer
