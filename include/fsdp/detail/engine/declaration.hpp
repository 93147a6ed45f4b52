// SPDX-License-Identifier: Apache-2.0
// The declaration of an engine: units and the tensors in them, the order of their uses, prefetch lists.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/uses.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"
#include "fsdp/strategy.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A tensor that a module or the caller names.
struct DeclaredTensor {
  std::string name;  ///< full
  std::vector<std::int64_t> shape;
  TensorOptions options{};
  bool skips_gradient = false;  ///< backward does not write a gradient that is not wanted: see SkipsGradients
  /// Backward assigns the gradient if it is the first of a sum, and adds otherwise: `scope.unit(of).begin_write(index)`
  /// says which. If this holds for all tensors of all uses of a unit, the engine zeroes no gradient of the unit. A
  /// gradient that backward does not write must be set to zero.
  bool sets_gradient = false;
};

namespace detail {

/// Grows while modules are registered. Host logic only.
template <class P>
class DeclaredUnits {
 public:
  using Unit = FlatParam<P>;
  using Units = std::vector<std::unique_ptr<Unit>>;

  /// Of the units that a use has, the one of this number; 0: the unit `first`.
  Unit& unit(std::size_t first, std::size_t number) const {
    return *units_[number == 0 ? first : units_[first]->beside[number - 1]];
  }
  Units& units() { return units_; }
  Units const& units() const { return units_; }
  ShardingStrategy const& strategy() const { return strategy_; }

  /// @throws ConfigError if the unit shards otherwise than the engine
  [[gnu::cold]] UnitId add_unit(std::string_view unit_name, UnitOptions const& options);

  /// Adds a tensor of a module to a unit of the module.
  /// @param id     the unit that the module was registered with
  /// @param fp32   the tensor's elements are fp32 in every precision
  /// @param named  places of the module's earlier tensors; gets this one's
  /// @throws UsageError if the module has named the tensor before; and as FlatLayout::add
  [[gnu::cold]] void add_tensor(UnitId id, DeclaredTensor tensor, bool fp32, std::vector<TensorId>& named);
  /// A module has named tensors, of the unit and of those beside it.
  /// @throws UsageError if another unit has one of them
  [[gnu::cold]] void end_module(UnitId id, std::vector<TensorId> const& tensors) {
    for (auto const place : tensors) {
      auto const& unit = this->unit(id.index, unit_number(place));
      expect_own_name(unit, unit.layout().tensors()[tensor_index(place)].name);
      named_.push_back(tensor_id(unit.index(), tensor_index(place)));
    }
    ends_.push_back(named_.size());
  }

 protected:
  /// @param where  under `strategy`
  DeclaredUnits(Placement const& where, ShardingStrategy const& strategy) : where_(where), strategy_(strategy) {}

  /// The module of the use has tensors, and all are frozen.
  [[gnu::cold]] bool is_frozen(std::size_t use) const {
    bool some = false;
    for (auto at = ends_[use]; at-- > (use == 0 ? 0 : ends_[use - 1]);) {
      if (!units_[unit_number(named_[at])]->frozen) return false;
      some = true;
    }
    return some;
  }
  static std::string described(ShardingStrategy const& strategy) {
    return strategy.grouped ? formatted("{} with groups of {}", strategy.name, strategy.group)
                            : std::string(strategy.name);
  }

  Placement where_;
  ShardingStrategy strategy_;
  Units units_;
  std::vector<std::size_t> named_;  ///< use by use: tensor_id(unit, tensor) of its module's tensors
  std::vector<std::size_t> ends_;   ///< by use: where its tensors end there

