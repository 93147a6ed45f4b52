// SPDX-License-Identifier: Apache-2.0
// A trial as data: a model, how its parameters are sharded, and what every rank calls. Drawn at random, printed as C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/fsdp.hpp"

namespace trial {

using Index = std::int64_t;

/// A tensor of a part.
struct TensorSpec {
  std::string name;
  std::vector<Index> shape;
  bool decay = true;
  float deviation = 0.3f;  ///< of the initial values
  bool frozen = false;

  Index numel() const {
    Index product = 1;
    for (auto const extent : shape) product *= extent;
    return product;
  }
};

/// One use of a unit. Parts of one unit that have the same prefix and tensors of the same name are tied.
struct PartSpec {
  std::string prefix;
  std::size_t unit = 0;
  std::vector<TensorSpec> tensors;  ///< at most one of each rank
  bool sets_gradients = false;
  bool adopted = false;  ///< an AdoptedUnit instead of a module

  bool has_rank(std::size_t rank) const {
    return std::any_of(tensors.begin(), tensors.end(), [=](auto const& tensor) { return tensor.shape.size() == rank; });
  }
};

struct Model {
  Index width = 1;     ///< of every activation
  Index max_rows = 1;  ///< a rank's rows of one micro-step: 0 to max_rows
  std::uint32_t salt = 0;
  std::vector<std::string> units;
  std::vector<PartSpec> parts;                    ///< in forward order
  std::vector<bool> frozen{};                     ///< by unit; empty: none is
  std::vector<std::vector<std::size_t>> paths{};  ///< orders of parts besides the declared one
  bool zeros = false;  ///< units that all passes of a step leave out get gradients of zeroes; false: none

  /// The parts of a pass. @param path  0: in the declared order
  std::vector<std::size_t> order(std::size_t path) const {
    if (path > 0) return paths[path - 1];
    std::vector<std::size_t> all(parts.size());
    for (std::size_t part = 0; part < all.size(); ++part) all[part] = part;
    return all;
  }
  std::size_t longest_order() const {
    auto longest = parts.size();
    for (auto const& path : paths) longest = std::max(longest, path.size());
    return longest;
  }
  bool is_frozen(std::size_t unit) const { return !frozen.empty() && frozen[unit]; }
  bool is_frozen(PartSpec const& part, TensorSpec const& tensor) const { return is_frozen(part.unit) || tensor.frozen; }
};

enum class Sharding : unsigned char { full, grad_op, hybrid_full, hybrid_grad_op, none };
/// Strategy of a unit, in an engine that shards: as the engine says, not sharded, or dropped after forward where others
/// are not.
enum class UnitSharding : unsigned char { as_engine, replicated, other_resharding };

/// Uses that are gathered ahead of the use `at`.
struct Ahead {
  bool backward = false;
  std::size_t at = 0;
  std::vector<std::size_t> uses;
};

/// Parts that are recomputed together.
struct Segment {
  std::size_t first = 0, last = 0;
  std::size_t size() const { return last - first + 1; }
};

/// How one engine is made. What differs between settings of one script moves work, not results.
struct Setting {
  Sharding sharding = Sharding::full;
  int group = 0;                      ///< ranks per shard group of the hybrids
  std::vector<UnitSharding> units{};  ///< by unit of the model; empty: all as the engine says
  fsdp::EngineOptions options{};
  std::vector<Ahead> ahead;
  std::vector<Segment> segments{};
  bool offloads_moments = false, offloads_masters = false, offloads_gradients = false;
  bool inline_compute = false;  ///< kernels run on the calling thread
  bool keeps = false;           ///< obeys Op::reshard: the options provide for it
  bool traced = false;
  bool replicates_vectors = false;  ///< tensors of one dimension are not sharded

