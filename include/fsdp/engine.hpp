// SPDX-License-Identifier: Apache-2.0
// The engine: it owns the mesh's streams, communicators and buffers, and runs passes over units.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/concepts.hpp"
#include "fsdp/engine/attempt.hpp"
#include "fsdp/engine/core.hpp"
#include "fsdp/engine/registrar.hpp"
#include "fsdp/engine/scopes.hpp"
#include "fsdp/engine/shards.hpp"
#include "fsdp/engine/traces.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/mesh.hpp"
#include "fsdp/precision.hpp"
#include "fsdp/sharded_module.hpp"
#include "fsdp/strategy.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Shards one model on one rank. Modules register in forward order; the first use, optimizer or export seals the
/// engine: layouts and order are compared over all ranks, everything is allocated, and the shards are initialised.
///
/// One host thread at a time is inside an engine's calls, those of its modules, optimizers and checkpoints included; a
/// second one gets a UsageError. Between calls, and between the two ends of a scope, the engine may be handed to
/// another thread, which the program synchronises with the first.
///
/// Types are deduced: `fsdp::Engine engine{mesh, fsdp::FullShard{}, fsdp::Bf16{}, {.prefetch = 2}};`
/// @tparam C  communicator    @tparam P  precision policy
/// @note Collective: sealing, and everything that moves parameters or gradients.
template <Communicator C, PrecisionPolicy P = Fp32>
class Engine : public detail::EngineTraces<Engine<C, P>> {
  using Core = detail::EngineCore<C, P>;
  using Attempt = detail::Attempt<detail::Declaration<P>>;

 public:
  using Comm = C;
  using Precision = P;
  using Device = typename C::Device;
  using Stream = typename Device::Stream;
  using Unit = FlatParam<P>;
  template <class M>
  using Sharded = ShardedModule<M, Engine>;  ///< result of shard()
  using Param = typename P::Param;
  using Reduce = typename P::Reduce;
  using Master = typename P::Master;