  /// The state that roll_back() returns to: the number of units, named tensors, uses and tensors; then of each unit
  /// that a module is added to, and of those beside it, its index, tensors, promises, and units beside it.
  using SavePoint = std::vector<std::size_t>;
  /// @param to  the unit that a module is about to be added to, if that is there already
  [[gnu::cold]] SavePoint save_point(UnitId to) const {
    SavePoint now{units_.size(), named_.size(), ends_.size(), tensors_.size()};
    if (to.index >= units_.size()) return now;
    auto const add = [&](std::size_t index) {
      auto const& unit = *units_[index];
      now.insert(now.end(), {index, unit.layout().tensors().size(),
                             (unit.sets_gradients ? 1u : 0u) + (unit.skips_gradients ? 2u : 0u), unit.beside.size()});
    };
    add(to.index);
    for (auto const beside : units_[to.index]->beside) add(beside);
    return now;
  }
  /// Modules could not be added: forgets what of them is there.
  [[gnu::cold]] void roll_back(SavePoint const& to) noexcept {
    tensor_names_.truncate(to[3]);
    while (tensors_.size() > to[3]) tensors_.pop_back();
    unit_names_.truncate(to[0]);
    while (units_.size() > to[0]) units_.pop_back();
    while (named_.size() > to[1]) named_.pop_back();
    while (ends_.size() > to[2]) ends_.pop_back();
    for (std::size_t at = 4; at < to.size(); at += 4) {
      auto& unit = *units_[to[at]];
      unit.layout().truncate(to[at + 1]);
      unit.sets_gradients = to[at + 2] % 2 != 0;
      unit.skips_gradients = to[at + 2] / 2 != 0;
      while (unit.beside.size() > to[at + 3]) unit.beside.pop_back();
    }
  }

 private:
  [[gnu::cold]] UnitId add_unit(std::string_view unit_name, ShardingStrategy const& strategy) {
    bool const as_engine =
        strategy.grouped == strategy_.grouped && (!strategy.grouped || strategy.group == strategy_.group);
    if (strategy.shards && !(strategy_.shards && as_engine))
      fail<ConfigError>(
          "rank {}: unit '{}' has strategy {}, and its engine {}: a unit must shard over the same ranks as its engine, "
          "or not at all",
          where_.rank, unit_name, described(strategy), described(strategy_));
    FSDP_EXPECTS(
        unit_names_.find(unit_name, [&](std::size_t i) { return units_[i]->name() == unit_name; }) == NameTable::none,
        "rank {}: the engine already has a unit '{}'; give each unit its own name", where_.rank, unit_name);
    unit_names_.reserve();
    units_.push_back(std::make_unique<Unit>(units_.size(), std::string(unit_name), strategy));
    unit_names_.add(unit_name);
    return {units_.size() - 1};
  }

  static constexpr bool all_fp32 = std::is_same_v<typename P::Param, float> &&
                                   std::is_same_v<typename P::Reduce, float> &&
                                   std::is_same_v<typename P::Master, float>;

  /// @return the number, among a module's units, of the one for tensors with such options; adds it if there is none.
  /// 0: the unit that the module was registered with
  [[gnu::cold]] std::size_t unit_for(UnitId id, TensorOptions const& options, bool fp32) {
    auto const& first = *units_[id.index];
    bool const is_frozen = first.frozen || options.frozen;
    fp32 = fp32 && !all_fp32;
    auto const strategy = options.strategy.value_or(first.strategy());
    if (is_frozen == first.frozen && !fp32 && strategy == first.strategy()) return 0;
    for (std::size_t i = 0; i < first.beside.size(); ++i) {
      auto const& unit = *units_[first.beside[i]];
      if (unit.frozen == is_frozen && unit.fp32 == fp32 && unit.strategy() == strategy) return i + 1;
    }
    std::string kind;
    auto const add = [&](bool differs, std::string_view what) {
      if (!differs) return;
      kind += kind.empty() ? "" : ", ";
      kind += what;
    };
    add(is_frozen != first.frozen, "frozen");
    add(fp32, "fp32");
    add(strategy != first.strategy(), strategy.name);
    auto const added = add_unit(formatted("{} ({})", first.name(), kind), strategy).index;
    units_[added]->frozen = is_frozen;
    units_[added]->fp32 = fp32;
    units_[added]->first = id.index;
    units_[id.index]->beside.push_back(added);
    return units_[id.index]->beside.size();
  }
  /// @throws UsageError if another unit than `unit` has a tensor of this name
  [[gnu::cold]] void expect_own_name(Unit const& unit, std::string const& name) const {
    auto const found = tensor_names_.find(name, [&](std::size_t i) {
      auto const other = unit_number(tensors_[i]);
      return other != unit.index() && units_[other]->layout().tensors()[tensor_index(tensors_[i])].name == name;
    });
    if (found == NameTable::none) return;
    auto const& other = *units_[unit_number(tensors_[found])];
    FSDP_EXPECTS(other.first != unit.first,
                 "rank {}: tensor '{}' is in unit '{}' and in unit '{}': modules that share a tensor declare it with "
                 "the same TensorOptions::frozen and strategy, and both or none of them in fsdp::in_fp32",
                 where_.rank, name, units_[std::min(unit.index(), other.index())]->name(),
                 units_[std::max(unit.index(), other.index())]->name());
    fail<UsageError>(
        "rank {}: units '{}' and '{}' both have a tensor '{}'; tensors are saved by name: give them "
        "different names, or put modules that share a tensor into one unit",
        where_.rank, other.name(), unit.name(), name);
  }