  fsdp::ShardingStrategy strategy() const { return strategy_of(sharding); }
  fsdp::ShardingStrategy strategy(std::size_t unit) const {
    auto const differs = units.empty() || sharding == Sharding::none ? UnitSharding::as_engine : units[unit];
    if (differs == UnitSharding::replicated) return fsdp::NoShard{};
    if (differs == UnitSharding::as_engine) return strategy();
    switch (sharding) {
      case Sharding::full: return strategy_of(Sharding::grad_op);
      case Sharding::grad_op: return strategy_of(Sharding::full);
      case Sharding::hybrid_full: return strategy_of(Sharding::hybrid_grad_op);
      default: return strategy_of(Sharding::hybrid_full);
    }
  }
  fsdp::ShardingStrategy strategy_of(Sharding one) const {
    switch (one) {
      case Sharding::full: return fsdp::FullShard{};
      case Sharding::grad_op: return fsdp::ShardGradOp{};
      case Sharding::hybrid_full: return fsdp::HybridShard<>{.group = group};
      case Sharding::hybrid_grad_op: return fsdp::HybridShard<fsdp::ShardGradOp>{.group = group};
      case Sharding::none: break;
    }
    return fsdp::NoShard{};
  }
  bool hybrid() const { return sharding == Sharding::hybrid_full || sharding == Sharding::hybrid_grad_op; }
  int shards(int world) const { return sharding == Sharding::none ? 1 : hybrid() ? group : world; }
  /// Gradients travel in a narrower type.
  bool rounds(int world) const { return options.reduce_dtype.has_value() && world > 1; }
  int shards(int world, std::size_t unit) const { return strategy(unit).shards ? shards(world) : 1; }
};

struct OptimizerSpec {
  bool adamw = true;
  float momentum = 0.0f;  ///< of SGD
  float weight_decay = 0.0f;
  bool second = false;   ///< a second optimizer, SGD, owns some tensors: see owners_of
  bool group = false;    ///< one tensor of the first has settings of its own: `grouped`
  bool muon = false;     ///< Muon owns matrices
  bool centred = false;  ///< Centred owns some tensors
};
/// Settings of the second optimizer, and of the group of the first.
inline constexpr float second_momentum = 0.5f;
inline constexpr float grouped_lr_scale = 0.5f, grouped_weight_decay = 0.05f, grouped_momentum = 0.25f;

/// One call, or the calls of one pass.
struct Op {
  enum Kind : unsigned char {
    gradient_sync,  ///< value 0: inside no_sync()
    replica_sync,   ///< value 0: inside no_replica_sync()
    reshard,        ///< value 0: inside keep_unsharded()
    forward,        ///< parts [from, to) on the rows `data`
    backward,       ///< parts [from, to) in reverse, gradients times `value`
    evaluate,       ///< an evaluation of the rows `data`
    discard,        ///< discard_gradients()
    gradients,      ///< export_gradients
    import,         ///< import_shard of imported_value
    clip,           ///< clip_grad_norm(value, norm), and its value is read if data != 0
    step,           ///< the optimizer's step(value)
    activations,    ///< a forward and a backward pass inside frozen_parameters(), on the rows `data`
  };
  static constexpr std::size_t all = static_cast<std::size_t>(-1);

  Kind kind = step;
  Index data = 0;
  float value = 1.0f;
  std::size_t from = 0, to = all;  ///< of the parts of a pass
  fsdp::NormKind norm = fsdp::NormKind::l2;
  std::size_t path = 0;  ///< of a pass: 0, or one of Model::paths, counted from 1
};
using Script = std::vector<Op>;

struct Trial {
  int ranks = 1;
  Model model;
  OptimizerSpec optimizer;
  Script script;
  bool narrow = false;  ///< modules read parameters in bf16; master weights and gradients are fp32
};

/// Who owns the tensors that train.
struct Owners {
  using Names = std::vector<std::string>;
  Names first;
  Names second, muon, centred;  ///< empty: there is no such optimizer
  std::string grouped;          ///< the tensor of the first one's group; empty: there is none

