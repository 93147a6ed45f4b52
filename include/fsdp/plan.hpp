// SPDX-License-Identifier: Apache-2.0
// Plans of runs that do not fit here: units declared without a device and a communicator, descriptions of clusters
// of equal GPUs, and the predicted time of a step.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/streams.hpp"
#include "fsdp/detail/engine/declaration.hpp"
#include "fsdp/detail/engine/register_module.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/error.hpp"
#include "fsdp/options.hpp"
#include "fsdp/simulate.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"
#include "fsdp/version.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

/// Work of a module's kernels in one pass of a micro-step.
struct Load {
  double flop = 0;   ///< of matrix products and attention
  double bytes = 0;  ///< moved from and to memory by its other kernels
};
/// Work of one use.
struct Work {
  Load forward;   ///< work of the forward kernels
  Load backward;  ///< with its own recomputation, outside of segments
};

/// A module that reports its work: `Work work() const`.
template <class M>
concept SaysWork = requires(M const& user_module) {
  { user_module.work() } -> std::convertible_to<Work>;
};

/// Algorithm of a collective.
enum class Algorithm : unsigned char {
  ring,  ///< the latency grows with the number of nodes
  tree,  ///< it grows with its logarithm
  nccl   ///< all_reduce: the faster of both; the others: a ring, or with one rank a node the faster of both (PAT)
};
inline constexpr std::array<std::string_view, 3> algorithm_names{"ring", "tree", "nccl"};  ///< names in hardware files

/// Seconds, bytes and operations per second. Bandwidths are those that a large collective reaches, in one direction,
/// for each GPU.
struct Hardware {
  int gpus_per_node = 1;         ///< GPUs of each node
  double memory = 0;             ///< bytes of a GPU that a run may use
  double flops = 0;              ///< dense peak by the data sheet: what MFU refers to
  double efficiency = 1;         ///< fraction of `flops` that matrix products reach
  double memory_bandwidth = 0;   ///< of a GPU's memory, reached by copies
  double node_bandwidth = 0;     ///< from a GPU to others of its node
  double network_bandwidth = 0;  ///< from a GPU to other nodes
  double node_latency = 0;       ///< of one hop within a node
  double network_latency = 0;    ///< of one hop between nodes
  double launch = 0;             ///< fixed cost of a collective
  double step_overhead = 0;      ///< per step: host time that nothing overlaps
  double jitter = 0;             ///< per step and doubling of the nodes: delay of the slowest rank
  bool shared_link = true;       ///< gathers and reductions that overlap share the bandwidth: [Note: Shared links]
  Algorithm all_gather = Algorithm::nccl,  ///< algorithm of all-gathers
      reduce_scatter = Algorithm::nccl,    ///< algorithm of reduce-scatters
      all_reduce = Algorithm::nccl;        ///< algorithm of all-reduces

  int nodes(int gpus) const { return (gpus + gpus_per_node - 1) / gpus_per_node; }  ///< nodes that hold `gpus` GPUs
};

/// The ranks of a collective: so many, `stride` ranks apart.
struct Members {
  int ranks = 1;   ///< number of ranks
  int stride = 1;  ///< distance between neighbours, in ranks
  /// Number of ranks of the group in a node. The other ranks of the node run the same collective in groups of their
  /// own.
  int per_node(Hardware const& hardware) const {
    return std::clamp(hardware.gpus_per_node / std::max(stride, 1), 1, std::max(ranks, 1));
  }
};