  NameTable unit_names_;              ///< of units_
  std::vector<std::size_t> tensors_;  ///< tensor_id(unit, tensor) of all tensors, in the order of their declaration
  NameTable tensor_names_;            ///< of tensors_
};

template <class P>
void DeclaredUnits<P>::add_tensor(UnitId id, DeclaredTensor tensor, bool fp32, std::vector<TensorId>& named) {
  auto const number = unit_for(id, tensor.options, fp32);
  auto& unit = this->unit(id.index, number);
  auto const& name = tensor.name;
  std::size_t index = 0;
  auto const before = unit.layout().tensors().size();
  try {
    index = unit.layout().add(
        {name, std::move(tensor.shape), 0, 0, tensor.options.decay, tensor.options.init, tensor.options.tag});
  } catch (UsageError const& error) {
    fail<UsageError>("rank {}: {}", where_.rank, error.what());
  }
  unit.sets_gradients = unit.sets_gradients && tensor.sets_gradient;
  unit.skips_gradients = unit.skips_gradients && tensor.skips_gradient;
  auto const place = tensor_id(number, index);
  if (index == before) {  // a new one
    tensor_names_.reserve();
    tensors_.push_back(tensor_id(unit.index(), index));
    tensor_names_.add(name);
  } else {
    for (auto const& earlier : named)
      FSDP_EXPECTS(earlier != place,
                   "rank {}: a module names its tensor '{}' twice: each tensor needs its own name, and a tensor that "
                   "is used in two places is named once",
                   where_.rank, name);
  }
  named.push_back(place);
}

template <class P>
UnitId DeclaredUnits<P>::add_unit(std::string_view unit_name, UnitOptions const& options) {
  auto const unit = add_unit(unit_name, options.strategy.value_or(strategy_));
  units_[unit.index]->frozen = options.frozen;
  return unit;
}

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// Grows until the engine is sealed; then compared over ranks, and planned from. Host logic only.
template <class P>
class Declaration : public DeclaredUnits<P> {
  using Base = DeclaredUnits<P>;

 public:
  using typename Base::Unit;
  using typename Base::Units;

