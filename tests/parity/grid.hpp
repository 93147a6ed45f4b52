// SPDX-License-Identifier: Apache-2.0
// The parity grid: one small network trained under every combination of strategy, precision, prefetch, accumulation
// and kept units, with seeded delays, against the same run undelayed, one rank on the whole batch, and fp64.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/all_pairs.hpp"
#include "tests/support/delayed.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/toy_model.hpp"

namespace toy::grid {

enum class Sharding : std::size_t { full_shard, shard_grad_op, hybrid_shard, no_shard };
enum class Accumulation : std::size_t { none, synced, unsynced };  ///< one micro-step; three, reducing each or the last

inline constexpr std::size_t fp32_axis = 0, bf16_axis = 1, fp16_axis = 2;  ///< values of the axis of precisions

/// Strategy, precision, prefetch, accumulation, last unit kept.
inline fsdp::testing::Axes const axes{4, 3, 3, 3, 2};

struct Row {
  Sharding sharding = Sharding::full_shard;
  int prefetch = 1;
  Accumulation accumulation = Accumulation::none;
  bool keep_last = true;
  Setting setting = Setting::none;

  std::string text() const {
    static char const* const shardings[] = {"FullShard", "ShardGradOp", "HybridShard", "NoShard"};
    static char const* const accumulations[] = {"1 micro-step", "3 reduced each", "3 reduced once"};
    static char const* const settings[] = {"none", "every", "the ends", "even layers"};
    return fmt::format("{}, prefetch {}, {}, last unit {}, {} set gradients",
                       shardings[static_cast<std::size_t>(sharding)], prefetch,
                       accumulations[static_cast<std::size_t>(accumulation)], keep_last ? "kept" : "not kept",
                       settings[static_cast<std::size_t>(setting)]);
  }
};

/// The rows of `table` that have this precision.
inline std::vector<Row> rows_of(fsdp::testing::Table const& table, std::size_t precision) {
  std::vector<Row> rows;
  for (auto const& row : table)
    if (row[1] == precision)
      rows.push_back(
          {static_cast<Sharding>(row[0]), static_cast<int>(row[2]), static_cast<Accumulation>(row[3]), row[4] == 0});
  return rows;
}

inline constexpr int steps = 5;
inline constexpr float first_scale = 1024.0f, last_scale = 4096.0f;  ///< of fp16's loss: it grows every second step
inline constexpr std::int64_t most_delay_us = 2000;
inline constexpr Reference::Options optimizer{
    .lr = 0.125, .momentum = 0.5, .weight_decay = 0.0078125, .max_norm = 0.125};

/// Four units of unequal size: the tied ends and three blocks.
inline Shape shape(Setting setting = Setting::none) {
  Shape result;
  result.setting = setting;
  result.hidden = {29, 7, 40};
  return result;
}
inline int micro_steps(Row const& row) { return row.accumulation == Accumulation::none ? 1 : 3; }

/// Results of a run on rank 0.
struct Outcome {
  std::vector<fsdp::TensorInfo> tensors;
  std::vector<float> initial, gradients, parameters;  ///< gradients: of the first step, before clipping
  float loss_scale = 1.0f;

