// SPDX-License-Identifier: Apache-2.0
// Draws trials: models with ties, settings of every strategy and option, scripts of training steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/trial/model.hpp"

namespace trial {

/// Seeded draws (splitmix64), equal on every platform.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : state_(mix(seed + 1)) {}

  std::uint64_t word() { return mix(state_ += 0x9e3779b97f4a7c15u); }
  /// A number in [low, high].
  int between(int low, int high) { return low + static_cast<int>(word() % static_cast<std::uint64_t>(high - low + 1)); }
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(word() % bound); }
  bool once_in(int n) { return between(1, n) == 1; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(choices.size())];
  }
  template <class T>
  T const& of(std::vector<T> const& choices) {
    return choices[below(choices.size())];
  }

 private:
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t state_;
};

/// Bounds of what is drawn.
struct Limits {
  int least_parts = 5, most_parts = 12;
  int least_ranks = 1, most_ranks = 7;
  Index most_elements = 600;  ///< of a tensor
  int least_steps = 2, most_steps = 3;
  bool infinities = true;     ///< now and then in gradients
  bool freezes = false;       ///< some units, now and then
  bool narrow = false;        ///< parameters are bf16 now and then
  bool paths = false;         ///< passes leave out parts, and repeat some, now and then
  bool communicates = false;  ///< optimizers have collectives, now and then
};

inline std::vector<Index> draw_shape(Draw& draw, std::size_t rank, Index most_elements) {
  std::vector<Index> const sizes{0, 1, 2, 3, 5, 7, 11, 13, 31, 64, 65, 97, 127, 128, 211, 331, 509};
  std::vector<Index> shape(rank, 1);
  Index left = most_elements;
  for (auto& extent : shape) {
    do {
      extent = draw.of(sizes);
    } while (extent > left);
    left /= std::max<Index>(extent, 1);
  }
  if (rank > 1) std::swap(shape[0], shape[draw.below(rank)]);
  return shape;
}

inline TensorSpec draw_tensor(Draw& draw, std::size_t rank, std::string name, Limits const& limits) {
  return {std::move(name), draw_shape(draw, rank, limits.most_elements), !draw.once_in(3), draw.of({0.0f, 0.1f, 0.2f})};
}

/// Units of one part, of several parts that share tensors, and of several parts that share nothing but the unit.
inline Model draw_model(Draw& draw, Limits const& limits) {
  Model model;
  model.width = draw.of<Index>({1, 2, 3, 5, 7, 13});
  model.max_rows = draw.between(1, 3);
  model.salt = static_cast<std::uint32_t>(draw.word());
  auto const count = static_cast<std::size_t>(draw.between(limits.least_parts, limits.most_parts));
  struct Shared {
    std::size_t unit;
    bool tied;
    std::vector<TensorSpec> pool;  ///< what tied parts choose from
  };
  std::vector<Shared> shared;
  int const sets_gradients = draw.of({0, 1, 2});  // no part, about half, every part
  for (std::size_t p = 0; p < count; ++p) {
    PartSpec part;
    part.sets_gradients = sets_gradients == 2 || (sets_gradients == 1 && draw.once_in(2));
    Shared* joined = nullptr;
    if (!shared.empty() && draw.once_in(3)) {
      joined = &shared[draw.below(shared.size())];
    } else {
      model.units.push_back("u" + std::to_string(model.units.size()));
      part.unit = model.units.size() - 1;
      if (draw.once_in(3)) joined = &shared.emplace_back(Shared{part.unit, draw.once_in(2), {}});
    }
    if (joined != nullptr) part.unit = joined->unit;
    part.prefix = model.units[part.unit];
    bool const tied = joined != nullptr && joined->tied;
    if (joined != nullptr && !tied) part.prefix += ".p" + std::to_string(p);
    if (tied && joined->pool.empty())
      for (std::size_t t = 0; t < 4; ++t)
        joined->pool.push_back(draw_tensor(draw, 1 + t % 3, "t" + std::to_string(t), limits));
    for (std::size_t rank = 1; rank <= 3; ++rank) {
      if (tied) {
        auto const& tensor = draw.of(joined->pool);
        if (!part.has_rank(tensor.shape.size())) part.tensors.push_back(tensor);
      } else if (rank == 1 ? !draw.once_in(4) : draw.once_in(2)) {
        part.tensors.push_back(draw_tensor(draw, rank, std::string(1, "_abc"[rank]), limits));
      }
    }
    // A unit must have an element; further parts of it need none.
    Index elements = 0;
    for (auto const& tensor : part.tensors) elements += tensor.numel();
    bool first = true;
    for (auto const& earlier : model.parts) first = first && earlier.unit != part.unit;
    if (elements == 0 && first) part.tensors = {{"only", {draw.of<Index>({1, 2, 3})}, true, 0.1f}};
    model.parts.push_back(std::move(part));
  }
  for (auto& part : model.parts) {
    part.adopted = draw.once_in(6);
    if (part.adopted) part.sets_gradients = false;
  }
  return model;
}

