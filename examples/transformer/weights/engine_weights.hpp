// SPDX-License-Identifier: Apache-2.0
// Full weights between an engine and files, unit by unit.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/agreement.hpp"
#include "fsdp/checkpoint/full_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/tensor.hpp"
#include "transformer/tuning/merged_weights.hpp"
#include "transformer/tuning/tuning.hpp"
#include "transformer/weights/weights_source.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace transformer {

/// Which tensors of a model a file gets.
enum class Weights {
  merged,   ///< those of a model without adapters: adapters are added to the matrices that they belong to
  adapters  ///< adapters alone
};

/// Writes the engine's weights; rank 0 writes, at most one unit, and its adapters, are in its memory at a time.
/// @param place  a path, or one with the size of files
/// @param dtype  type in the file of a tensor by its name; null: fp32. A frozen tensor's values come out as they were
///               read where the type is that of the file which it was read from
/// @throws fsdp::ResourceError on every rank if the file cannot be written
/// @note Collective: yes.
template <class E>
void save_weights(E& engine, WeightsPlace const& place, Tuning const& tuning, Weights which = Weights::merged,
                  std::function<fsdp::DType(std::string const& name)> const& dtype = nullptr) {
  std::optional<WeightsWriter> writer;
  MergedWeights merged(tuning.lora_scale);
  std::string problem;
  std::vector<WeightsWriter::Tensor> tensors;
  for (auto const& tensor : fsdp::tensor_list(engine))
    if (is_adapter(tensor.name) == (which == Weights::adapters))
      tensors.push_back({tensor.name, tensor.shape, dtype ? dtype(tensor.name) : fsdp::DType::f32});
  fsdp::checkpoint::agreed(engine.world(), "the weights' file", [&] {
    if (engine.rank() == 0) writer.emplace(place, tensors);
    return "";
  });
  // A file that fails does not end the collectives that other ranks take part in.
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    try {
      if (!writer) return;
      if (which == Weights::adapters) {
        if (is_adapter(tensor.name)) writer->write(tensor, values);
      } else if (is_adapter(tensor.name)) {
        merged.keep(tensor, values);
      } else {
        writer->write(tensor, merged.merge(tensor.name, values));
      }
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
