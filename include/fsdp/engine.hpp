// SPDX-License-Identifier: Apache-2.0
// The engine: it owns the mesh's streams, communicators and buffers, and runs passes over units.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/detail/base/guards.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/engine/declaration.hpp"
#include "fsdp/detail/engine/executor.hpp"
#include "fsdp/detail/engine/flat_param.hpp"
#include "fsdp/detail/engine/gradient_checks.hpp"
#include "fsdp/detail/engine/guarded_uses.hpp"
#include "fsdp/detail/engine/register_module.hpp"
#include "fsdp/detail/engine/storage.hpp"
#include "fsdp/detail/engine/waits.hpp"
#include "fsdp/detail/step/compile_program.hpp"
#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/step/program.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/options.hpp"
#include "fsdp/scopes.hpp"
#include "fsdp/sharded_module.hpp"
#include "fsdp/shards.hpp"
#include "fsdp/strategy.hpp"
#include "fsdp/tensor.hpp"

#if defined(FSDP_CHECK_PROGRAM)
#include "fsdp/detail/step/check_program.hpp"
#endif

namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail {

/// The parts of an Engine. Engine, the scopes and Shards use them.
template <Communicator C, class P>
struct EngineCore {
  using Device = typename C::Device;
  using Stream = typename Device::Stream;
  using Unit = FlatParam<P>;
  using Param = typename P::Param;
  using Reduce = typename P::Reduce;
  using Calls = CallGuard;

  /// @param caller  computes; nullptr: a stream of the engine's own
  [[gnu::cold]] EngineCore(Mesh<C>& over, ShardingStrategy const& strategy, EngineOptions const& options,
                           Stream* caller);
  EngineCore(EngineCore&&) = delete;
  [[gnu::cold]] ~EngineCore();

  /// Seals the engine: see Engine::seal.
  void seal() {
    if (!sealed) seal_once();
  }
  /// [Note: Cold] Long functions that run once are marked [[gnu::cold]]: compilers then make them small instead of
  /// fast, in less time. Of a step's code, only error texts are marked. A function that compilers would copy into many
  /// places is marked [[gnu::noinline]], and optimised once.
  ///
  /// [Note: Sealing is undone] If sealing throws, the engine is as it was before, and may be sealed again. Ranks
  /// compare their layouts first, then take memory, and say at the end whether they have failed, so that all ranks have
  /// a sealed engine, or none has.
  [[gnu::cold]] void seal_once();
  /// The part of sealing that each rank does by itself: hands out its memory, and fills it.
  [[gnu::cold]] void prepare() {
    storage.place_shards(declared.units(), program);
    auto const kept_ranks = declared.options().reshard_ranks;
    auto slots = storage.slots(program);
    if (offload) offload->place(slots);
    if (declared.paths()) declared.paths()->seal();
    executor.prepare(program, declared.units(), declared.paths().get(), std::move(slots),
                     kept_ranks > 0 ? where.rank % kept_ranks : 0);
    passes.prepare(program);
    storage.initialize(declared.units(), declared.options().seed, *compute);
    if (offload) offload->initialized();
    for (auto operation : program.updates) {
      if (!declared.offload.masters) operation.size = std::min<std::uint8_t>(operation.size, 2);  // no staging slot
      executor.remember(operation);
    }
    if (declared.options().trap_stale_pointers) guarded.prepare(declared.units());
  }
  /// @param mine  hashes of the values that set_initial_values() gave; or "!" and why this rank cannot seal
  /// @throws PeerError if a rank cannot; ConfigError if replicas were given different values
  /// @note Collective: yes.
  [[gnu::cold]] void expect_all_sealed(std::string const& mine) {
    auto const problem = comm::ask_first_rank(mesh->world(), mine, "an engine's sealing", [&](auto const& texts) {
      for (auto const& text : texts)
        if (text.starts_with('!')) return text;
      auto const& units = declared.units();
      return differing_replicas(
          texts, units.size(), [&](std::size_t u) -> auto& { return *units[u]; }, "initial values");
    });
    if (problem.empty()) return;
    if (!problem.starts_with('!')) fail<ConfigError>("rank {}: {}", where.rank, problem);
    fail<PeerError>("rank {}: the engine was not sealed on any rank: {}. All ranks may seal it again", where.rank,
                    problem.substr(1));
  }
  /// Tells peers why this rank cannot seal. @pre called in a catch block
  [[gnu::cold]] void report_failure() noexcept {
    try {
      expect_all_sealed("!" + uncaught_text(where.rank));
    } catch (...) {  // the caller throws the cause
    }
  }
  /// Gives back what sealing has taken.
  [[gnu::cold]] void unseal() noexcept {
    failures.for_each_stream([&](Stream& stream) { drain(stream); });
    guarded = {};
    if (offload) offload->release();
    passes.release();
    executor.release();
    scalar_comm.reset();
    storage.release();
    for (auto& unit : declared.units()) unit->forget_buffers();
  }

  /// Groups of ranks, as far as units need them.
  [[gnu::cold]] void split_communicators() {
    auto& world = mesh->world();
    bool sharded = false, replicated_in_groups = false, replicated_over_world = false;
    for (auto const& unit : declared.units()) {
      auto const& at = unit->placement();
      sharded |= at.shards > 1;
      if (at.replicas > 1) (at.replicas == at.world ? replicated_over_world : replicated_in_groups) = true;
    }
    scalar_comm.emplace(world.split(0, where.rank, "scalar"));
    using step::Group;
    auto const split = [&](Group group, int color, std::string_view name) {
      executor.set_communicator(group, world.split(color, where.rank, name));
    };
    if (sharded) {
      split(Group::gather, where.replica, "gather");
      split(Group::reduce, where.replica, "reduce");
    }
    if (replicated_in_groups) split(Group::replicas, where.shard, "replicate");
    if (replicated_over_world) split(Group::all_replicas, 0, "replicate all");
    if (auto const ranks = declared.options().reshard_ranks; ranks > 0)
      split(Group::kept, where.rank / ranks, "kept group");
  }
  /// @throws UsageError if the engine is sealed, or calls a function that must not declare anything
  [[gnu::cold, gnu::noinline]] void expect_unsealed(std::string_view what, std::string_view instead) const;
  void discard_gradients();
  /// Begins a scope.
  /// @throws UsageError for want of buffers; nothing has changed then
  [[gnu::noinline]] void begin_backward_scope(BackwardChange change);
  void end_backward_scope(BackwardChange change) noexcept { passes.add_scope(change, -1); }
  [[gnu::cold]] void expect_buffers(Program const& of, StepInput const& from, BackwardFlags flags) const {
    auto const missing = missing_option(of, from, flags);
    if (missing.option.empty()) return;
    fail<UsageError>("rank {}: unit '{}': {} only with EngineOptions::{}", where.rank, missing.unit,
                     missing.option == "allow_keep_unsharded" ? "parameters can stay unsharded"
                     : flags.gradient_sync                    ? "gradients can stay unreduced over replicas"
                                                              : "gradients can stay unreduced",
                     missing.option);
  }
  /// @return the use's unit; nullptr: backward passes do not come to the use
  Unit* begin_use(UseKind kind, std::size_t use);
  void end_use();

  void attach_tracer(std::unique_ptr<Tracer<Device>> next);

  void drain() noexcept;
  /// Waits for a stream in a destructor. Streams that can fail are looked at when the engine ends.
  void drain(Stream& stream) noexcept {
    try {
      if constexpr (ReportsFailure<Stream>) return stream.finish();
      device.synchronize(stream);
    } catch (std::exception const& error) {
      std::fprintf(stderr, "fsdp: rank %d: %s\n", where.rank, error.what());
    } catch (...) {
      std::fprintf(stderr, "fsdp: rank %d: an exception that is no std::exception ended a stream\n", where.rank);
    }
  }

  /// Waits until all streams of this rank have run dry.
  /// @throws why one of them has failed
  void synchronize();

  /// Tells peers that wait for this rank why a stream has failed, if the world can do that.
  [[gnu::cold]] void notify_peers() noexcept {
    if constexpr (ReportsFailure<Stream> && requires(Failure const& why) { mesh->world().note_failure(why); })
      if (auto const* const failed = failures.failed_stream()) mesh->world().note_failure(*failed->failure());
  }
  /// If a stream has failed and no call has thrown that yet, leaves the failure to the world: see comm::defer_failure.
  [[gnu::cold]] void defer_failure() noexcept {
    if constexpr (ReportsFailure<Stream>)
      if (auto const* const failed = failures.failed_stream()) comm::defer_failure(mesh->world(), *failed->failure());
  }

  Mesh<C>* mesh;
  int exceptions = std::uncaught_exceptions();  ///< on their way when the engine was made
  int number = 0;                               ///< of the engine in its mesh
  Device device;
  Placement where;  ///< for units that shard
  MemoryAccount account;
  CallGuard calls{where.rank};
  History history;
  Declaration<P> declared;
  ShardStorage<C, P> storage{device, account};
  GuardedUses<Device, Unit> guarded;
  std::unique_ptr<OffloadHooks> offload;  ///< empty: nothing is offloaded
  std::unique_ptr<Tracer<Device>> tracer;
  TraceHook<Device> trace;
  std::optional<C> scalar_comm;  ///< all ranks, for norms
  bool sealed = false;
  MemoryPlanInput input;  ///< input of `program`
  Program program;

  Executor<C, P> executor{mesh->world(), streams, account, history, declared.options().passes_ahead, declared.wire()};
  Streams<Device> streams;  // after everything that its work uses: joined first
  Stream* compute;
  StreamFailures<Device> failures{streams};
  step::Passes<Executor<C, P>> passes{executor, where.rank, &declared.order()};
  GradientChecks checks{where.rank, passes, declared.options().without_gradient != WithoutGradient::refused};
};

template <Communicator C, class P>
EngineCore<C, P>::EngineCore(Mesh<C>& over, ShardingStrategy const& strategy, EngineOptions const& options,
                             Stream* caller)
    : mesh(&over),
      device(over.device()),
      where(place(over.rank(), over.size(), strategy)),
      declared(where, strategy, options),
      streams(device, caller),
      compute(&streams[StreamKind::compute]) {
  expect_exact_arithmetic(where.rank);
  number = mesh->number_engine();
}

template <Communicator C, class P>
EngineCore<C, P>::~EngineCore() {
  bool const reported = std::uncaught_exceptions() > exceptions || failures.was_reported();
  failures.for_each_stream([&](Stream& stream) { drain(stream); });
  notify_peers();
  if (!reported) defer_failure();
  if (!sealed) mesh->forget_engine(number);
  if (sealed && !reported) comm::report_history(mesh->world(), number, history.text());
}

template <Communicator C, class P>
void EngineCore<C, P>::seal_once() {
  Busy const busy(declared, "the engine is being sealed", "the engine was to be sealed");
  declared.seal();
  input = declared.plan_input();
  program = compile_program(input);
#if defined(FSDP_CHECK_PROGRAM)
  if (auto const problem = check_program(program, input); !problem.empty())
    fail<Error>("rank {}: the compiled step is wrong: {}. Please report it, with this printed step:\n{}", where.rank,
                problem, to_text(program));
#endif
  expect_buffers(program, input, passes.next_backward());
  auto const which =
      formatted("engine {} of this mesh, whose first unit is '{}'\n", number, declared.units().front()->name());
  expect_equal_texts(mesh->world(), which + declared.text(), "layouts");
  bool alone = false;  // peers wait for this rank in expect_all_sealed
  try {
    split_communicators();
    alone = !registers_memory(mesh->world());  // else they wait for it to register memory
    storage.allocate(mesh->world(), declared.units(), program, fsdp::memory_plan(program, input));
    storage.register_memory(executor, scalar_comm);
    alone = true;
    prepare();
    alone = false;
    expect_all_sealed(storage.initial_values().text());
  } catch (...) {
    unseal();
    if (alone) report_failure();
    throw;
  }
  for (auto& unit : declared.units()) unit->initial = {};
  sealed = true;
}

template <Communicator C, class P>
void EngineCore<C, P>::expect_unsealed(std::string_view what, std::string_view instead) const {
  FSDP_EXPECTS(!sealed,
               "rank {}: {} too late; {} before the first forward, optimizer, save or load, which seals the engine",
               where.rank, what, instead);
  declared.expect_idle(what);
}

template <Communicator C, class P>
void EngineCore<C, P>::discard_gradients() {
  passes.expect_no_incomplete_step("gradients are discarded");
  bool some = false;
  for (std::size_t u = 0; sealed && u < declared.units().size(); ++u) {
    auto const& contents = passes.contents()[u];
    some = some || contents.gradient == step::Contents::Gradient::sum || contents.waits();
  }
  passes.discard();
  checks.forget_norm();
  if (some) history.add("discard_gradients");
}

template <Communicator C, class P>
void EngineCore<C, P>::begin_backward_scope(BackwardChange change) {
  auto const entry = calls.enter(name(change));
  FSDP_EXPECTS(change != BackwardChange::frozen_parameters || declared.options().allow_frozen_parameters,
               "rank {}: backward passes can leave parameters frozen only with EngineOptions::allow_frozen_parameters",
               where.rank);
  passes.add_scope(change, 1);
  try {
    if (sealed) return expect_buffers(program, input, passes.next_backward());
    auto const so_far = declared.plan_input();
    expect_buffers(compile_program(so_far), so_far, passes.next_backward());
  } catch (...) {
    passes.add_scope(change, -1);
    throw;
  }
}

template <Communicator C, class P>
FlatParam<P>* EngineCore<C, P>::begin_use(UseKind kind, std::size_t use) {
  if (kind == UseKind::forward) seal();
  auto const* const turn = failures.with_cause([&] { return passes.begin_use(kind, use); });
  if (turn == nullptr) return nullptr;
  if (kind != UseKind::forward) storage.count_gradients();
  return declared.units()[turn->unit].get();
}

template <Communicator C, class P>
void EngineCore<C, P>::end_use() {
  failures.with_cause([&] { passes.end_use(); });
}

template <Communicator C, class P>
void EngineCore<C, P>::attach_tracer(std::unique_ptr<Tracer<Device>> next) {
  trace.attach(next.get());
  executor.attach(next.get());
  tracer = std::move(next);
}

template <Communicator C, class P>
void EngineCore<C, P>::drain() noexcept {
  drain(*compute);
  if (auto* const copy = streams.find(StreamKind::copy)) drain(*copy);
}

template <Communicator C, class P>
void EngineCore<C, P>::synchronize() {
  if constexpr (ReportsFailure<Stream>) {
    failures.for_each_stream([](Stream& stream) { stream.finish(); });
    failures.expect_whole();
  }
  failures.for_each_stream([&](Stream& stream) { device.synchronize(stream); });
}

/// @tparam E  Engine, which has it as a base
template <class E>
class EngineTraces {
 public:
  /// Records a span for every gather, forward, backward, reduction, norm and optimizer update from now on, up to
  /// `capacity` spans. The first step gets the number `first_step`. A trace may be started, collected and stopped at
  /// any time, inside a use too: a span that is open then is left out.
  void start_trace(std::size_t capacity, std::int64_t first_step = 0) {
    auto const entry = core().calls.enter("start_trace");
    engine().synchronize();
    using Traces = Tracer<typename E::Device>;
    auto const first_span = core().trace.next_span();
    core().attach_tracer(std::make_unique<Traces>(core().device, core().account, capacity, first_step, first_span));
  }
  /// Waits for all streams, and returns the spans since start_trace or the last collection. @pre start_trace was called
  std::vector<TraceSpan> collect_trace() {
    auto const entry = core().calls.enter("collect_trace");
    FSDP_EXPECTS(core().tracer, "rank {}: no trace was started; call start_trace first", engine().rank());
    engine().synchronize();
    return core().tracer->collect(*core().compute);
  }
  /// Collects for the last time, and stops the trace: from now on it costs a branch per span.
  std::vector<TraceSpan> stop_trace() {
    auto const entry = core().calls.enter("stop_trace");
    auto spans = collect_trace();
    core().attach_tracer({});
    return spans;
  }
  auto* tracer() { return core().tracer.get(); }  ///< nullptr while nothing is traced

 private:
  E& engine() { return static_cast<E&>(*this); }
  auto& core() { return engine().core_; }
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail

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
  using Transaction = detail::Transaction<detail::Declaration<P>>;

 public:
  using Comm = C;                          ///< communicator of the mesh
  using Precision = P;                     ///< precision policy
  using Device = typename C::Device;       ///< device of the communicator
  using Stream = typename Device::Stream;  ///< stream of the device
  using Unit = FlatParam<P>;               ///< a unit: layout, shard and buffers of some tensors
  template <class M>
  using Sharded = ShardedModule<M, Engine>;  ///< result of shard()
  using Param = typename P::Param;           ///< type of the parameters that forward and backward read
  using Reduce = typename P::Reduce;         ///< type of the gradients that backward writes
  using Master = typename P::Master;         ///< type of the parameter shards

  /// Computes on a stream of its own.
  /// @param strategy  of all units that are not given another
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, EngineOptions options = {})
      : core_(mesh, strategy, options, nullptr) {}
  /// Computes on a stream of its own, in the element types of the policy.
  template <std::same_as<P> Policy>
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, Policy, EngineOptions options = {})
      : core_(mesh, strategy, options, nullptr) {}
  /// Computes on the caller's stream, which must outlive the engine.
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, EngineOptions options, Stream& compute)
      : core_(mesh, strategy, options, &compute) {}
  /// Computes on the caller's stream, which must outlive the engine, in the element types of the policy.
  template <std::same_as<P> Policy>
  Engine(Mesh<C>& mesh, ShardingStrategy strategy, Policy, EngineOptions options, Stream& compute)
      : core_(mesh, strategy, options, &compute) {}

  Engine(Engine&&) = delete;
  template <class None = void>
  // clang-format off
  Engine(Mesh<C>&, ...) = delete;  // fsdp: expected (mesh, strategy[, precision][, options][, stream]); check the names in braces
  // clang-format on

  Device const& device() const { return core_.device; }  ///< device of the shards and buffers
  Stream& compute() { return *core_.compute; }           ///< stream of modules and optimizers
  int rank() const { return core_.where.rank; }          ///< this rank, in [0, world_size())
  int world_size() const { return core_.where.world; }   ///< number of ranks of the mesh
  /// Placement of the rank for units that shard.
  Placement const& placement() const { return core_.where; }
  ShardingStrategy const& strategy() const { return core_.declared.strategy(); }  ///< of units without one of their own
  EngineOptions const& options() const { return core_.declared.options(); }       ///< as given to the constructor
  MemoryAccount& account() { return core_.account; }                              ///< bytes of the engine, and of all that enters memory here
  bool sealed() const { return core_.sealed; }                                    ///< whether it is sealed: see seal()

  /// Makes an empty unit that several modules will share; it is held from its first use to its last.
  UnitId add_unit(std::string_view unit_name) { return add_unit(unit_name, UnitOptions{}); }
  /// @param strategy  of this unit: NoShard, or one that shards over the same ranks as the engine's
  /// @throws ConfigError if it shards over others
  UnitId add_unit(std::string_view unit_name, ShardingStrategy const& strategy) {
    return add_unit(unit_name, UnitOptions{.strategy = strategy});
  }
  /// Makes an empty unit for several modules. @throws ConfigError if it shards over other ranks than the engine
  [[gnu::cold]] UnitId add_unit(std::string_view unit_name, UnitOptions const& options) {
    auto const entry = core_.calls.enter("add_unit");
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
    auto const entry = core_.calls.enter("shard");
    core_.expect_unsealed(formatted("module '{}' was added", prefix), "add all modules");
    Transaction const transaction(core_.declared, prefix);
    return {*this, std::move(user_module),
            detail::register_module(core_.declared, core_.declared.add_unit(prefix, options), user_module, prefix)};
  }
  /// Registers `user_module` as the next in forward order, in a unit that it shares. A full tensor name that the unit
  /// has already is the same storage (a tied parameter): reduced once, after its last backward use.
  template <Module M>
  [[gnu::cold]] ShardedModule<M, Engine> shard(M user_module, std::string_view prefix, UnitId unit) {
    auto const entry = core_.calls.enter("shard");
    expect_unit(unit, prefix);
    Transaction const transaction(core_.declared, prefix, unit);
    return {*this, std::move(user_module), detail::register_module(core_.declared, unit, user_module, prefix)};
  }
  /// Registers modules in turn, each with a unit of its own: "prefix.0", "prefix.1", ...
  template <Module M>
  std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix) {
    return shard(std::move(modules), prefix, UnitOptions{});
  }
  /// Registers modules in turn, each with a unit of its own, of this strategy: "prefix.0", "prefix.1", ...
  template <Module M>
  [[gnu::cold]] std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix,
                                                            Strategy auto const& strategy) {
    return shard(std::move(modules), prefix, UnitOptions{.strategy = strategy});
  }
  /// Registers modules in turn, each with a unit of its own with these options: "prefix.0", "prefix.1", ...
  template <Module M>
  [[gnu::cold]] std::vector<ShardedModule<M, Engine>> shard(std::vector<M> modules, std::string_view prefix,
                                                            UnitOptions const& options) {
    auto const entry = core_.calls.enter("shard");
    core_.expect_unsealed(formatted("modules '{}' were added", prefix), "add all modules");
    Transaction const transaction(core_.declared, prefix);
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
  /// Overload for vectors of types that are no modules: ShardedModule says why.
  template <class M, class... Unit>
  requires(!Module<M>) std::vector<ShardedModule<M, Engine>> shard(std::vector<M>, std::string_view, Unit...) {
    return {};
  }
  /// Registers the next use of a unit without a module (AdoptedUnit). A tensor that the unit has is the same storage.
  /// @param places  gets the place of each tensor
  [[gnu::cold]] UseId declare_use(UnitId unit, std::string_view module, std::vector<DeclaredTensor> tensors,
                                  std::vector<TensorId>& places) {
    auto const entry = core_.calls.enter("declare_use");
    expect_unit(unit, module);
    Transaction const transaction(core_.declared, module, unit);
    return {detail::register_use(core_.declared, unit, module, std::move(tensors), places), this};
  }

  /// Registers a use with a unit of its own, which is added under the module's name.
  /// @param unit  gets it
  [[gnu::cold]] UseId declare_use(UnitOptions const& options, std::string_view module,
                                  std::vector<DeclaredTensor> tensors, std::vector<TensorId>& places, UnitId& unit) {
    auto const entry = core_.calls.enter("declare_use");
    core_.expect_unsealed(formatted("module '{}' was added", module), "add all modules");
    Transaction const transaction(core_.declared, module);
    auto const added = core_.declared.add_unit(module, options);
    auto const use = detail::register_use(core_.declared, added, module, std::move(tensors), places);
    unit = {added.index, this};
    return {use, this};
  }

  /// Sets the modules `ahead` that the module `at` gathers ahead in forward, in this order, instead of the next ones by
  /// depth: `engine.set_forward_prefetch(layers[0], {layers[2], layers[1]})`. They come later in the pass than `at`. A
  /// recomputed module gathers ahead by depth. @pre the engine is not sealed
  void set_forward_prefetch(UseId at, std::vector<UseId> const& ahead) { set_prefetch(Pass::forward, at, ahead); }
  /// Sets the modules that `at` gathers ahead in backward, instead of the next ones by depth: see set_forward_prefetch.
  void set_backward_prefetch(UseId at, std::vector<UseId> const& ahead) { set_prefetch(Pass::backward, at, ahead); }

  /// Declares a segment: the modules `first` to `last` are recomputed together. In backward, call recompute() of each
  /// in forward order, then backward() of each in reverse order. Units are gathered once for both. @pre the engine is
  /// not sealed
  /// @throws UsageError if they overlap another segment, or share a unit with a module outside
  [[gnu::cold]] void recompute_segment(UseId first, UseId last) {
    auto const entry = core_.calls.enter("recompute_segment");
    core_.expect_unsealed("a segment was named", "call recompute_segment");
    core_.declared.add_segment(index_of(first), index_of(last));
  }

  /// Compares layouts over ranks, allocates everything, initialises the shards. Implied by the first use.
  /// @throws ConfigError on every rank if ranks disagree, naming the first difference
  /// @note Collective: yes.
  void seal() {
    auto const entry = core_.calls.enter("seal");
    core_.seal();
  }

  /// Input of the program and of the memory plan: the layouts registered so far.
  MemoryPlanInput plan_input() const { return core_.declared.plan_input(); }
  /// Operations of each use, once the engine is sealed; to_text() prints them.
  Program const& program() const { return core_.program; }

  using Backward = BackwardScope<Core>;  ///< scope that changes the backward passes that begin in it
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
    auto const entry = core_.calls.enter("add_path");
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

  using Evaluation = EvaluationScope<Core>;  ///< result of evaluation()
  using Scope = UseScope<Core>;              ///< result of forward_scope, backward_scope and recompute_scope
  /// @return while it lives, forward passes keep nothing for a backward pass. Nests.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  Evaluation evaluation() { return Evaluation(core_); }
  /// @return while it lives, the use's full parameters (and in backward its gradients) are in memory. It converts to
  /// false if backward passes do not come to this use: see UnitOptions::frozen
  /// @throws UsageError if there is no such use, or it is another engine's; OrderError if another one comes next
  Scope forward_scope(UseId use) { return Scope(core_, index_of(use), Pass::forward); }
  /// @return while it lives, the use's parameters and gradients are in memory; false if nothing at or below it trains
  Scope backward_scope(UseId use) { return Scope(core_, index_of(use), Pass::backward); }
  /// @return while it lives, the parameters of a use of a segment are in memory, to compute its forward again
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
    auto const entry = core_.calls.enter("discard_gradients");
    core_.discard_gradients();
  }
  /// Interface for code that works on shards between passes: optimizers, norms, exports, checkpoints.
  fsdp::Shards<Engine> shards() { return fsdp::Shards<Engine>(*this); }
  C& world() { return core_.mesh->world(); }  ///< communicator of all ranks

  /// The mean of each of `values` over all ranks, summed in a fixed order: equal bits on all of them.
  /// @throws OrderError on every rank if they give different numbers of values, or have stepped or discarded otherwise;
  /// why one of this rank's streams has failed, if that is known already or has ended the peers
  /// @note Collective: yes; blocks the calling thread.
  std::vector<double> mean_over_ranks(std::vector<double> const& values);

  /// For destructors: waits until compute and copies have run dry, and reports instead of throwing.
  void drain() noexcept { core_.drain(); }

  /// Waits until all streams of this rank have run dry.
  /// @throws why one of them has failed: what a task threw, or a PeerError that names the rank where it began
  void synchronize() {
    auto const entry = core_.calls.enter("synchronize");
    core_.synchronize();
  }

 private:
  /// @cond
  friend fsdp::Shards<Engine>;  // Doxygen takes it for a member of Engine
  /// @endcond
  friend detail::EngineTraces<Engine>;

  void set_prefetch(Pass pass, UseId at, std::vector<UseId> const& ahead) {
    auto const entry = core_.calls.enter("set_prefetch");
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
std::vector<double> Engine<C, P>::mean_over_ranks(std::vector<double> const& values) {
  auto const entry = core_.calls.enter("mean_over_ranks");
  core_.failures.expect_whole();
  return core_.failures.with_cause(
      [&] { return detail::mean_over_ranks(core_.mesh->world(), values, core_.history.text()); });
}

template <Communicator C, PrecisionPolicy P>
Engine(Mesh<C>&, ShardingStrategy, P, EngineOptions = {}) -> Engine<C, P>;
template <Communicator C, PrecisionPolicy P>
Engine(Mesh<C>&, ShardingStrategy, P, EngineOptions, typename C::Device::Stream&) -> Engine<C, P>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