/// A divisor of n in [least, most]; 0 if there is none.
inline int draw_divisor(Draw& draw, int n, int least, int most) {
  std::vector<int> divisors;
  for (int d = least; d <= most; ++d)
    if (n % d == 0) divisors.push_back(d);
  return divisors.empty() ? 0 : draw.of(divisors);
}

/// Requirements of a script on the engines that run it.
struct Needs {
  bool unsynced = false;           ///< no_sync()
  bool replicas_unsynced = false;  ///< no_replica_sync()
  bool keeps = false;              ///< keep_unsharded(), where the setting allows it
  bool activations = false;        ///< frozen_parameters()
};
inline Needs needs_of(Script const& script) {
  Needs needs;
  for (auto const& op : script) {
    needs.activations = needs.activations || op.kind == Op::activations;
    if (op.value != 0.0f) continue;
    needs.unsynced = needs.unsynced || op.kind == Op::gradient_sync;
    needs.replicas_unsynced = needs.replicas_unsynced || op.kind == Op::replica_sync;
    needs.keeps = needs.keeps || op.kind == Op::reshard;
  }
  return needs;
}

inline Setting draw_setting(Draw& draw, Trial const& trial) {
  auto const needs = needs_of(trial.script);
  auto const uses = trial.model.parts.size();
  Setting setting;
  setting.sharding = draw.of({Sharding::full, Sharding::grad_op, Sharding::hybrid_full, Sharding::hybrid_full,
                              Sharding::hybrid_grad_op, Sharding::hybrid_grad_op, Sharding::none});
  if (needs.replicas_unsynced && draw.once_in(2)) setting.sharding = Sharding::hybrid_full;
  if (setting.hybrid()) {
    setting.group = draw.once_in(2) ? draw_divisor(draw, trial.ranks, 2, trial.ranks - 1) : 0;
    if (setting.group == 0) setting.group = draw_divisor(draw, trial.ranks, 1, trial.ranks);
  }
  auto const shards = setting.shards(trial.ranks);
  auto& options = setting.options;
  options.prefetch = draw.of({0, 1, 1, 2, 3, 20});
  if (draw.once_in(3)) options.backward_prefetch = draw.of({0, 1, 2, 20});
  if (draw.once_in(4)) options.max_ahead_bytes = draw.of<Index>({1, 700, 2048, 5000, 20000});
  options.keep_last = !draw.once_in(3);
  options.keep_root = !draw.once_in(3);
  bool const drops = setting.sharding == Sharding::full || setting.sharding == Sharding::hybrid_full;
  if (drops && draw.once_in(3)) options.reshard_ranks = draw_divisor(draw, shards, 2, shards - 1);
  if (options.reshard_ranks == 0) options.allow_keep_unsharded = draw.once_in(4);
  options.allow_no_sync = needs.unsynced || draw.once_in(6);
  options.allow_frozen_parameters = needs.activations || draw.once_in(12);
  if (setting.hybrid()) options.allow_no_replica_sync = needs.replicas_unsynced || draw.once_in(6);
  if (draw.once_in(2)) {
    options.bucket_bytes = draw.of<Index>({4, 256, 1024, 10000});
    options.first_bucket_bytes = draw.of<Index>({4, 300, 4096});
  }
  options.passes_ahead = draw.of({1, 2, 4, 4});
  if (setting.sharding != Sharding::none && draw.once_in(3))
    for (std::size_t unit = 0; unit < trial.model.units.size(); ++unit)
      setting.units.push_back(draw.of({UnitSharding::as_engine, UnitSharding::as_engine, UnitSharding::replicated,
                                       UnitSharding::other_resharding}));
  bool some_drop = false;
  for (std::size_t unit = 0; unit < trial.model.units.size(); ++unit)
    some_drop |= setting.strategy(unit).reshards_after_forward;
  setting.keeps = needs.keeps && (!some_drop || (shards == 1 && !trial.narrow) || options.allow_keep_unsharded);
  setting.offloads_moments = draw.once_in(4);
  setting.offloads_masters = trial.narrow && draw.once_in(3);
  setting.offloads_gradients = draw.once_in(4) && (trial.model.paths.empty() || !trial.model.zeros);
  if (setting.offloads_gradients && needs.replicas_unsynced) options.allow_no_sync = true;
  setting.inline_compute = draw.once_in(5);
  setting.traced = draw.once_in(6);
  setting.replicates_vectors = draw.once_in(5);
  options.trap_stale_pointers = draw.once_in(6);
  for (int list = draw.once_in(3) ? draw.between(1, 4) : 0; list > 0; --list) {
    Ahead ahead{draw.once_in(2), draw.below(uses), {}};
    for (int tries = draw.between(0, 4); tries > 0; --tries) {
      auto const use = draw.below(uses);
      if (ahead.backward ? use < ahead.at : use > ahead.at) ahead.uses.push_back(use);
    }
    setting.ahead.push_back(std::move(ahead));
  }
  return setting;
}

