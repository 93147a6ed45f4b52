// SPDX-License-Identifier: Apache-2.0
// The units of an engine, declared without a device and a communicator: for plans of runs that do not fit here.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/attempt.hpp"
#include "fsdp/engine/declaration.hpp"
#include "fsdp/engine/registrar.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/placement.hpp"
#include "fsdp/plan/work.hpp"
#include "fsdp/precision.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/strategy.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

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
    fsdp::detail::Attempt<Declared> const attempt(declared_, prefix);
    return add(user_module, prefix, declared_.add_unit(prefix, options));
  }
  /// Adds the next module in forward order, in a unit that it shares.
  template <Module M>
  UseId shard(M const& user_module, std::string_view prefix, UnitId unit) {
    fsdp::detail::Attempt<Declared> const attempt(declared_, prefix, unit);
    return add(user_module, prefix, unit);
  }
  /// Adds modules in turn, each with a unit of its own: "prefix.0", "prefix.1", ...
  template <Module M>
  void shard(std::vector<M> const& modules, std::string_view prefix, UnitOptions const& options = {}) {
    fsdp::detail::Attempt<Declared> const attempt(declared_, prefix);
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
