// SPDX-License-Identifier: Apache-2.0
// Plans activations: kept or computed again, and layers that share buffers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/attention/plan.hpp"
#include "transformer/layers/arena.hpp"
#include "transformer/layers/options.hpp"
#include "transformer/layers/shape.hpp"

namespace transformer {

/// The sizes of a model's activations and workspace.
struct ActivationPlan {
  std::int64_t batch = 1;      ///< B: sequences per micro-step
  std::int64_t sequence = 1;   ///< T: tokens per sequence
  bool training = true;        ///< false: only each layer's keys and values are kept (they are the decoding cache)
  std::int64_t recompute = 0;  ///< number of first layers that are checkpointed: backward recomputes their activations
  std::int64_t segment = 1;    ///< layers that are recomputed together, from the input of the first
  std::int64_t unused = 0;     ///< number of first layers without a backward, which keep nothing for it
  std::int64_t first = 0;      ///< the first segment begins with this layer, at or below `unused`; `recompute`: none is
  float dropout = 0.0f;        ///< highest probability of dropping in training
  std::int64_t lora_rank = 0;  ///< of adapters; 0: none
  std::int64_t panel = 256;    ///< query rows of an attention panel
  std::int64_t lanes = 1;      ///< threads that work on attention at once, each in a scratch of its own
  std::int64_t attention_elements = 1 << 18;  ///< elements of a panel's scores that a thread works on at a time
  std::int64_t logits_elements = 32 << 20;    ///< elements of the logits that exist at a time

  std::int64_t rows() const { return batch * sequence; }
  /// Number of first layers that share the buffers of `slots()` layers. All others have their own.
  std::int64_t sharing() const { return std::max(recompute, unused); }
  std::int64_t slots() const { return std::clamp<std::int64_t>(std::min(segment, recompute - first), 1, segment); }
  /// The layer is in a segment. Segments are `first` to `first + segment - 1`, and so on; the last one may be shorter.
  bool in_segment(std::int64_t layer) const { return layer >= first && layer < recompute; }
  /// The place of the layer in its segment; 0 outside of segments.
  std::int64_t slot(std::int64_t layer) const { return in_segment(layer) ? (layer - first) % segment : 0; }
  std::int64_t first_of_segment(std::int64_t layer) const { return layer - slot(layer); }
  std::int64_t last_of_segment(std::int64_t layer) const {
    return std::min(first_of_segment(layer) + segment, recompute) - 1;
  }
  /// Backward computes the layer's activations again. Those of the last segment are still there.
  bool recomputes(std::int64_t layer) const { return in_segment(layer) && last_of_segment(layer) + 1 < recompute; }
  /// The layer whose buffers the layer uses: itself, or a lower one.
  std::int64_t holder(std::int64_t layer) const {
    if (!training) return 0;
    if (layer >= sharing()) return layer;
    return slot(layer) > 0 ? first + slot(layer) : 0;
  }
  AttentionPlan attention(AttentionShape const& shape) const {
    return {shape, batch, sequence, training, panel, lanes, attention_elements};
  }
  /// Rows of logits that exist at a time: equal parts of all rows, each within logits_elements.
  /// @param columns  of a row of logits
  std::int64_t logits_rows(std::int64_t columns) const {
    std::int64_t const most = std::clamp<std::int64_t>(logits_elements / columns, 1, rows());
    std::int64_t const parts = (rows() + most - 1) / most;
    return (rows() + parts - 1) / parts;
  }
};

/// The plan of a model that computes `batch` sequences of `length` tokens at a time.
/// @param lanes  threads that work on attention at once
/// @throws fsdp::ConfigError if `length` exceeds the shape's positions, or options do not go together
inline ActivationPlan plan_activations(DecoderShape const& shape, std::int64_t batch, std::int64_t length,
                                       DecoderOptions const& options, std::int64_t lanes) {
  auto const& tuning = options.tuning;
  if (batch < 1 || length < 1 || length > shape.positions) {
    fsdp::fail<fsdp::ConfigError>("model: expected at least one sequence of 1 to {} tokens ({}), got {} of {} tokens",
                                  shape.positions, shape.positions_field, batch, length);
  }
  if (options.panel < 1)
    fsdp::fail<fsdp::ConfigError>("model: expected attention panels of at least one row, got {}", options.panel);
  if (tuning.frozen_layers < 0 || tuning.frozen_layers > shape.layers)
    fsdp::fail<fsdp::ConfigError>("model: expected 0 to {} frozen layers, got {}", shape.layers, tuning.frozen_layers);
  if (tuning.adapts() && (tuning.frozen_layers > 0 || tuning.last_layers > 0))
    fsdp::fail<fsdp::ConfigError>(
        "model: expected adapters or layers that do not train, got adapters of rank {} and both", tuning.lora_rank);
  ActivationPlan plan;
  plan.batch = batch;
  plan.sequence = length;
  plan.training = options.training;
  plan.recompute = options.training ? std::min(options.recompute, shape.layers) : 0;
  plan.dropout = shape.dropout;
  plan.lora_rank = tuning.lora_rank;
  if (options.training) plan.unused = tuning.layers_below(shape.layers);
  plan.segment = std::max<std::int64_t>(1, std::min(options.segment, plan.recompute));
  // Below, nothing is recomputed. A segment has whole units.
  plan.first = std::min(plan.unused - plan.unused % std::max<std::int64_t>(1, options.unit_layers), plan.recompute);
  if (plan.recompute <= plan.unused) plan.first = plan.recompute;
  if (options.segment < 1)
    fsdp::fail<fsdp::ConfigError>("model: expected segments of at least one layer, got {}", options.segment);
  if (plan.segment > 1 && plan.recomputes(plan.first) &&
      (options.unit_layers == 0 || plan.segment % options.unit_layers != 0))
    fsdp::fail<fsdp::ConfigError>("model: segments of {} layers are recomputed, but units have {}: expected a multiple",
                                  plan.segment,
                                  options.unit_layers == 0 ? std::string("all layers, the embeddings and the head")
                                                           : fsdp::formatted("{} layers", options.unit_layers));
  plan.panel = options.panel;
  plan.lanes = lanes;
  plan.attention_elements = options.attention_elements;
  plan.logits_elements = options.logits_elements;
  return plan;
}

/// Lays out what the layers keep, in the order of the layers. Each has an `input` and an `output`, the residual stream
/// before and after it: a layer's output is the next layer's input.
/// @param stream      elements of a residual stream
/// @param take_cache  take_cache(layer): its keys and values, which decoding keeps of every layer
/// @param take_rest   take_rest(layer): all else
template <class T, class Layer, class TakeCache, class TakeRest>
void lay_out_layers(ActivationPlan const& plan, Arena& arena, std::vector<Layer>& layers, std::int64_t stream,
                    TakeCache const& take_cache, TakeRest const& take_rest) {
  T* rows = arena.take<T>(stream);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    auto& layer = layers[i];
    auto const holder = static_cast<std::size_t>(plan.holder(static_cast<std::int64_t>(i)));
    bool const own = holder == i;
    if (!own) layer = layers[holder];
    if (own || !plan.training) take_cache(layer);
    layer.input = rows;
    if (own) take_rest(layer);
    // Inside a segment, the output lies where that of its holder does. Without backward, the stream is updated in
    // place.
    auto const next = static_cast<std::int64_t>(i) + 1;
    if (plan.training && !(plan.slot(next) > 0 && plan.holder(next) < next))
      rows = arena.take<T>(stream);
    else if (plan.training)
      rows = layers[static_cast<std::size_t>(plan.holder(next))].input;
    layer.output = rows;
  }
}

}  // namespace transformer