/// A path may have the segment: whole and in its order, once, or not at all.
inline bool fits(Segment const& segment, std::vector<std::size_t> const& path) {
  bool found = false;
  for (std::size_t at = 0; at < path.size(); ++at) {
    if (path[at] < segment.first || path[at] > segment.last) continue;
    if (found || path[at] != segment.first || path.size() - at < segment.size()) return false;
    for (std::size_t i = 0; i < segment.size(); ++i)
      if (path[at + i] != segment.first + i) return false;
    found = true;
    at += segment.size() - 1;
  }
  return true;
}

/// Segments whose units have no use outside, and that fit all paths: of one to four parts, or now and then of all.
inline std::vector<Segment> draw_segments(Draw& draw, Model const& model) {
  auto const& parts = model.parts;
  std::vector<Segment> segments;
  auto const fits_all = [&](Segment const& segment) {
    return std::all_of(model.paths.begin(), model.paths.end(), [&](auto const& path) { return fits(segment, path); });
  };
  if (Segment const all{0, parts.size() - 1}; draw.once_in(8) && fits_all(all)) return {all};
  for (std::size_t first = 0; first < parts.size(); ++first) {
    Segment segment{first, std::min(first + draw.below(4), parts.size() - 1)};
    while (segment.last > first && !fits_all(segment)) --segment.last;
    auto const inside = [&](std::size_t part) { return part >= segment.first && part <= segment.last; };
    bool whole = !draw.once_in(3) && fits_all(segment);
    for (std::size_t part = 0; part < parts.size(); ++part)
      for (std::size_t other = 0; other < parts.size(); ++other)
        whole = whole && (parts[part].unit != parts[other].unit || inside(part) == inside(other));
    if (!whole) continue;
    segments.push_back(segment);
    first = segment.last;
  }
  return segments;
}