/// Time of a collective by one algorithm, for the bytes of the whole buffer: launch + passes * (latency + bytes *
/// (ranks - 1) / ranks / bandwidth), with two passes for all_reduce. Within a node a GPU passes data on to the next
/// one; a node's part of the group shares the network bandwidth of as many GPUs. Latency by ring: (nodes - 1) hops of
/// the network and nodes * (ranks of a node - 1) in nodes; by tree: log2(nodes) hops, rounded up, and ranks of a node
/// - 1. (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.)
/// @param algorithm  ring or tree
inline Cost collective_cost(Hardware const& hardware, step::Primitive primitive, Members const& members,
                            Algorithm algorithm) {
  if (members.ranks <= 1) return {};
  auto const in_node = members.per_node(hardware), nodes = (members.ranks + in_node - 1) / in_node;
  auto const network = hardware.network_bandwidth * in_node;
  auto const bandwidth = nodes == 1     ? hardware.node_bandwidth
                         : in_node == 1 ? network
                                        : std::min(hardware.node_bandwidth, network);
  bool const ring = algorithm == Algorithm::ring;
  auto const among_nodes = ring ? nodes - 1.0 : std::ceil(std::log2(nodes));
  auto const inside_node = (ring ? double(nodes) : 1.0) * (in_node - 1);
  auto const passes = primitive == step::Primitive::all_reduce ? 2.0 : 1.0;
  return {hardware.launch + passes * (among_nodes * hardware.network_latency + inside_node * hardware.node_latency),
          passes * (members.ranks - 1) / members.ranks / bandwidth};
}

/// Adds the collective's costs by each algorithm that it may use.
inline void add_collective(Costs& costs, Hardware const& hardware, step::Primitive primitive, step::Group group,
                           Members const& members) {
  auto const algorithm = primitive == step::Primitive::all_gather       ? hardware.all_gather
                         : primitive == step::Primitive::reduce_scatter ? hardware.reduce_scatter
                                                                        : hardware.all_reduce;
  auto const add = [&](Algorithm by) {
    costs.collectives.push_back({primitive, group, collective_cost(hardware, primitive, members, by)});
  };
  if (algorithm != Algorithm::tree) add(Algorithm::ring);
  bool const chooses = primitive == step::Primitive::all_reduce || members.per_node(hardware) == 1;
  if (algorithm == Algorithm::tree || (algorithm == Algorithm::nccl && chooses)) add(Algorithm::tree);
}

/// @throws ConfigError with both numbers, if whole nodes are not used
inline void expect_whole_nodes(Hardware const& hardware, int gpus) {
  if (gpus > hardware.gpus_per_node && gpus % hardware.gpus_per_node != 0)
    fail<ConfigError>("{} GPUs are not a multiple of the {} GPUs of a node", gpus, hardware.gpus_per_node);
}

