// SPDX-License-Identifier: Apache-2.0
// Ways in which replicas come to differ although their collectives match, whatever the communicator.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "tests/support/ramp.hpp"

namespace replicas {

using fsdp::testing::Ramp;

enum class Drift : unsigned char {
  imports_other,        ///< every rank imports, the last one other values
  imports_alone,        ///< the last rank imports, the others do not
  imports_late,         ///< the last rank imports after its first micro-step, the others before
  more_micro_steps,     ///< the last rank makes three micro-steps, the others two; only the last of them reduces
  steps_taken,          ///< the last rank sets another count of optimizer steps
  last_learning_rate,   ///< the learning rates of the very last step differ
  discards_at_the_end,  ///< after a last pass, the last rank discards its gradients: no collective follows
};
inline constexpr std::array drifts{Drift::imports_other,      Drift::imports_alone, Drift::imports_late,
                                   Drift::more_micro_steps,   Drift::steps_taken,   Drift::last_learning_rate,
                                   Drift::discards_at_the_end};

constexpr std::string_view name(Drift how) {
  constexpr std::array<std::string_view, 7> names{"imports other values", "imports alone",
                                                  "imports late",         "makes more micro-steps",
                                                  "sets other steps",     "ends with another learning rate",
                                                  "discards at the end"};
  return names[static_cast<std::size_t>(how)];
}
/// The expected part of the message. For imports_alone: the peer waits elsewhere, and several texts name that.
constexpr std::string_view expected(Drift how) {
  constexpr std::array<std::string_view, 7> texts{
      "replicas of unit 'layer.0' differ in imported values",
      "imported values",
      "ranks disagree about collective",
      "number of unreduced micro-steps differs: ",
      "ranks disagree about collective",
      "learning rate differs: ",
      "engine 1 of its mesh ended after number of unreduced micro-steps 1, history"};
  return texts[static_cast<std::size_t>(how)];
}

template <class E>
void import_all(E& engine, float value) {
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const&, std::int64_t first, std::span<float> out) {
    for (auto& each : out) each = value + static_cast<float>(first++);
  });
}

/// Three steps. The last rank drifts, if it is told how; the others never do.
template <class C>
void train(fsdp::ShardingStrategy const& strategy, C comm, std::optional<Drift> how) {
  bool const odd = comm.rank() == comm.size() - 1;
  auto const is = [&](Drift one) { return how == one && odd; };
  fsdp::Mesh<C> mesh(std::move(comm));
  fsdp::Engine<C> engine(mesh, strategy, {.allow_no_sync = true});
  auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
  fsdp::Sgd sgd(engine, {.lr = 0.5f});
  auto const import_weights = [&] {
    if (how != Drift::imports_alone || odd) import_all(engine, is(Drift::imports_other) ? 2.0f : 1.0f);
  };
  if (!is(Drift::imports_late)) import_weights();
  auto const micro_step = [&](bool reduces) {
    auto const waits = engine.no_sync(!reduces);
    for (auto& layer : layers) layer.forward();
    for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
  };
  for (int step = 0; step < 3; ++step) {
    if (is(Drift::more_micro_steps)) micro_step(false);
    micro_step(false);
    if (step == 0 && is(Drift::imports_late)) import_weights();
    micro_step(true);
    sgd.step(step == 2 && is(Drift::last_learning_rate) ? 0.25f : 0.5f);
    if (step == 1) sgd.set_steps(is(Drift::steps_taken) ? 7 : 5);
  }
  micro_step(false);
  if (is(Drift::discards_at_the_end)) engine.discard_gradients();
  engine.synchronize();
}

}  // namespace replicas