  /// Computes on a stream of its own.
  /// @param strategy  of all units that are not given another
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, EngineOptions options = {})
      : core_(mesh, strategy, options, nullptr) {}
  template <std::same_as<P> Policy>
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, Policy, EngineOptions options = {})
      : core_(mesh, strategy, options, nullptr) {}
  /// Computes on the caller's stream, which must outlive the engine.
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, EngineOptions options, Stream& compute)
      : core_(mesh, strategy, options, &compute) {}
  template <std::same_as<P> Policy>
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, Policy, EngineOptions options, Stream& compute)
      : core_(mesh, strategy, options, &compute) {}

  Engine(Engine&&) = delete;
  template <class None = void>
  // clang-format off
  Engine(Mesh<C>&, ...) = delete;  // fsdp: expected (mesh, strategy[, precision][, options][, stream]); check the names in braces
  // clang-format on

  Device const& device() const { return core_.device; }
  Stream& compute() { return *core_.compute; }
  int rank() const { return core_.where.rank; }
  int world_size() const { return core_.where.world; }
  /// Placement of the rank for units that shard.
  Placement const& placement() const { return core_.where; }
  ShardingStrategy const& strategy() const { return core_.declared.strategy(); }
  EngineOptions const& options() const { return core_.declared.options(); }
  MemoryAccount& account() { return core_.account; }
  bool sealed() const { return core_.sealed; }

  /// Makes an empty unit that several modules will share; it is held from its first use to its last.
  UnitId add_unit(std::string_view unit_name) { return add_unit(unit_name, UnitOptions{}); }
  /// @param strategy  of this unit: NoShard, or one that shards over the same ranks as the engine's
  /// @throws ConfigError if it shards over others
  UnitId add_unit(std::string_view unit_name, ShardingStrategy const& strategy) {
    return add_unit(unit_name, UnitOptions{.strategy = strategy});
  }
  [[gnu::cold]] UnitId add_unit(std::string_view unit_name, UnitOptions const& options) {
    auto const turn = core_.calls.enter("add_unit");
    core_.expect_unsealed(formatted("unit '{}' was added", unit_name), "add all units");
    return {core_.declared.add_unit(unit_name, options).index, this};
  }

  /// Registers `user_module` as the next in forward order, with a unit of its own. Tensor names become "prefix.name". A
  /// module whose describe names no tensor (a ReLU, a dropout) is a unit too: nothing is gathered or reduced for it.
  template <Module M>
  ShardedModule<M, Engine> shard(M user_module, std::string_view prefix) {
    return shard(std::move(user_module), prefix, UnitOptions{});
  }
  /// @param strategy  of its unit, as in add_unit
  template <Module M>
  ShardedModule<M, Engine> shard(M user_module, std::string_view prefix, Strategy auto const& strategy) {
    return shard(std::move(user_module), prefix, UnitOptions{.strategy = strategy});
  }
  /// @param options  of its unit: `engine.shard(block, "h.0", {.frozen = true})`
  template <Module M>
  ShardedModule<M, Engine> shard(M user_module, std::string_view prefix, UnitOptions const& options) {
    auto const turn = core_.calls.enter("shard");
    core_.expect_unsealed(formatted("module '{}' was added", prefix), "add all modules");
    Attempt const attempt(core_.declared, prefix);
    return {*this, std::move(user_module),
            detail::register_module(core_.declared, core_.declared.add_unit(prefix, options), user_module, prefix)};
  }
  /// Registers `user_module` as the next in forward order, in a unit that it shares. A full tensor name that the unit
  /// has already is the same storage (a tied parameter): reduced once, after its last backward use.
  template <Module M>
  [[gnu::cold]] ShardedModule<M, Engine> shard(M user_module, std::string_view prefix, UnitId unit) {
    auto const turn = core_.calls.enter("shard");
    expect_unit(unit, prefix);
    Attempt const attempt(core_.declared, prefix, unit);
    return {*this, std::move(user_module), detail::register_module(core_.declared, unit, user_module, prefix)};
  }
  /// Registers modules in turn, each with a unit of its own: "prefix.0", "prefix.1", ...
  template <Module M>
  std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix) {
    return shard(std::move(modules), prefix, UnitOptions{});
  }
  template <Module M>
  [[gnu::cold]] std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix,
                                                            Strategy auto const& strategy) {
    return shard(std::move(modules), prefix, UnitOptions{.strategy = strategy});
  }
  template <Module M>
  [[gnu::cold]] std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix,
                                                            UnitOptions const& options) {
    auto const turn = core_.calls.enter("shard");
    core_.expect_unsealed(formatted("modules '{}' were added", prefix), "add all modules");
    Attempt const attempt(core_.declared, prefix);
    std::vector<ShardedModule<M, Engine>> sharded;
    sharded.reserve(modules.size());
    for (auto& user_module : modules) {
      auto const name = formatted("{}.{}", prefix, sharded.size());
      auto added = detail::register_module(core_.declared, core_.declared.add_unit(name, options), user_module, name);
      sharded.emplace_back(*this, std::move(user_module), std::move(added));
    }
    return sharded;
  }
  template <Module M, class Other>
  void shard(M, std::string_view, Other const&) = delete;  // fsdp: not a UnitId, nor a strategy
  /// Overload for types that are no modules: ShardedModule says why.
  template <class M, class... Unit>
  requires(!Module<M>) ShardedModule<M, Engine> shard(M, std::string_view, Unit...) { return {}; }
  template <class M, class... Unit>
  requires(!Module<M>) std::vector<ShardedModule<M, Engine>> shard(std::vector<M>, std::string_view, Unit...) {
    return {};
  }
  /// Registers the next use of a unit without a module (AdoptedUnit). A tensor that the unit has is the same storage.
  /// @param places  gets the place of each tensor
  [[gnu::cold]] UseId declare_use(UnitId unit, std::string_view module, std::vector<DeclaredTensor> tensors,
                                  std::vector<TensorPlace>& places) {
    auto const turn = core_.calls.enter("declare_use");
    expect_unit(unit, module);
    Attempt const attempt(core_.declared, module, unit);
    return {detail::register_use(core_.declared, unit, module, std::move(tensors), places), this};
  }

  /// Registers a use with a unit of its own, which is added under the module's name.
  /// @param unit  gets it
  [[gnu::cold]] UseId declare_use(UnitOptions const& options, std::string_view module,
                                  std::vector<DeclaredTensor> tensors, std::vector<TensorPlace>& places, UnitId& unit) {
    auto const turn = core_.calls.enter("declare_use");
    core_.expect_unsealed(formatted("module '{}' was added", module), "add all modules");
    Attempt const attempt(core_.declared, module);
    auto const added = core_.declared.add_unit(module, options);
    auto const use = detail::register_use(core_.declared, added, module, std::move(tensors), places);
    unit = {added.index, this};
    return {use, this};
  }

  /// Sets the modules `ahead` that the module `at` gathers ahead in forward (backward), in this order, instead of the
  /// next ones by depth: `engine.set_forward_prefetch(layers[0], {layers[2], layers[1]})`. They come later in the pass
  /// than `at`. A recomputed module gathers ahead by depth. @pre the engine is not sealed
  void set_forward_prefetch(UseId at, std::vector<UseId> const& ahead) { set_prefetch(Pass::forward, at, ahead); }
  void set_backward_prefetch(UseId at, std::vector<UseId> const& ahead) { set_prefetch(Pass::backward, at, ahead); }

  /// Declares a segment: the modules `first` to `last` are recomputed together. In backward, call recompute() of each
  /// in forward order, then backward() of each in reverse order. Units are gathered once for both. @pre the engine is
  /// not sealed
  /// @throws UsageError if they overlap another segment, or share a unit with a module outside
  [[gnu::cold]] void recompute_segment(UseId first, UseId last) {
    auto const turn = core_.calls.enter("recompute_segment");
    core_.expect_unsealed("a segment was named", "call recompute_segment");
    core_.declared.add_segment(index_of(first), index_of(last));
  }

  /// Compares layouts over ranks, allocates everything, initialises the shards. Implied by the first use.
  /// @throws ConfigError on every rank if ranks disagree, naming the first difference
  /// @note Collective: yes.
  void seal() {
    auto const turn = core_.calls.enter("seal");
    core_.seal();
  }

  /// Input of the program and of the memory plan: the layouts registered so far.
  MemoryPlanInput plan_input() const { return core_.declared.plan_input(); }
  /// Operations of each use, once the engine is sealed; to_text() prints them.
  Program const& program() const { return core_.program; }

  using Backward = BackwardScope<Core>;
  /// @return while it lives, gradients of backward passes that begin wait unreduced on each rank, until a backward pass
  /// that begins without it reduces them too
  /// @param on  false: the scope changes nothing, so that a loop may say `engine.no_sync(micro + 1 < micro_steps)`
  /// @throws UsageError without EngineOptions::allow_no_sync, if some unit needs buffers for it: one that several ranks
  /// share, or whose gradients are narrower than fp32
  Backward no_sync(bool on = true) { return Backward(core_, BackwardChange::no_sync, on); }
  /// @return while it lives, backward passes that begin do not sum over replicas: HybridShard reduce-scatters within
  /// the shard group and adds up the result in a partial shard. NoShard has no groups to reduce within: there it is the
  /// same as no_sync
  /// @throws UsageError without the option for it, if there are replicas: EngineOptions::allow_no_replica_sync for
  /// HybridShard, allow_no_sync for NoShard with gradients narrower than fp32
  Backward no_replica_sync(bool on = true) { return Backward(core_, BackwardChange::no_replica_sync, on); }
  /// @return while it lives, backward passes that begin leave parameters unsharded, and the next micro-step's forward
  /// finds them. An optimizer step drops them in any case
  /// @throws UsageError without EngineOptions::allow_keep_unsharded, if some unit shares its buffer with others: one
  /// that is dropped after forward
  Backward keep_unsharded(bool on = true) { return Backward(core_, BackwardChange::keep_unsharded, on); }

  /// @return while it lives, backward passes that begin write no gradients of parameters: they pass gradients of
  /// activations through the modules, as a generator's step does through a discriminator. Such a pass comes to every
  /// use, frozen units or not. Gradients of other passes stay as they are
  /// @throws UsageError without EngineOptions::allow_frozen_parameters
  Backward frozen_parameters(bool on = true) { return Backward(core_, BackwardChange::frozen_parameters, on); }

  /// Adds a path, an order of uses besides the declared one, which may leave some out and repeat others: `auto text =
  /// engine.add_path("text", {embed, layers[0], head})`. Include fsdp/paths.hpp. @pre the engine is not sealed
  /// @throws UsageError if it has no use, the engine has a path of this name, or it has a part of a segment
  template <class None = void>
  [[gnu::cold]] PathId add_path(std::string_view path_name, std::vector<UseId> const& uses) {
    auto const turn = core_.calls.enter("add_path");
    core_.expect_unsealed(formatted("path '{}' was added", path_name), "add all paths");
    return {detail::PathAdder<detail::Declaration<P>>::add(core_.declared, rank(), path_name, indices_of(uses)), this};
  }
  /// @param path  PathId{}: the declared order
  /// @return while it lives, passes that begin follow the path. A backward pass follows the path of its forward pass.
  /// All ranks follow the same path, which the next collective compares
  /// @throws UsageError in the middle of a pass; if there is no such path, or it is another engine's
  template <class Of = Core>
  PathScope<Of> follow(PathId path) {
    if (path.engine != nullptr && path.engine != this) refuse_foreign("a path id");
    FSDP_EXPECTS(path.index < core_.declared.path_count(), "rank {}: there is no path {}; the engine has paths 0 to {}",
                 rank(), path.index, core_.declared.path_count() - 1);
    return PathScope<Of>(core_, path.index);
  }

  using Evaluation = EvaluationScope<Core>;
  using Scope = UseScope<Core>;
  /// @return while it lives, forward passes keep nothing for a backward pass. Nests.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  Evaluation evaluation() { return Evaluation(core_); }
  /// @return while it lives, the use's full parameters (and in backward its gradients) are in memory. It converts to
  /// false if backward passes do not come to this use: see UnitOptions::frozen
  /// @throws UsageError if there is no such use, or it is another engine's; OrderError if another one comes next
  Scope forward_scope(UseId use) { return Scope(core_, index_of(use), Pass::forward); }
  Scope backward_scope(UseId use) { return Scope(core_, index_of(use), Pass::backward); }
  Scope recompute_scope(UseId use) { return Scope(core_, index_of(use), Pass::recompute); }

  /// Forgets all gradients, and a norm that clip_grad_norm has measured: the next backward pass begins new sums. It is
  /// zero_grad of other libraries; an optimizer step does it by itself. After half a backward pass (an exception ended
  /// it, or the caller left it) call this first: passes, evaluations, clipping, optimizer steps, imports and
  /// export_gradients throw until then.
  /// @throws UsageError inside a use's backward, or after an optimizer step that has ended half-way: that leaves
  /// parameters torn, and only a load or an import of all of them goes on from there
  /// @note Stream: on compute. Reductions under way end as they would. The calling thread waits for nothing.
  /// @note Collective: no; but all ranks discard at the same place of a pass, which the next collective compares.
  void discard_gradients() {
    auto const turn = core_.calls.enter("discard_gradients");
    core_.discard_gradients();
  }
  /// Interface for code that works on shards between passes: optimizers, norms, exports, checkpoints.
  fsdp::Shards<Engine> shards() { return fsdp::Shards<Engine>(*this); }
  C& world() { return core_.mesh->world(); }

  /// Every rank's mean of `values`, in a fixed order.
  /// @throws OrderError on every rank if they give different numbers of values, or have stepped or discarded otherwise;
  /// why one of this rank's streams has failed, if that is known already or has ended the peers
  /// @note Collective: yes; blocks the calling thread.
  std::vector<double> mean_over_ranks(std::vector<double> const& values) {
    auto const turn = core_.calls.enter("mean_over_ranks");
    core_.failures.expect_whole();
    return core_.failures.with_cause(
        [&] { return detail::mean_over_ranks(core_.mesh->world(), values, core_.history.text()); });
  }

  /// For destructors: waits until compute and copies have run dry, and reports instead of throwing.
  void drain() noexcept { core_.drain(); }

  /// Waits until all streams of this rank have run dry.
  /// @throws why one of them has failed: what a task threw, or a PeerError that names the rank where it began
  void synchronize() {
    auto const turn = core_.calls.enter("synchronize");
    core_.synchronize();
  }

 private:
  friend fsdp::Shards<Engine>;
  friend detail::EngineTraces<Engine>;

  void set_prefetch(Pass pass, UseId at, std::vector<UseId> const& ahead) {
    auto const turn = core_.calls.enter("set_prefetch");
    core_.expect_unsealed("prefetch lists were set", "set them");
    core_.declared.set_prefetch(pass, index_of(at), indices_of(ahead));
  }
  std::vector<std::size_t> indices_of(std::vector<UseId> const& uses) const {
    std::vector<std::size_t> indices;
    for (auto const use : uses) indices.push_back(index_of(use));
    return indices;
  }
  /// @throws UsageError if there is no such use, or it is another engine's
  std::size_t index_of(UseId use) const {
    if (use.engine != nullptr && use.engine != this) refuse_foreign("a use id");
    return core_.declared.expect_use(use.index);
  }
  /// @throws UsageError if a module cannot be added to the unit
  [[gnu::cold]] void expect_unit(UnitId unit, std::string_view module) {
    if (unit.engine != nullptr && unit.engine != this) refuse_foreign(formatted("the unit of module '{}'", module));
    FSDP_EXPECTS(unit.index < core_.declared.units().size(),
                 "rank {}: module '{}': the engine has no such unit; pass an id of add_unit", rank(), module);
    core_.expect_unsealed(formatted("module '{}' was added", module), "add all modules");
    core_.declared.expect_no_segment(unit.index, module);
  }
  [[noreturn, gnu::cold]] void refuse_foreign(std::string_view what) const {
    fail<UsageError>("rank {}: {} belongs to another engine; pass an id that this engine has returned", rank(), what);
  }

  Core core_;
};

template <Communicator C, PrecisionPolicy P>
Engine(Mesh<C>&, ShardingStrategy, P, EngineOptions = {}) -> Engine<C, P>;
template <Communicator C, PrecisionPolicy P>
Engine(Mesh<C>&, ShardingStrategy, P, EngineOptions, typename C::Device::Stream&) -> Engine<C, P>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