/// Training steps of one to three micro-steps. Every pass reads other rows. Gradients that are not finite are clipped,
/// so that their step is skipped. Rates are small enough for weights to stay
/// small (see input_of).
inline Script draw_script(Draw& draw, Limits const& limits, OptimizerSpec const& optimizer) {
  Script script;
  Index data = 0;
  auto const flag = [&](Op::Kind kind, bool on) { script.push_back({.kind = kind, .value = on ? 1.0f : 0.0f}); };
  enum class Sync { always, last, any };
  auto const gradients = draw.of({Sync::always, Sync::always, Sync::last, Sync::any});
  auto const replicas = draw.of({Sync::always, Sync::always, Sync::last, Sync::any});
  bool const keeps = draw.once_in(3), activations = draw.once_in(4);
  auto const micro_steps = [&](int count, bool completes, bool finite = true) {
    for (int micro = 0; micro < count; ++micro) {
      bool const last = completes && micro + 1 == count;
      auto const on = [&](Sync sync) { return last || sync == Sync::always || (sync == Sync::any && draw.once_in(2)); };
      if (gradients != Sync::always) flag(Op::gradient_sync, on(gradients));
      if (replicas != Sync::always) flag(Op::replica_sync, on(replicas));
      if (keeps) flag(Op::reshard, draw.once_in(2));
      script.push_back({.kind = Op::forward, .data = data});
      script.push_back(
          {.kind = Op::backward, .data = data++, .value = (finite ? 1.0f : INFINITY) / static_cast<float>(count)});
      if (draw.once_in(8)) script.push_back({.kind = Op::evaluate, .data = data++});
      if (activations && draw.once_in(2)) script.push_back({.kind = Op::activations, .data = data++});
      if (draw.once_in(12)) script.push_back({.kind = Op::import});
    }
  };
  float const base = optimizer.adamw ? draw.of({0.001f, 0.01f, 0.03f}) : draw.of({0.02f, 0.05f, 0.1f});
  for (int step = draw.between(limits.least_steps, limits.most_steps); step > 0; --step) {
    if (draw.once_in(4)) script.push_back({.kind = Op::evaluate, .data = data++});
    if (draw.once_in(4)) {
      micro_steps(draw.between(1, 2), draw.once_in(2));
      script.push_back({.kind = Op::discard});
    }
    bool const finite = !(limits.infinities && draw.once_in(12));
    micro_steps(draw.of({1, 1, 2, 3}), true, finite);
    if (finite && draw.once_in(2)) script.push_back({.kind = Op::gradients});
    if (!finite || draw.once_in(2)) {
      Op clip{
          .kind = Op::clip, .data = finite && draw.once_in(2) ? 1 : 0, .value = draw.of({1e-3f, 0.05f, 1.0f, 1e30f})};
      clip.norm = draw.of({fsdp::NormKind::l2, fsdp::NormKind::l2, fsdp::NormKind::l1, fsdp::NormKind::inf});
      script.push_back(clip);
      // Clipped again: what is left of the norm, and less of it.
      if (finite && draw.once_in(3)) {
        clip.data = 1, clip.value = draw.of({INFINITY, 0.01f});
        script.push_back(clip);
      }
    }
    script.push_back({.kind = Op::step, .value = base * draw.of({1.0f, 0.5f, 0.0f, 1.5f})});
  }
  return script;
}

/// Freezes some tensors, but not all.
inline void freeze_tensors(Model& model, std::uint32_t salt) {
  auto const freezes = [&](PartSpec const& part, TensorSpec const& tensor) {  // tied ones alike
    return noise(salt, static_cast<Index>(fsdp::hash_name(part.prefix + "." + tensor.name) >> 8)) < 0.4f;
  };
  bool trains = false;
  for (auto const& part : model.parts)
    for (auto const& tensor : part.tensors)
      trains = trains || (tensor.numel() > 0 && !model.is_frozen(part.unit) && !freezes(part, tensor));
  if (!trains) return;
  for (auto& part : model.parts)
    for (auto& tensor : part.tensors) tensor.frozen = freezes(part, tensor);
}

