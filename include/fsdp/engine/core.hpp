// SPDX-License-Identifier: Apache-2.0
// Parts of an engine, and their construction when it is sealed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/algorithm.hpp"
#include "fsdp/concepts.hpp"
#include "fsdp/consult.hpp"
#include "fsdp/engine/attempt.hpp"
#include "fsdp/engine/call_guard.hpp"
#include "fsdp/engine/declaration.hpp"
#include "fsdp/engine/executor.hpp"
#include "fsdp/engine/flat_param.hpp"
#include "fsdp/engine/gradient_checks.hpp"
#include "fsdp/engine/guarded_uses.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine/offload_hooks.hpp"
#include "fsdp/engine/storage.hpp"
#include "fsdp/engine/stream_failures.hpp"
#include "fsdp/engine/streams.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/engine/user_checks.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/failure.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/mesh.hpp"
#include "fsdp/owned.hpp"
#include "fsdp/step/compile_program.hpp"
#include "fsdp/step/memory_plan.hpp"
#include "fsdp/step/passes.hpp"
#include "fsdp/step/program.hpp"
#include "fsdp/trace/trace.hpp"
#if defined(FSDP_CHECK_PROGRAM)
#include "fsdp/step/check_program.hpp"
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
  EngineCore(EngineCore&&) = delete;
  [[gnu::cold]] ~EngineCore() {
    bool const told = std::uncaught_exceptions() > exceptions || failures.was_told();
    failures.for_each_stream([&](Stream& stream) { drain(stream); });
    tell_peers();
    if (!told) leave_failure();
    if (!sealed) mesh->forget_engine(number);
    if constexpr (KeepsEnds<C>)
      if (sealed && !told) mesh->world().keep_end(number, history.text());
  }

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
  [[gnu::cold]] void seal_once() {
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
      alone = !RegistersMemory<C>;  // else they wait for it to register memory
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
      executor.note(operation);
    }
    if (declared.options().trap_stale_pointers) guarded.prepare(declared.units());
  }
  /// @param mine  hashes of the values that set_initial_values() gave; or "!" and why this rank cannot seal
  /// @throws PeerError if a rank cannot; ConfigError if replicas were given different values
  /// @note Collective: yes.
  [[gnu::cold]] void expect_all_sealed(std::string const& mine) {
    auto const problem = comm::consult(mesh->world(), mine, "an engine's sealing", [&](auto const& texts) {
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
  [[gnu::cold, gnu::noinline]] void expect_unsealed(std::string_view what, std::string_view instead) const {
    FSDP_EXPECTS(!sealed,
                 "rank {}: {} too late; {} before the first forward, optimizer, save or load, which seals the engine",
                 where.rank, what, instead);
    declared.expect_idle(what);
  }
  void discard_gradients() {
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
  /// Begins a scope.
  /// @throws UsageError for want of buffers; nothing has changed then
  [[gnu::noinline]] void begin_backward_scope(BackwardChange change) {
    auto const turn = calls.enter(name(change));
    FSDP_EXPECTS(
        change != BackwardChange::frozen_parameters || declared.options().allow_frozen_parameters,
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
  Unit* begin_use(UseKind kind, std::size_t use) {
    if (kind == UseKind::forward) seal();
    auto const* const turn = failures.with_cause([&] { return passes.begin_use(kind, use); });
    if (turn == nullptr) return nullptr;
    if (kind != UseKind::forward) storage.lease_gradients();
    return declared.units()[turn->unit].get();
  }
  void end_use() {
    failures.with_cause([&] { passes.end_use(); });
  }

  void attach_tracer(Owned<Tracer<Device>> next) {
    trace.attach(next.get());
    executor.attach(next.get());
    tracer = std::move(next);
  }

  void drain() noexcept {
    drain(*compute);
    if (auto* const copy = streams.find(StreamKind::copy)) drain(*copy);
  }
  /// Waits for a stream in a destructor. Streams that can fail are looked at when the engine ends.
  void drain(Stream& stream) noexcept {
    try {
      if constexpr (TellsFailure<Stream>) return stream.finish();
      device.synchronize(stream);
    } catch (std::exception const& error) {
      std::fprintf(stderr, "fsdp: rank %d: %s\n", where.rank, error.what());
    } catch (...) {
      std::fprintf(stderr, "fsdp: rank %d: an exception that is no std::exception ended a stream\n", where.rank);
    }
  }

  /// Waits until all streams of this rank have run dry.
  /// @throws why one of them has failed
  void synchronize() {
    if constexpr (TellsFailure<Stream>) {
      failures.for_each_stream([](Stream& stream) { stream.finish(); });
      failures.expect_whole();
    }
    failures.for_each_stream([&](Stream& stream) { device.synchronize(stream); });
  }

  /// Tells peers that wait for this rank why a stream has failed, if the world can do that.
  [[gnu::cold]] void tell_peers() noexcept {
    if constexpr (TellsFailure<Stream> && requires(Failure const& why) { mesh->world().note_failure(why); })
      if (auto const* const failed = failures.failed_stream()) mesh->world().note_failure(*failed->failure());
  }
  /// Leaves a stream's failure that no call has thrown to the world, which reports it when it ends; if it cannot,
  /// reports it now.
  [[gnu::cold]] void leave_failure() noexcept {
    if constexpr (TellsFailure<Stream>) {
      auto const* const failed = failures.failed_stream();
      if (failed == nullptr) return;
      if constexpr (requires { mesh->world().leave_failure(*failed->failure()); }) {
        mesh->world().leave_failure(*failed->failure());
      } else {
        std::fprintf(stderr, "fsdp: rank %d: %s\n", where.rank, failed->failure()->text.c_str());
      }
    }
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
  Owned<OffloadHooks> offload;  ///< empty: nothing is offloaded
  Owned<Tracer<Device>> tracer;
  TraceHook<Device> trace;
  std::optional<C> scalar_comm;  ///< all ranks, for norms
  bool sealed = false;
  MemoryPlanInput input;  ///< input of `program`
  Program program;

  Executor<C, P> executor{device,         where.rank, streams, account, history, declared.options().passes_ahead,
                          declared.wire()};
  Streams<Device> streams;  // after everything that its work uses: joined first
  Stream* compute;
  StreamFailures<Device> failures{streams};
  step::Passes<Executor<C, P>> passes{executor, where.rank, &declared.order()};
  GradientChecks checks{where.rank, passes, declared.options().without_gradient != WithoutGradient::refused};
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::detail