  bool same_bits(Outcome const& other) const {
    return !parameters.empty() && same(gradients, other.gradients) && same(parameters, other.parameters);
  }
  static bool same(std::vector<float> const& a, std::vector<float> const& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
};

/// Full gradients, from every rank's shards, tensor by tensor. @note Collective: yes; blocks.
template <class E>
std::vector<float> gradients(E& engine, float unscale) {
  engine.synchronize();
  std::string mine;
  for (std::size_t u = 0; u < engine.shards().size(); ++u)
    mine.append(reinterpret_cast<char const*>(engine.shards()[u].gradient),
                static_cast<std::size_t>(engine.shards()[u].shard_numel()) * sizeof(float));
  auto const texts = engine.world().exchange(mine, "gradients");
  std::vector<float> all;
  std::size_t offset = 0;
  for (std::size_t u = 0; u < engine.shards().size(); ++u) {
    auto const bytes = static_cast<std::size_t>(engine.shards()[u].shard_numel()) * sizeof(float);
    std::string full;
    for (int shard = 0; shard < engine.placement().shards; ++shard)
      full += texts[static_cast<std::size_t>(shard)].substr(offset, bytes);
    offset += bytes;
    for (auto const& tensor : engine.shards()[u].layout().tensors()) {
      for (auto i = tensor.range().begin; i < tensor.range().end; ++i) {
        float value = 0.0f;
        std::memcpy(&value, full.data() + static_cast<std::size_t>(i) * sizeof(float), sizeof value);
        all.push_back(value * unscale);
      }
    }
  }
  return all;
}

/// @param group  ranks per shard group of HybridShard
inline fsdp::ShardingStrategy strategy_of(Sharding sharding, int group) {
  switch (sharding) {
    case Sharding::shard_grad_op: return fsdp::ShardGradOp{};
    case Sharding::hybrid_shard: return fsdp::HybridShard<>{.group = group};
    case Sharding::no_shard: return fsdp::NoShard{};
    default: return fsdp::FullShard{};
  }
}

/// One rank's part of a run. @return on rank 0 the outcome
template <class P, class Comm>
Outcome train(Comm comm, Row const& row) {
  int const group = comm.size() % 2 == 0 ? 2 : comm.size();
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::EngineOptions options;
  options.prefetch = row.prefetch;
  options.keep_last = options.keep_root = row.keep_last;
  options.allow_no_sync = row.accumulation == Accumulation::unsynced;
  options.bucket_bytes = 3000;  // NoShard: units split and merged
  options.first_bucket_bytes = 700;
  fsdp::Engine<Comm, P> engine(mesh, strategy_of(row.sharding, group), options);
  Network network(engine, shape(row.setting));
  fsdp::Sgd sgd(engine, {.lr = static_cast<float>(optimizer.lr),
                         .momentum = static_cast<float>(optimizer.momentum),
                         .weight_decay = static_cast<float>(optimizer.weight_decay)});
  std::optional<fsdp::GradScaler<fsdp::Engine<Comm, P>>> scaler;
  if (std::is_same_v<typename P::Param, fsdp::fp16>)
    scaler.emplace(engine, fsdp::GradScalerOptions{.init_scale = first_scale, .growth_interval = 2});
  Outcome outcome;
  outcome.initial = parameters(engine);
  auto const micros = micro_steps(row);
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      auto const waits = engine.no_sync(row.accumulation == Accumulation::unsynced && micro + 1 < micros);
      network.step(step * micros + micro, 1.0f / static_cast<float>(micros), scaler ? scaler->scale() : nullptr);
    }
    if (step == 0) outcome.gradients = gradients(engine, scaler ? 1.0f / first_scale : 1.0f);
    auto const norm = fsdp::clip_grad_norm(engine, static_cast<float>(optimizer.max_norm));
    if (scaler) {
      scaler->step(sgd, static_cast<float>(optimizer.lr), norm);
    } else {
      sgd.step(norm);
    }
  }
  if (scaler) outcome.loss_scale = scaler->value();
  outcome.parameters = parameters(engine);
  outcome.tensors = fsdp::tensor_list(engine);
  engine.synchronize();
  return outcome;
}

/// A run on threads of this process.
template <class P>
Outcome train_threads(int ranks, Row const& row, std::uint64_t seed) {
  Outcome outcome;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    bool const first = comm.rank() == 0;
    auto mine = train<P>(Delayed(std::move(comm), seed, seed == 0 ? 0 : most_delay_us), row);
    if (first) outcome = std::move(mine);
  });
  return outcome;
}

// --- comparison
// ---------------------------------------------------------------------------------------------------------

/// Norm of a difference, whole and by tensor, relative to the norm of `of`.
struct Difference {
  double whole = 0.0, worst_tensor = 0.0;
  std::string worst_name;
};
inline Difference difference(std::vector<fsdp::TensorInfo> const& tensors, std::vector<float> const& a,
                             std::vector<double> const& of) {
  if (a.size() != of.size()) return {INFINITY, INFINITY, "sizes"};
  Difference result;
  double all = 0.0, all_norm = 0.0;
  std::size_t at = 0;
  for (auto const& tensor : tensors) {
    double sum = 0.0, norm = 0.0;
    for (std::int64_t i = 0; i < tensor.numel; ++i, ++at) {
      sum += std::pow(static_cast<double>(a[at]) - of[at], 2);
      norm += std::pow(of[at], 2);
    }
    all += sum, all_norm += norm;
    double const relative = std::sqrt(sum / norm);
    if (!(relative <= result.worst_tensor)) result.worst_tensor = relative, result.worst_name = tensor.name;
  }
  result.whole = std::sqrt(all / all_norm);
  return result;
}
inline std::vector<double> widened(std::vector<float> const& values) { return {values.begin(), values.end()}; }

/// The fp64 run that starts where `start` did.
struct Exact {
  std::vector<double> gradients, parameters;
  int clipped = 0;  ///< steps that clipping changed
};
inline Exact train_exactly(Outcome const& start, int micros) {
  Tensors initial;
  std::size_t at = 0;
  for (auto const& tensor : start.tensors) {
    initial.push_back({tensor.name, {}});
    for (std::int64_t i = 0; i < tensor.numel; ++i)
      initial.back().values.push_back(static_cast<double>(start.initial[at++]));
  }
  auto const flat = [](Tensors const& tensors) {
    std::vector<double> all;
    for (auto const& tensor : tensors) all.insert(all.end(), tensor.values.begin(), tensor.values.end());
    return all;
  };
  Reference reference(shape(), std::move(initial), optimizer);
  Exact exact;
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < micros; ++micro) reference.accumulate(step * micros + micro, 1.0 / micros);
    if (step == 0) exact.gradients = flat(reference.gradients());
    exact.clipped += reference.step();
  }
  exact.parameters = flat(reference.parameters());
  return exact;
}