  /// @param where  under `strategy`
  /// @throws ConfigError if an option is out of range, or means nothing under this strategy
  [[gnu::cold]] Declaration(Placement const& where, ShardingStrategy const& strategy, EngineOptions const& options)
      : Base(where, strategy), options_(options) {
    auto const rank = where.rank;
    if (options.prefetch < 0 || backward_prefetch() < 0)
      fail<ConfigError>("rank {}: prefetch must not be negative, got {} for forward and {} for backward", rank,
                        options.prefetch, backward_prefetch());
    if (options.max_ahead_bytes < 0)
      fail<ConfigError>("rank {}: max_ahead_bytes must not be negative, got {}", rank, options.max_ahead_bytes);
    if (options.passes_ahead < 1)
      fail<ConfigError>("rank {}: passes_ahead must be at least 1, got {}", rank, options.passes_ahead);
    if (options.bucket_bytes <= 0 || options.first_bucket_bytes <= 0)
      fail<ConfigError>("rank {}: bucket sizes must be positive, got {} and {} bytes", rank, options.bucket_bytes,
                        options.first_bucket_bytes);
    if (options.allow_no_replica_sync && !strategy.grouped)
      fail<ConfigError>("rank {}: allow_no_replica_sync is for HybridShard: {} has no replicas of shards", rank,
                        strategy.name);
    if (auto const type = options.reduce_dtype; type && *type != written && !wire())
      fail<ConfigError>("rank {}: reduce_dtype: backward writes {}: expected {}, got {}", rank, fsdp::name(written),
                        written == DType::f32 ? "fp32, bf16 or fp16" : fsdp::name(written), described(*type));
    if (options.reshard_ranks == 0) return;
    if (!strategy.reshards_after_forward)
      fail<ConfigError>("rank {}: reshard_ranks is {}, but strategy {} does not reshard after forward; expected 0",
                        rank, options.reshard_ranks, strategy.name);
    if (options.reshard_ranks <= 1 || options.reshard_ranks >= where.shards ||
        where.shards % options.reshard_ranks != 0)
      fail<ConfigError>(
          "rank {}: reshard_ranks must be more than 1, fewer than the {} ranks of the shard group, and divide it; "
          "got {}",
          rank, where.shards, options.reshard_ranks);
    if (options.allow_keep_unsharded)
      fail<ConfigError>("rank {}: set either reshard_ranks or allow_keep_unsharded, not both", rank);
  }

  /// The state that roll_back() returns to. @param to  as in DeclaredUnits::save_point
  [[gnu::cold]] std::vector<std::size_t> save_point(UnitId to) const;
  [[gnu::cold]] void roll_back(std::vector<std::size_t> const& to) noexcept;
  /// Functions of the caller are about to be called that must not declare anything. @param with  a literal; empty: they
  /// have returned
  void set_busy(std::string_view with) { busy_ = with; }
  /// A module's tensors have been added, to the unit and to those beside it: adds its use. @return the use's number
  /// @throws UsageError as end_module
  [[gnu::cold]] std::size_t add_use(UnitId unit, std::string_view module, std::vector<TensorId> const& tensors);
  /// @param action  the refused action, for the message
  /// @throws UsageError while functions of the caller are called that must not declare anything
  [[gnu::cold]] void expect_idle(std::string_view action) const {
    FSDP_EXPECTS(
        busy_.empty(),
        "rank {}: {} while {}: describe() and constructors of modules, and functions that give initial values, "
        "must not add anything to the engine that calls them, nor seal it",
        where_.rank, action, busy_);
  }

  Offloaded offload;  ///< what lies in host memory
  UseOrder const& order() const { return order_; }
  /// nullptr: there is none besides the declared order.
  std::unique_ptr<PathList>& paths() { return paths_; }
  std::unique_ptr<PathList> const& paths() const { return paths_; }
  /// The declared order among them.
  std::size_t path_count() const { return paths_ ? paths_->size() : 1; }
  EngineOptions const& options() const { return options_; }
  /// The type that gradients are rounded to for the sum over ranks; not set: they are not rounded.
  std::optional<DType> wire() const {
    auto const type = options_.reduce_dtype;
    bool const narrow = type == DType::bf16 || type == DType::f16;
    return narrow && written == DType::f32 ? type : std::nullopt;
  }

  /// @return `use`
  /// @throws UsageError if there is no such use
  std::size_t expect_use(std::size_t use) const {
    FSDP_EXPECTS(use != UseId{}.index,
                 "rank {}: a use id names no module; take the id of a sharded module or adopted unit", where_.rank);
    FSDP_EXPECTS(use < order_.size(),
                 "rank {}: there is no use {}: modules have been added for {} uses, counted from 0", where_.rank, use,
                 order_.size());
    return use;
  }