namespace detail {

/// Range of a kind of values. Values outside of it would make times infinite or zero.
struct HardwareRange {
  double lowest, highest;
  std::string_view expected;
};
inline constexpr HardwareRange hardware_amount{1, 1e30, "a number from 1 to 1e30"};
inline constexpr HardwareRange hardware_fraction{1e-6, 1, "a number from 1e-6 to 1"};
inline constexpr HardwareRange hardware_seconds{0, 1e6, "a number from 0 to 1e6"};

/// A value of a hardware file: name, kind, range.
struct HardwareField {
  using Member = double Hardware::*;  // nvcc writes the type itself with parentheses, of which g++ warns
  std::string_view name;
  Member member;
  bool required;
  HardwareRange range;
};
inline constexpr std::array hardware_fields{
    HardwareField{"memory", &Hardware::memory, true, hardware_amount},
    HardwareField{"flops", &Hardware::flops, true, hardware_amount},
    HardwareField{"efficiency", &Hardware::efficiency, true, hardware_fraction},
    HardwareField{"memory_bandwidth", &Hardware::memory_bandwidth, true, hardware_amount},
    HardwareField{"node_bandwidth", &Hardware::node_bandwidth, true, hardware_amount},
    HardwareField{"network_bandwidth", &Hardware::network_bandwidth, true, hardware_amount},
    HardwareField{"node_latency", &Hardware::node_latency, true, hardware_seconds},
    HardwareField{"network_latency", &Hardware::network_latency, true, hardware_seconds},
    HardwareField{"launch", &Hardware::launch, true, hardware_seconds},
    HardwareField{"step_overhead", &Hardware::step_overhead, false, hardware_seconds},
    HardwareField{"jitter", &Hardware::jitter, false, hardware_seconds},
};
struct AlgorithmField {
  using Member = Algorithm Hardware::*;
  std::string_view name;
  Member member;
};
inline constexpr std::array algorithm_fields{AlgorithmField{"all_gather", &Hardware::all_gather},
                                             AlgorithmField{"reduce_scatter", &Hardware::reduce_scatter},
                                             AlgorithmField{"all_reduce", &Hardware::all_reduce}};

constexpr std::string_view trimmed(std::string_view text) {
  constexpr std::string_view blanks = " \t\r";
  auto const first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

/// Reads a hardware file.
class HardwareReader {
 public:
  explicit HardwareReader(std::string_view label) : label_(label) {}

  Hardware read(std::string_view text) {
    while (!text.empty()) {
      auto const end = text.find('\n');
      ++line_;
      line(trimmed(text.substr(0, std::min(end, text.find('#')))));
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    if (!has_node_) missing("gpus_per_node");
    for (std::size_t i = 0; i < hardware_fields.size(); ++i)
      if (hardware_fields[i].required && !seen_[i]) missing(hardware_fields[i].name);
    return hardware_;
  }

 private:
  [[noreturn]] void missing(std::string_view what) const {
    fail<ConfigError>("{}: ends at line {} without a line '{} = VALUE'", label_, line_, what);
  }
  [[noreturn]] void refuse(std::string_view what, std::string_view expected, std::string_view got) const {
    fail<ConfigError>("{}: line {}: '{}': expected {}, got '{}'", label_, line_, what, expected, got);
  }
  void line(std::string_view text) {
    if (text.empty()) return;
    auto const equals = text.find('=');
    if (equals == std::string_view::npos)
      fail<ConfigError>("{}: line {}: expected 'name = value', got '{}'", label_, line_, text);
    auto const key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
    if (key == "gpus_per_node") return node(key, value);
    if (key == "shared_link") return link(key, value);
    for (auto const& field : algorithm_fields)
      if (key == field.name) return algorithm(field, value);
    for (std::size_t i = 0; i < hardware_fields.size(); ++i)
      if (key == hardware_fields[i].name) return number(i, value);
    fail<ConfigError>("{}: line {}: there is no value called '{}'", label_, line_, key);
  }
  void once(std::string_view key, bool& seen) const {
    if (seen) fail<ConfigError>("{}: line {}: '{}' is given twice", label_, line_, key);
    seen = true;
  }
  double parsed(std::string_view key, std::string_view expected, std::string_view value) const {
    double number{};
    auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc{} || end != value.data() + value.size() || !math::is_finite(number))
      refuse(key, expected, value);
    return number;
  }
  void number(std::size_t i, std::string_view value) {
    auto const& field = hardware_fields[i];
    auto const& range = field.range;
    once(field.name, seen_[i]);
    auto const number = parsed(field.name, range.expected, value);
    if (number < range.lowest || number > range.highest) refuse(field.name, range.expected, value);
    hardware_.*field.member = number;
  }
  void node(std::string_view key, std::string_view value) {
    once(key, has_node_);
    constexpr std::string_view expected = "a whole number from 1 to 1024";
    auto const number = parsed(key, expected, value);
    if (number < 1 || number > 1024 || number != std::floor(number)) refuse(key, expected, value);
    hardware_.gpus_per_node = static_cast<int>(number);
  }
  void link(std::string_view key, std::string_view value) {
    once(key, has_link_);
    if (value != "true" && value != "false") refuse(key, "true or false", value);
    hardware_.shared_link = value == "true";
  }
  void algorithm(AlgorithmField const& field, std::string_view value) {
    once(field.name, has_algorithm_[static_cast<std::size_t>(&field - algorithm_fields.data())]);
    for (std::size_t i = 0; i < algorithm_names.size(); ++i)
      if (value == algorithm_names[i]) {
        hardware_.*field.member = static_cast<Algorithm>(i);
        return;
      }
    refuse(field.name, "ring, tree or nccl", value);
  }

  std::string_view label_;
  Hardware hardware_;
  std::size_t line_ = 0;
  bool has_node_ = false, has_link_ = false;
  std::array<bool, algorithm_fields.size()> has_algorithm_{};
  std::array<bool, hardware_fields.size()> seen_{};
};

}  // namespace detail

/// @param label  what messages call the text: the name of its file
/// @throws ConfigError with the line, if a value is missing, outside of its range or unknown, or is given twice
[[gnu::cold]] inline Hardware read_hardware(std::string_view text, std::string_view label) {
  return detail::HardwareReader(label).read(text);
}

/// A value of a hardware file, as text.
struct HardwareValue {
  std::string_view name;  ///< key of its line, such as "flops"
  double value;           ///< in the unit of the member of Hardware with this name
};

/// The text of a hardware file with these values: lines that have one of them get the new one, others stay as they are,
/// and what has no line is appended. For programs that measure a part of a file.
[[gnu::cold]] inline std::string with_values(std::string_view text, std::vector<HardwareValue> const& values) {
  std::string result;
  std::vector<bool> written(values.size());
  auto const write = [&](std::size_t i) {
    result += formatted("{} = {}\n", values[i].name, values[i].value);
    written[i] = true;
  };
  while (!text.empty()) {
    auto const end = std::min(text.find('\n'), text.size());
    auto const line = text.substr(0, end);
    auto const key = detail::trimmed(line.substr(0, std::min(line.find('#'), line.find('='))));
    text.remove_prefix(std::min(end + 1, text.size()));
    std::size_t of = 0;
    while (of < values.size() && values[of].name != key) ++of;
    if (of == values.size() || written[of]) {
      if (of == values.size()) result.append(line) += '\n';
    } else {
      write(of);
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!written[i]) write(i);
  return result;
}

/// Work of a step.
struct Workload {
  std::vector<Work> uses;  ///< work of each use, in the declared order
  int micro_steps = 1;     ///< of a step, on each rank
  bool no_sync = false;    ///< only the last micro-step reduces
  bool clips = true;       ///< the gradient norm is measured before the update
};

/// Predicted seconds of a step that follows others. `step` may exceed `compute + exposed`, because streams may wait for
/// other work.
struct Forecast {
  double step = 0;           ///< the whole step, from the end of the step before it
  double compute = 0;        ///< kernels of the compute stream run: those of modules, norm and update
  double communication = 0;  ///< at least one collective runs
  double exposed = 0;        ///< seconds of communication while no such kernel runs
};

/// Costs of a step's operations. Local operations move bytes at the bandwidth of memory: those that they read and
/// write, AdamW's update 28 bytes an element and the norm 4.
[[gnu::cold]] inline Costs costs_on(Hardware const& hardware, Program const& program, StepInput const& input,
                                    Workload const& load) {
  using step::Group;
  using step::Primitive;
  Costs costs;
  auto const seconds = [&](Load const& of) {
    return of.flop / (hardware.flops * hardware.efficiency) + of.bytes / hardware.memory_bandwidth;
  };
  for (auto const& use : load.uses) {
    costs[PassKind::forward].push_back(seconds(use.forward));
    costs[PassKind::backward].push_back(seconds(use.backward));
  }
  ElementTypes types;
  auto gathered = types.master;
  for (auto const& unit : program.units)
    if (unit.trains()) types = unit.types, gathered = unit.gathered_type();
  auto const size = [](DType type) { return static_cast<double>(size_of(type)); };
  auto const moves = [&](Primitive primitive, double bytes) {
    costs[primitive].per_element = bytes / hardware.memory_bandwidth;
  };
  auto const gradient = size(types.gradient);
  moves(Primitive::cast, size(gathered) + size(types.parameter));
  moves(Primitive::copy, 2 * size(types.parameter));
  moves(Primitive::zero, gradient);
  moves(Primitive::accumulate, gradient + 2 * sizeof(float));
  moves(Primitive::add, 2 * gradient + sizeof(float));
  moves(Primitive::round, gradient + (program.wire ? size(*program.wire) : gradient));
  moves(Primitive::norm, sizeof(float));
  moves(Primitive::update, 7 * sizeof(float));
  auto const world = input.shards * input.replicas;
  add_collective(costs, hardware, Primitive::all_gather, Group::gather, {input.shards});
  add_collective(costs, hardware, Primitive::all_gather, Group::kept, {input.reshard_ranks});
  add_collective(costs, hardware, Primitive::reduce_scatter, Group::reduce, {input.shards});
  add_collective(costs, hardware, Primitive::all_reduce, Group::replicas, {input.replicas, input.shards});
  add_collective(costs, hardware, Primitive::all_reduce, Group::all_replicas, {world});
  if (hardware.shared_link) costs.link.fill(0);
  costs.link[static_cast<std::size_t>(Group::none)] = Costs::no_link;
  return costs;
}

namespace detail {

/// Joins spans: the result covers the same time without overlap, in order.
inline std::vector<TimeSpan> united(std::vector<TimeSpan> spans) {
  std::sort(spans.begin(), spans.end(), [](auto const& a, auto const& b) { return a.begin < b.begin; });
  std::vector<TimeSpan> all;
  for (auto const& span : spans) {
    if (span.end <= span.begin) continue;
    if (all.empty() || span.begin > all.back().end) {
      all.push_back(span);
    } else {
      all.back().end = std::max(all.back().end, span.end);
    }
  }
  return all;
}
/// Spans of a step between its beginning and its end, in an endless sequence of steps: work that a step begins before
/// the last step ends is begun that early by the next step too.
inline std::vector<TimeSpan> periodic(std::vector<TimeSpan> spans, double begin, double end) {
  auto const period = end - begin;
  for (std::size_t i = 0, size = spans.size(); i < size; ++i) {
    if (spans[i].begin >= begin) continue;
    spans.push_back({spans[i].begin + period, std::min(spans[i].end, begin) + period});
    spans[i].begin = begin;
  }
  return united(std::move(spans));
}
inline double length(std::vector<TimeSpan> const& spans) {
  double sum = 0;
  for (auto const& span : spans) sum += span.end - span.begin;
  return sum;
}

/// Feeds a run's operations to a simulator as they come, and keeps the spans of the last step.
class Timing {
 public:
  Timing(Program const& program, Costs const& costs) : simulator_(program, {costs}) {}

  void operator()(step::Operation const& operation, step::RunPosition const& at, step::Contents const& contents) {
    auto next = step::executed(operation, at, contents);
    if (next.operation.beside && !waiting_.empty()) {
      simulator_.await(next.operation);
    } else {
      flush();
    }
    waiting_.push_back(next);
  }
  /// @return when everything so far has ended
  double flush() {
    for (auto const& next : waiting_) {
      simulator_.run(next);
      auto const span = simulator_.spans().back();
      end_ = std::max(end_, span.end);
      if (step::is_collective(next.operation.primitive)) collectives_.push_back(span);
      if (next.operation.stream == StreamKind::compute && step::moves(next.operation.primitive))
        computes_.push_back(span);
    }
    waiting_.clear();
    return end_;
  }
  /// Begins to measure.
  void restart() {
    flush();
    simulator_.forget_spans();
    collectives_.clear();
    computes_.clear();
  }
  std::vector<TimeSpan> const& collectives() const { return collectives_; }
  std::vector<TimeSpan> const& computes() const { return computes_; }

 private:
  Simulator simulator_;
  std::vector<step::Executed> waiting_;  ///< a computation, and its accesses to further units
  std::vector<TimeSpan> collectives_, computes_;
  double end_ = 0;
};

}  // namespace detail

/// Predicts from known costs, for example measured ones.
/// @param program  compiled from `input`
[[gnu::cold]] inline Forecast forecast(Program const& program, Workload const& load, Costs const& costs) {
  detail::Timing timing(program, costs);
  auto const visit = [&](auto const&... what) { timing(what...); };
  step::Run run(program, visit);
  run.prepare();
  double begin = 0, end = 0;
  for (int step = 0; step < 2; ++step) {
    timing.restart();
    begin = end;
    for (int micro = 0; micro < load.micro_steps; ++micro)
      run.micro_step({.gradient_sync = !load.no_sync || micro + 1 == load.micro_steps});
    if (load.clips) run.norm();
    run.update();
    end = timing.flush();
  }
  auto const computes = detail::periodic(timing.computes(), begin, end);
  auto const collectives = detail::periodic(timing.collectives(), begin, end);
  auto busy = computes;
  busy.insert(busy.end(), collectives.begin(), collectives.end());
  Forecast result;
  result.step = end - begin;
  result.compute = detail::length(computes);
  result.communication = detail::length(collectives);
  result.exposed = detail::length(detail::united(std::move(busy))) - result.compute;
  return result;
}
/// @param program  compiled from `input`
[[gnu::cold]] inline Forecast forecast(Program const& program, StepInput const& input, Workload const& load,
                                       Hardware const& hardware) {
  auto result = forecast(program, load, costs_on(hardware, program, input, load));
  result.step += hardware.step_overhead;
  auto const world = input.shards * input.replicas;
  for (int nodes = hardware.nodes(world); nodes > 1; nodes = (nodes + 1) / 2) result.step += hardware.jitter;
  if (load.clips && world > 1) {  // the norm's digits are summed over all ranks before the update
    auto const by = [&](Algorithm algorithm) {
      return collective_cost(hardware, step::Primitive::all_reduce, {world}, algorithm).fixed;
    };
    auto const sum = std::min(by(Algorithm::ring), by(Algorithm::tree));
    result.step += sum;
    result.communication += sum;
    result.exposed += sum;
  }
  return result;
}

/// Registers modules as an engine of `ranks` ranks does, with the same code, and allocates nothing:
///
///     fsdp::plan::Declaration<fsdp::Bf16> declared(16384, fsdp::FullShard{});
///     for (auto const& layer : layers) declared.shard(layer, layer.name);
///     auto const memory = fsdp::memory_plan(declared.input());
///
/// @tparam P  precision policy
template <PrecisionPolicy P = Fp32>
class Declaration {
  using Declared = fsdp::detail::Declaration<P>;

 public:
  /// @throws ConfigError as the engine's constructor
  Declaration(int ranks, ShardingStrategy const& strategy, EngineOptions const& options = {})
      : declared_(place(0, ranks, strategy), strategy, options) {}

  /// Adds a unit: see Engine::add_unit.
  UnitId add_unit(std::string_view unit_name, UnitOptions const& options = {}) {
    declared_.expect_idle(formatted("unit '{}' was added", unit_name));
    return declared_.add_unit(unit_name, options);
  }
  /// Adds the next module in forward order, with a unit of its own. See Engine::shard.
  template <Module M>
  UseId shard(M const& user_module, std::string_view prefix, UnitOptions const& options = {}) {
    fsdp::detail::Transaction<Declared> const transaction(declared_, prefix);
    return add(user_module, prefix, declared_.add_unit(prefix, options));
  }
  /// Adds the next module in forward order, in a unit that it shares.
  template <Module M>
  UseId shard(M const& user_module, std::string_view prefix, UnitId unit) {
    fsdp::detail::Transaction<Declared> const transaction(declared_, prefix, unit);
    return add(user_module, prefix, unit);
  }
  /// Adds modules in turn, each with a unit of its own: "prefix.0", "prefix.1", ...
  template <Module M>
  void shard(std::vector<M> const& modules, std::string_view prefix, UnitOptions const& options = {}) {
    fsdp::detail::Transaction<Declared> const transaction(declared_, prefix);
    auto const before = work_.size();
    try {
      for (std::size_t i = 0; i < modules.size(); ++i) {
        auto const name = formatted("{}.{}", prefix, i);
        add(modules[i], name, declared_.add_unit(name, options));
      }
    } catch (...) {
      work_.resize(before);
      throw;
    }
  }
  /// Declares a segment: see Engine::recompute_segment.
  void recompute_segment(UseId first, UseId last) { declared_.add_segment(first.index, last.index); }

  /// Input of a plan, as Engine::plan_input() of such an engine would return.
  MemoryPlanInput input() const { return declared_.plan_input(); }
  /// Work of each use; without FLOP and bytes for modules that have no work().
  std::vector<Work> const& work() const { return work_; }

 private:
  template <class M>
  UseId add(M const& user_module, std::string_view name, UnitId unit) {
    auto const use = fsdp::detail::register_module(declared_, unit, user_module, name).use;
    Work work;
    if constexpr (SaysWork<M>) work = user_module.work();
    work_.push_back(work);
    return {use};
  }

  Declared declared_;
  std::vector<Work> work_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