  static bool has(Names const& names, std::string const& tensor) {
    return std::find(names.begin(), names.end(), tensor) != names.end();
  }
  bool are_several() const { return !second.empty() || !muon.empty() || !centred.empty(); }
};
inline Owners owners_of(Model const& model, OptimizerSpec const& optimizer) {
  Owners owners;
  auto& first = owners.first;
  Owners::Names known;
  for (auto const& part : model.parts)
    for (auto const& tensor : part.tensors) {
      auto const name = part.prefix + "." + tensor.name;
      if (model.is_frozen(part, tensor) || Owners::has(known, name)) continue;
      known.push_back(name);
      auto const draw = fsdp::hash_name(name);
      bool const second = optimizer.second && draw % 3 == 0;
      bool const centred = optimizer.centred && draw % 5 < 2, muon = optimizer.muon && tensor.shape.size() == 2;
      (second ? owners.second : centred ? owners.centred : muon ? owners.muon : first).push_back(name);
    }
  for (auto* const other : {&owners.second, &owners.centred, &owners.muon})
    if (first.empty()) std::swap(first, *other);
  if (optimizer.group && !first.empty()) owners.grouped = first[first.size() / 2];
  return owners;
}

/// Values of tensors by name, in declared order.
template <class T>
struct Named {
  std::string name;
  std::vector<T> values;
};
template <class T>
using Tensors = std::vector<Named<T>>;

/// Observations of one rank. Full tensors come to rank 0 alone.
template <class T>
struct Outcome {
  Tensors<T> initial, parameters;
  std::vector<Tensors<T>> gradients;  ///< of each Op::gradients
  std::vector<double> norms;          ///< of each Op::clip that reads one
  std::vector<T> outputs;             ///< the model's, of each forward and evaluation, row by row
  std::uint64_t program = 0;          ///< hash of the engine's program
};

/// A number in [0, 1) of (salt, place): inputs, targets and row counts are functions of it.
inline float noise(std::uint32_t salt, Index place) {
  auto h = salt ^ (static_cast<std::uint32_t>(place) * 2654435761u + 1u);
  h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
  return static_cast<float>(h >> 8) * (1.0f / 16777216.0f);
}

/// The rows of micro-step `data` that `rank` computes; sometimes none.
inline Index rows_of(Model const& model, Index data, int rank) {
  auto const draw = noise(model.salt + 7u, data * 64 + rank) * static_cast<float>(model.max_rows + 1);
  return std::min(static_cast<Index>(draw), model.max_rows);
}
inline Index rows_of_all(Model const& model, Index data, int ranks) {
  Index rows = 0;
  for (int rank = 0; rank < ranks; ++rank) rows += rows_of(model, data, rank);
  return rows;
}
/// Inputs lie in (0.5, 1.5), targets in (-2, -1): with small weights outputs stay above targets, so that a gradient is
/// a sum of terms of one sign, and its relative error is that of a few roundings.
inline float input_of(Model const& model, Index data, int rank, Index element) {
  return 0.5f + noise(model.salt + 11u, (data * 64 + rank) * 4096 + element);
}
inline float target_of(Model const& model, Index data, int rank, Index element) {
  return -2.0f + noise(model.salt + 13u, (data * 64 + rank) * 4096 + element);
}
/// The value that Op::import gives an element.
inline float imported_value(std::string const& tensor, Index element) {
  return 0.2f * noise(static_cast<std::uint32_t>(fsdp::hash_name(tensor)), element) - 0.1f;
}
/// The factor of the gradients of a rank's outputs, so that the mean over ranks is the mean over all rows.
inline float loss_scale(Model const& model, Index data, int ranks, float value) {
  auto const rows = rows_of_all(model, data, ranks);
  return rows == 0 ? 0.0f : value * static_cast<float>(ranks) / static_cast<float>(rows * model.width);
}

}  // namespace trial