  /// Sets which uses are gathered ahead of one use of one pass, in place of those that the prefetch depth gives.
  [[gnu::cold]] void set_prefetch(Pass pass, std::size_t use, std::vector<std::size_t> ahead) {
    expect_use(use);
    for (auto const next : ahead) {
      expect_use(next);
      FSDP_EXPECTS(pass == Pass::forward ? next > use : next < use,
                   "rank {}: a prefetch list names '{}', which does not come after '{}' in {}", where_.rank,
                   order_.module_name(next), order_.module_name(use), name(pass));
    }
    lists_.push_back({pass, use, std::move(ahead)});
  }

  /// The uses `first` to `last` are recomputed together: see [Note: Segments].
  /// @throws UsageError if they are no segment; nothing has changed then
  [[gnu::cold]] void add_segment(std::size_t first, std::size_t last) {
    auto const quoted = [&](std::size_t use) { return "'" + std::string(order_.module_name(use)) + "'"; };
    std::string wrong;
    if (first > last) wrong = "ends before it begins; name its first module first";
    for (auto use = first; use <= last && wrong.empty(); ++use) {
      if (order_.segment(use) != UseOrder::none) wrong = "overlaps another one: " + quoted(use) + " is in both";
      auto other = order_.last_use(order_.unit(use));
      while (other != UseOrder::none && first <= other && other <= last) other = order_.previous_use(other);
      if (other != UseOrder::none)
        wrong = "contains " + quoted(use) + ", but not " + quoted(other) + ", which uses the same unit '" +
                units_[order_.unit(use)]->name() + "'; leave both out";
    }
    FSDP_EXPECTS(wrong.empty(), "rank {}: the segment '{}' to '{}' {}", where_.rank, order_.module_name(first),
                 order_.module_name(last), wrong);
    for (auto use = first; use <= last; ++use) order_.set_segment(use, first);
    try {
      if (paths_) paths_->expect_segments(order_);
    } catch (...) {
      for (auto use = first; use <= last; ++use) order_.set_segment(use, UseOrder::none);
      throw;
    }
  }

  /// @throws UsageError if the unit is in a segment, where it would have a use outside
  [[gnu::cold]] void expect_no_segment(std::size_t unit, std::string_view module) const {
    FSDP_EXPECTS(!order_.in_segment(unit),
                 "rank {}: module '{}' uses a unit of a segment, but is outside it; leave the unit out of segments",
                 where_.rank, module);
  }

  /// Pads the layouts and checks that nothing is left without a use, and that there is something to train.
  [[gnu::cold]] void seal() {
    FSDP_EXPECTS(order_.size() > 0, "rank {}: the engine has no modules; add one with shard()", where_.rank);
    FSDP_EXPECTS(!paths_ || !offload.gradients || options_.without_gradient != WithoutGradient::zeros,
                 "rank {}: units without a gradient cannot get zeroes while gradients are offloaded; choose "
                 "WithoutGradient::untouched, or do not offload gradients",
                 where_.rank);
    bool some = false, trains = false;
    for (std::size_t u = 0; u < units_.size(); ++u) {
      units_[u]->offloads_masters = offloads_masters(*units_[u]);
      units_[u]->seal(where_);
      auto const* fault = order_.used(units_[u]->first) ? "" : "no module uses";
      if (units_[u]->hooks.size > 0 && !units_[u]->trains()) fault = "on_reduced was called for the frozen or empty";
      FSDP_EXPECTS(*fault == 0, "rank {}: {} unit '{}'", where_.rank, fault, units_[u]->name());
      some = some || !units_[u]->empty();
      trains = trains || units_[u]->trains();
    }
    FSDP_EXPECTS(some, "rank {}: no module of the engine has parameters", where_.rank);
    FSDP_EXPECTS(trains, "rank {}: all units with parameters are frozen; at least one must train", where_.rank);
  }