inline OptimizerSpec draw_optimizer(Draw& draw) {
  OptimizerSpec how;
  how.adamw = draw.once_in(2);
  if (!how.adamw) how.momentum = draw.of({0.0f, 0.5f, 0.9f});
  how.weight_decay = draw.of({0.0f, 0.01f, 0.1f});
  how.second = draw.once_in(3);
  how.group = draw.once_in(3);
  return how;
}

/// No forward pass of a micro-step lies between the one at `at` and a step, or what reads its gradients.
inline bool completes(Script const& script, std::size_t at) {
  for (++at; at < script.size() && script[at].kind != Op::step; ++at)
    if (script[at].kind == Op::forward) return false;
  return true;
}

/// Passes follow paths, each of which has a part that trains: some parts of the model, now and then one of them again,
/// or runs of parts. Where gradients wait, the last pass before a step has every unit.
inline void draw_paths(Draw& draw, Trial& trial) {
  auto& model = trial.model;
  auto const needs = needs_of(trial.script);
  std::vector<std::size_t> trains;
  for (std::size_t p = 0; p < model.parts.size(); ++p)
    for (auto const& tensor : model.parts[p].tensors)
      if (tensor.numel() > 0 && !model.is_frozen(model.parts[p], tensor) && (trains.empty() || trains.back() != p))
        trains.push_back(p);
  bool const runs = draw.once_in(2);
  for (int paths = draw.between(1, 3); paths > 0 && !trains.empty(); --paths) {
    std::vector<std::size_t> path;
    for (std::size_t p = 0; p < model.parts.size(); ++p) {
      if (!draw.once_in(2)) continue;
      if (!runs) {
        path.push_back(draw.once_in(6) ? draw.below(model.parts.size()) : p);
        continue;
      }
      for (auto const end = std::min(p + 1 + draw.below(4), model.parts.size()); p < end; ++p) path.push_back(p);
      --p;
    }
    if (!runs || path.empty())
      path.insert(path.begin() + static_cast<std::ptrdiff_t>(draw.below(path.size() + 1)), draw.of(trains));
    auto const has = [&](std::size_t p) { return std::find(path.begin(), path.end(), p) != path.end(); };
    if (std::none_of(trains.begin(), trains.end(), has)) path.push_back(draw.of(trains));
    model.paths.push_back(std::move(path));
  }
  if (model.paths.empty()) return;
  model.zeros = draw.once_in(2);
  std::size_t path = 0;
  for (std::size_t i = 0; i < trial.script.size(); ++i) {
    auto& op = trial.script[i];
    if (op.kind != Op::backward) path = draw.once_in(4) ? 0 : 1 + draw.below(model.paths.size());
    if (op.kind == Op::forward && (needs.unsynced || needs.replicas_unsynced) && completes(trial.script, i)) path = 0;
    if (op.kind == Op::forward || op.kind == Op::backward || op.kind == Op::evaluate || op.kind == Op::activations)
      op.path = path;
  }
}

inline Trial draw_trial(Draw& draw, Limits const& limits) {
  Trial trial;
  trial.ranks = draw.between(limits.least_ranks, limits.most_ranks);
  trial.model = draw_model(draw, limits);
  trial.optimizer = draw_optimizer(draw);
  trial.script = draw_script(draw, limits, trial.optimizer);
  auto const units = trial.model.units.size();
  if (limits.freezes && units > 1 && draw.once_in(2)) {
    bool const lowest = draw.once_in(2);  // or any
    auto const count = 1 + draw.below(units - 1), trains = draw.below(units);
    for (std::size_t unit = 0; unit < units; ++unit)
      trial.model.frozen.push_back(lowest ? unit < count : unit != trains && draw.once_in(2));
  }
  if (limits.freezes && draw.once_in(2)) freeze_tensors(trial.model, static_cast<std::uint32_t>(draw.word()));
  if (limits.paths && draw.once_in(3)) draw_paths(draw, trial);
  trial.narrow = limits.narrow && draw.once_in(4);
  trial.optimizer.muon = limits.communicates && draw.once_in(3);
  trial.optimizer.centred = limits.communicates && draw.once_in(3);
  return trial;
}

}  // namespace trial
