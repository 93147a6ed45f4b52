// SPDX-License-Identifier: Apache-2.0
// A rank that does what the others do not: every rank that waits gets an error that names both sides, at once. Cases
// for every communicator whose ranks see each other.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "tests/support/toy_model.hpp"

namespace one_order {

/// Different behaviour of the last rank.
enum class Fault { reduces_not, clips_alone };
/// The next call of all ranks.
enum class Next { forward, evaluation, mean, synchronize, nothing };

inline constexpr Fault faults[] = {Fault::reduces_not, Fault::clips_alone};
inline constexpr Next nexts[] = {Next::forward, Next::evaluation, Next::mean, Next::synchronize, Next::nothing};

inline std::string_view name(Fault fault) { return fault == Fault::reduces_not ? "reduces not" : "clips alone"; }
inline std::string_view name(Next next) {
  constexpr std::string_view names[] = {"forward", "evaluation", "mean", "synchronize", "nothing"};
  return names[static_cast<int>(next)];
}

/// Different behaviour of the last rank that no collective shows.
enum class Drift { rate, no_step, discard, limit, norm };
inline constexpr Drift drifts[] = {Drift::rate, Drift::no_step, Drift::discard, Drift::limit, Drift::norm};

/// How a rank ended: "order", "peer", "other" or "well", and the message.
struct Outcome {
  std::string kind = "well", text;
};

template <class Body>
Outcome outcome_of(Body const& body) {
  try {
    body();
  } catch (fsdp::OrderError const& error) {
    return {"order", error.what()};
  } catch (fsdp::PeerError const& error) {
    return {"peer", error.what()};
  } catch (std::exception const& error) {
    return {"other", error.what()};
  }
  return {};
}

/// Two steps of two layers, the second with the fault.
template <class C>
Outcome misbehave(fsdp::ShardingStrategy const& strategy, C comm, Fault fault, Next next) {
  return outcome_of([&] {
    using Device = typename C::Device;
    using Layer = toy::Layer<Device>;
    bool const odd = comm.rank() == comm.size() - 1;
    fsdp::Mesh<C> mesh(std::move(comm));
    float x[6]{}, y[6]{}, pre[10]{}, act[10]{}, d1[10]{}, d2[10]{};
    fsdp::Engine<C> engine(mesh, strategy, {.allow_no_sync = true});
    Layer const layer{engine.device(), 2, 3, 5};
    auto layers = engine.shard(std::vector<Layer>{layer, layer}, "layers");
    fsdp::AdamW adamw(engine);
    auto const forward = [&] {
      for (auto& each : layers) each.forward(x, y, typename Layer::Saved{pre, act});
    };
    auto const backward = [&] {
      for (std::size_t i = layers.size(); i-- > 0;) layers[i].backward(x, y, typename Layer::Saved{pre, act}, d1, d2);
    };
    forward(), backward(), adamw.step();
    forward();
    {
      auto const waits = engine.no_sync(fault == Fault::reduces_not && odd);
      backward();
    }
    fsdp::GradNorm<fsdp::Engine<C>> norm;
    if (fault == Fault::clips_alone && odd) norm = fsdp::clip_grad_norm(engine, 1.0f);
    if (next == Next::forward) {
      if (fault == Fault::clips_alone) adamw.step(norm);
      forward();
    }
    if (next == Next::evaluation) {
      auto const scope = engine.evaluation();
      forward();
    }
    if (next == Next::mean) static_cast<void>(engine.mean_over_ranks({1.0}));
    if (next != Next::nothing) engine.synchronize();
  });
}

/// Two steps of two layers, after the first of which ranks have different weights, or would have.
template <class C>
Outcome drift(fsdp::ShardingStrategy const& strategy, C comm, Drift how) {
  return outcome_of([&] {
    using Layer = toy::Layer<typename C::Device>;
    bool const odd = comm.rank() == comm.size() - 1;
    fsdp::Mesh<C> mesh(std::move(comm));
    float x[6]{}, y[6]{}, pre[10]{}, act[10]{}, d1[10]{}, d2[10]{};
    fsdp::Engine<C> engine(mesh, strategy);
    Layer const layer{engine.device(), 2, 3, 5};
    auto layers = engine.shard(std::vector<Layer>{layer, layer}, "layers");
    fsdp::Sgd sgd(engine, {.lr = 0.5f});
    for (int step = 0; step < 2; ++step) {
      for (auto& each : layers) each.forward(x, y, typename Layer::Saved{pre, act});
      for (std::size_t i = layers.size(); i-- > 0;) layers[i].backward(x, y, typename Layer::Saved{pre, act}, d1, d2);
      auto const kind = how == Drift::norm && odd ? fsdp::NormKind::l1 : fsdp::NormKind::l2;
      fsdp::GradNorm<fsdp::Engine<C>> norm;
      if (how == Drift::limit || how == Drift::norm)
        norm = fsdp::clip_grad_norm(engine, how == Drift::limit && odd ? 2.0f : 1.0f, {.norm = kind});
      if (how == Drift::discard && odd) engine.discard_gradients();
      if ((how != Drift::no_step && how != Drift::discard) || !odd)
        sgd.step(how == Drift::rate && odd ? 0.25f : 0.5f, norm);
    }
    engine.synchronize();
  });
}
/// "" if a rank of drift() ended in an error that says how it came there, else what is wrong.
inline std::string verdict(Drift how, int rank, Outcome const& got) {
  constexpr std::string_view said[] = {"after step with learning rate 0.5, history",
                                       "after step with learning rate 0.5, history", "after discard_gradients, history",
                                       "after l2 norm with max_norm 1", "after l1 norm with max_norm 1"};
  auto const part = said[static_cast<int>(how)];
  // A rank that steps without the others waits for them before its first update.
  bool const waits = how == Drift::no_step || how == Drift::discard;
  if (got.kind == "order" && (got.text.find(part) != std::string::npos ||
                              (waits && got.text.find("unit 'all units' (optimizer)") != std::string::npos)))
    return {};
  return fmt::format("drift {}: rank {} ended {}: {}, expected \"{}\"\n", static_cast<int>(how), rank, got.kind,
                     got.text, part);
}

/// "" if a rank ended as it must, else what is wrong.
/// @param named  whether the message must name the calls: in a mesh, one of several pairs of ranks notices first
inline std::string verdict(Fault fault, Next next, int rank, int size, Outcome const& got, bool named = true) {
  auto const wrong = [&](std::string_view expected) {
    return fmt::format("the last rank {}, then {}: rank {} of {} ended {}, expected {}: {}\n", name(fault), name(next),
                       rank, size, got.kind, expected, got.text);
  };
  bool const meets = next == Next::forward || next == Next::evaluation || next == Next::mean;
  if (meets) {
    if (got.kind != "order") return wrong("in an OrderError");
    std::vector<std::string> parts{fmt::format("rank {}: ", rank), "ranks disagree", fmt::format("rank {} ", size - 1)};
    // Ranks may meet in another collective first, which compares what they did before it.
    bool const by_history =
        fault == Fault::reduces_not && got.text.find("number of unreduced micro-steps") != got.text.npos;
    if (named && fault == Fault::clips_alone && next == Next::forward) {
      parts.insert(parts.end(), {"unit 'gradient norm' (optimizer)", "unit 'all units' (optimizer)"});
    } else if (named && !by_history) {
      parts.emplace_back(fault == Fault::reduces_not ? "reduce_scatter for unit 'layers.1' (backward) on 'reduce'"
                                                     : "all_reduce for unit 'gradient norm' (optimizer) on 'scalar'");
      parts.emplace_back(next == Next::mean ? "exchange of 'values to average'" : "(forward) on 'gather'");
    }
    for (auto const& part : parts)
      if (got.text.find(part) == std::string::npos) return wrong(fmt::format("to name \"{}\"", part));
    return {};
  }
  // Nobody makes another call: who waits learns that who does not has left.
  bool const odd = rank == size - 1;
  if (odd != (fault == Fault::clips_alone)) return {};
  if (next == Next::nothing && got.kind == "well") return {};  // a destructor reports instead of throwing
  if (got.kind != "peer" || got.text.find("has left") == std::string::npos) return wrong("in a PeerError");
  return {};
}

}  // namespace one_order