  /// The declaration as text, a line for each item. It must be equal on all ranks.
  [[gnu::cold]] std::string text() const {
    auto lines = formatted("strategy {} over {} ranks, {} a shard group, parameters {}, gradients {}, masters {}\n",
                           strategy_.name, where_.world, where_.shards, fsdp::name(dtype_of<typename P::Param>),
                           fsdp::name(dtype_of<typename P::Reduce>), fsdp::name(dtype_of<typename P::Master>));
    lines += formatted("options: prefetch {} and {}, at most {} bytes ahead, keep_last {}, keep_root {}\n",
                       options_.prefetch, backward_prefetch(), options_.max_ahead_bytes, options_.keep_last,
                       options_.keep_root);
    lines += formatted(
        "options: reshard_ranks {}, allow_keep_unsharded {}, allow_no_sync {}, allow_no_replica_sync {}, "
        "allow_frozen_parameters {}\n",
        options_.reshard_ranks, options_.allow_keep_unsharded, options_.allow_no_sync, options_.allow_no_replica_sync,
        options_.allow_frozen_parameters);
    lines += formatted("options: buckets {} and {}, seed {}, passes_ahead {}, gradients are summed in {}\n",
                       options_.first_bucket_bytes, options_.bucket_bytes, options_.seed, options_.passes_ahead,
                       fsdp::name(options_.reduce_dtype.value_or(written)));
    lines += formatted("offloaded: moments {}, masters {}, gradients {}\n", offload.moments, offload.masters,
                       offload.gradients);
    for (std::size_t use = 0; use < order_.size(); ++use) {
      for (auto at = use == 0 ? 0 : ends_[use - 1]; at < ends_[use]; ++at) {
        auto const& unit = *units_[unit_number(named_[at])];
        lines += formatted("module '{}': tensor '{}' in unit '{}'\n", order_.module_name(use),
                           unit.layout().tensors()[tensor_index(named_[at])].name, unit.name());
      }
    }
    for (auto const& unit : units_) {
      lines += text_of(unit->name(), unit->layout());
      for (int hook = 0; hook < unit->hooks.size; ++hook) lines += "with on_reduced, ";
      lines += formatted("unit '{}' is {}{}{}, which {} and {} after forward\n", unit->name(),
                         unit->frozen ? "frozen, " : "", unit->fp32 ? "fp32, " : "", described(unit->strategy()),
                         unit->strategy().shards ? "shards" : "does not shard",
                         unit->strategy().reshards_after_forward ? "reshards" : "stays");
    }
    for (std::size_t use = 0; use < order_.size(); ++use)
      lines +=
          formatted("use of unit '{}' by module '{}'\n", units_[order_.unit(use)]->name(), order_.module_name(use));
    lines += "segments that are recomputed:";
    for (std::size_t use = 0; use < order_.size(); ++use)
      if (order_.ends_segment(use))
        lines += formatted(" '{}' to '{}'", order_.module_name(order_.segment(use)), order_.module_name(use));
    lines += '\n';
    for (auto const& list : lists_)
      lines += formatted("{} of '{}' gathers ahead uses {}\n", name(list.pass), order_.module_name(list.use),
                         listed(list.ahead));
    constexpr std::string_view without_gradient[]{"refused", "untouched", "zeros"};
    lines += formatted("options: without_gradient {}\n",
                       without_gradient[static_cast<std::size_t>(options_.without_gradient)]);
    if (paths_) lines += paths_->text(order_);
    lines += formatted("paths: {}\n", path_count() - 1);
    return lines;
  }

