// SPDX-License-Identifier: Apache-2.0
// The units of an engine while modules are registered: which tensor lies in which unit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/algorithm.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/name_table.hpp"
#include "fsdp/owned.hpp"
#include "fsdp/placement.hpp"
#include "fsdp/strategy.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// A tensor that a module or the caller names.
struct DeclaredTensor {
  std::string name;  ///< full
  std::vector<std::int64_t> shape;
  TensorOptions options{};
  bool skips_gradient = false;  ///< backward does not write a gradient that is not wanted: see SkipsGradients
  /// Backward begins the gradient's sum itself: it asks `scope.unit(of).begin_gradient(index)` before it writes the
  /// gradient, and stores if that is true, else adds. If so for all tensors of all uses of a unit, nothing is zeroed
  /// for it. A gradient that is not written must be set to zero.
  bool sets_gradient = false;
};

namespace detail {

/// Grows while modules are registered. Host logic only.
template <class P>
class DeclaredUnits {
 public:
  using Unit = FlatParam<P>;
  using Units = std::vector<Owned<Unit>>;

  /// Of the units that a use has, the one of this number; 0: the unit `first`.
  Unit& unit(std::size_t first, std::size_t number) const {
    return *units_[number == 0 ? first : units_[first]->beside[number - 1]];
  }
  Units& units() { return units_; }
  Units const& units() const { return units_; }
  ShardingStrategy const& strategy() const { return strategy_; }

  /// @throws ConfigError if the unit shards otherwise than the engine
  [[gnu::cold]] UnitId add_unit(std::string_view unit_name, UnitOptions const& options) {
    auto const unit = add_unit(unit_name, options.strategy.value_or(strategy_));
    units_[unit.index]->frozen = options.frozen;
    return unit;
  }

  /// Adds a tensor of a module to a unit of the module.
  /// @param id     the unit that the module was registered with
  /// @param fp32   the tensor's elements are fp32 in every precision
  /// @param named  places of the module's earlier tensors; gets this one's
  /// @throws UsageError if the module has named the tensor before; and as FlatLayout::add
  [[gnu::cold]] void add_tensor(UnitId id, DeclaredTensor tensor, bool fp32, std::vector<TensorPlace>& named) {
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
    auto const place = tensor_place(number, index);
    if (index == before) {  // a new one
      tensor_names_.reserve();
      tensors_.push_back(tensor_place(unit.index(), index));
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
  /// A module has named tensors, of the unit and of those beside it.
  /// @throws UsageError if another unit has one of them
  [[gnu::cold]] void end_module(UnitId id, std::vector<TensorPlace> const& tensors) {
    for (auto const place : tensors) {
      auto const& unit = this->unit(id.index, unit_number(place));
      expect_own_name(unit, unit.layout().tensors()[tensor_index(place)].name);
      named_.push_back(tensor_place(unit.index(), tensor_index(place)));
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
  std::vector<std::size_t> named_;  ///< use by use: tensor_place(unit, tensor) of its module's tensors
  std::vector<std::size_t> ends_;   ///< by use: where its tensors end there

  /// The state that restore() returns to: the number of units, named tensors, uses and tensors; then of each unit that
  /// a module is added to, and of those beside it, its index, tensors, promises, and units beside it.
  using Mark = std::vector<std::size_t>;
  /// @param to  the unit that a module is about to be added to, if that is there already
  [[gnu::cold]] Mark mark(UnitId to) const {
    Mark now{units_.size(), named_.size(), ends_.size(), tensors_.size()};
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
  [[gnu::cold]] void restore(Mark const& to) noexcept {
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
    units_.push_back(Owned<Unit>(new Unit(units_.size(), std::string(unit_name), strategy)));
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
  std::vector<std::size_t> tensors_;  ///< tensor_place(unit, tensor) of all tensors, in the order of their declaration
  NameTable tensor_names_;            ///< of tensors_
};

}  // namespace detail
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