/// docs/numerics.md: against one rank on the whole batch in the same precision, and against fp64.
template <class P>
void check_against_one(Outcome const& got, Outcome const& one, Exact const& exact) {
  CHECK(exact.clipped == steps);
  CHECK(got.loss_scale == (std::is_same_v<typename P::Param, fsdp::fp16> ? last_scale : 1.0f));  // no step was skipped
  REQUIRE(Outcome::same(got.initial, one.initial));
  if constexpr (std::is_same_v<typename P::Param, float> && std::is_same_v<typename P::Reduce, float>) {
    for (auto const& [a, b] :
         {std::pair(&got.gradients, &one.gradients), std::pair(&got.parameters, &one.parameters)}) {
      auto const off = difference(got.tensors, *a, widened(*b));
      INFO("most in tensor " << off.worst_name);
      CHECK(off.worst_tensor <= 1e-5);
    }
    // The reference is the same model.
    CHECK(difference(got.tensors, got.parameters, exact.parameters).worst_tensor <= 1e-5);
  } else {
    for (auto const& [a, b, x] : {std::tuple(&got.gradients, &one.gradients, &exact.gradients),
                                  std::tuple(&got.parameters, &one.parameters, &exact.parameters)})
      CHECK(difference(got.tensors, *a, *x).whole <= 1.5 * difference(got.tensors, *b, *x).whole);
  }
}

/// Reference runs for the rows; each is run once.
template <class P>
class Grid {
 public:
  explicit Grid(int ranks) : ranks_(ranks) {}

  /// Runs the row with delays and without, and checks everything that is promised of it. Rows differ in who begins the
  /// sums of gradients; what they are compared with never does it itself.
  void check(Row row, std::uint64_t seed) {
    row.setting = static_cast<Setting>(seed % 4);
    INFO(ranks_ << " ranks, " << row.text());
    auto const plain = train_threads<P>(ranks_, row, 0);
    CHECK(train_threads<P>(ranks_, row, seed).same_bits(plain));
    CHECK(plain.same_bits(canonical(row.sharding, row.accumulation)));
    check_against_one<P>(plain, unsharded(row.accumulation), exactly(row.accumulation));
  }

  /// The run of default options: prefetch and kept units do not move a bit.
  Outcome const& canonical(Sharding sharding, Accumulation accumulation) {
    auto const key = std::pair(sharding, accumulation);
    auto const found = canonical_.find(key);
    if (found != canonical_.end()) return found->second;
    return canonical_[key] = train_threads<P>(ranks_, {sharding, 1, accumulation, true}, 0);
  }

 private:
  Outcome const& unsharded(Accumulation accumulation) {
    auto const found = unsharded_.find(accumulation);
    if (found != unsharded_.end()) return found->second;
    return unsharded_[accumulation] = train_threads<P>(1, {Sharding::full_shard, 1, accumulation, true}, 0);
  }
  Exact const& exactly(Accumulation accumulation) {
    auto const micros = micro_steps({.accumulation = accumulation});
    auto const found = exact_.find(micros);
    if (found != exact_.end()) return found->second;
    return exact_[micros] = train_exactly(unsharded(accumulation), micros);
  }

  int ranks_;
  std::map<std::pair<Sharding, Accumulation>, Outcome> canonical_;
  std::map<Accumulation, Outcome> unsharded_;
  std::map<int, Exact> exact_;
};

/// Checks the rows of a table that have this precision.
template <class P>
void check_rows(std::size_t precision, fsdp::testing::Table const& table) {
  Grid<P> grid(4);
  std::uint64_t seed = precision * 1000;
  auto const rows = rows_of(table, precision);
  REQUIRE(!rows.empty());
  for (auto const& row : rows) grid.check(row, ++seed);
}

/// Three ranks: each strategy once, HybridShard with one group of three.
template <class P>
void check_three_ranks(std::uint64_t seed) {
  Grid<P> grid(3);
  grid.check({Sharding::full_shard, 2, Accumulation::synced, false}, seed);
  grid.check({Sharding::shard_grad_op, 1, Accumulation::unsynced, true}, seed + 1);
  grid.check({Sharding::hybrid_shard, 0, Accumulation::none, true}, seed + 2);
  grid.check({Sharding::no_shard, 1, Accumulation::synced, true}, seed + 3);
}

/// Where the order of every sum is the same, the strategy does not move a bit either.
template <class P>
void check_strategies_agree() {
  Grid<P> grid(4);
  for (auto const accumulation : {Accumulation::none, Accumulation::unsynced}) {
    auto const& full = grid.canonical(Sharding::full_shard, accumulation);
    for (auto const other : {Sharding::shard_grad_op, Sharding::hybrid_shard, Sharding::no_shard}) {
      INFO(Row({other, 1, accumulation, true}).text());
      CHECK(grid.canonical(other, accumulation).same_bits(full));
    }
  }
}

}  // namespace toy::grid