  [[gnu::cold]] MemoryPlanInput plan_input() const {
    MemoryPlanInput input;
    input.units = std::vector<step::Unit>(units_.size());
    for (std::size_t u = 0; u < units_.size(); ++u) {
      auto const& unit = *units_[u];
      auto const padded = unit.layout().divided(where_.world, unit.strategy().shards ? where_.shards : 1).padded;
      input.units[u] = {.elements = padded,
                        .name = unit.name(),
                        .sharded = unit.strategy().shards,
                        .reshards_after_forward = unit.strategy().reshards_after_forward,
                        .sets_gradients = unit.sets_gradients,
                        .padded = unit.layout().numel() < padded,
                        .frozen = unit.frozen,
                        .skips_gradients = unit.skips_gradients,
                        .hooked = unit.hooks.size > 0,
                        .types = unit.declared_types(),
                        .offloads_masters = offloads_masters(unit),
                        .first = unit.first == u ? step::Unit::none : static_cast<std::uint32_t>(unit.first)};
    }
    input.offload = offload;
    input.modules = std::vector<std::string>(order_.size());
    for (std::size_t use = 0; use < order_.size(); ++use) {
      input.uses.push_back(order_.unit(use));
      input.modules[use] = order_.module_name(use);
    }
    for (std::size_t use = 0; use < order_.size(); ++use)
      if (this->is_frozen(use)) input.frozen_uses.push_back(use);
    for (std::size_t use = 0; use < order_.size(); ++use) input.segments.push_back(order_.segment(use));
    input.shards = where_.shards;
    input.replicas = where_.replicas;
    input.bucket_bytes = options_.bucket_bytes;
    input.first_bucket_bytes = options_.first_bucket_bytes;
    input.keep_last = options_.keep_last;
    input.keep_root = options_.keep_root;
    input.prefetch = prefetch_by_depth(order_, options_.prefetch, backward_prefetch(), empty_units(input));
    if (paths_) input.paths = paths_->plan(order_, options_.prefetch, backward_prefetch(), empty_units(input));
    input.zeros_for_absent = options_.without_gradient == WithoutGradient::zeros;
    for (auto const& list : lists_) {
      if (paths_) paths_->set_prefetch(input.paths, list.pass == Pass::forward, list.use, list.ahead);
      auto ahead = list.ahead;
      (list.pass == Pass::forward ? input.prefetch.forward : input.prefetch.backward)[list.use] = std::move(ahead);
    }
    input.max_ahead_bytes = options_.max_ahead_bytes;
    input.reshard_ranks = options_.reshard_ranks;
    input.allow_keep_unsharded = options_.allow_keep_unsharded;
    input.allow_no_sync = options_.allow_no_sync;
    input.allow_no_replica_sync = options_.allow_no_replica_sync;
    input.allow_frozen_parameters = options_.allow_frozen_parameters;
    input.wire = wire();
    return input;
  }

 private:
  using Base::described;
  using Base::ends_;
  using Base::named_;
  using Base::strategy_;
  using Base::units_;
  using Base::where_;
  static constexpr DType written = dtype_of<typename P::Reduce>;  ///< by backward
  struct List {
    Pass pass;
    std::size_t use;
    std::vector<std::size_t> ahead;
  };
  /// The name of a type; a value that is no DType, such as a number that was cast, by its number.
  static std::string described(DType type) {
    auto const known = fsdp::name(type);
    return known == "?" ? formatted("a DType of value {}", static_cast<int>(type)) : std::string(known);
  }
  /// Masters are offloaded where they are another copy than the parameters.
  bool offloads_masters(Unit const& unit) const {
    auto const types = unit.declared_types();
    return offload.masters && !unit.frozen && types.master != types.parameter;
  }
  int backward_prefetch() const { return options_.backward_prefetch.value_or(options_.prefetch); }

  EngineOptions options_;
  UseOrder order_;
  std::unique_ptr<PathList> paths_;
  std::vector<List> lists_;
  std::string_view busy_;  ///< what calls functions of the caller, for messages; empty: nothing
};

template <class P>
std::vector<std::size_t> Declaration<P>::save_point(UnitId to) const {
  return Base::save_point(to);
}

template <class P>
void Declaration<P>::roll_back(std::vector<std::size_t> const& to) noexcept {
  order_.truncate(to[2]);
  Base::roll_back(to);
}

template <class P>
std::size_t Declaration<P>::add_use(UnitId unit, std::string_view module, std::vector<TensorId> const& tensors) {
  this->end_module(unit, tensors);
  return order_.declare(unit.index, std::string(module));
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
