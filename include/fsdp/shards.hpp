// SPDX-License-Identifier: Apache-2.0
// Interface of an engine for optimizers, norms, exports and checkpoints, which work on shards between passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/guards.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/callbacks.hpp"
#include "fsdp/detail/engine/gradient_checks.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/step/contents.hpp"
#include "fsdp/detail/step/operation.hpp"
#include "fsdp/detail/step/passes.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/options.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

namespace detail {
/// Stands for an absent GradNorm.
struct NoNorm {
  static constexpr void const* engine() { return nullptr; }
  static constexpr std::uint64_t measurement() { return 0; }
};
}  // namespace detail

/// Interface of an engine for optimizers, norms, exports and checkpoints; training loops do not need it. A handle,
/// which is copied like a pointer. docs/extending.md lists the users of each member.
///
/// Everything here is enqueued on the engine's compute stream unless a comment says otherwise, by the thread that calls
/// the modules.
template <class E>
class Shards {
 public:
  using Unit = typename E::Unit;  ///< FlatParam: layout, shard and buffers of a unit

  explicit Shards(E& engine) : engine_(&engine) {}  ///< made by Engine::shards(); the engine must outlive it

  /// Units in declared order. Their shards, layouts and slices are fixed once the engine is sealed. A unit without
  /// parameters (a ReLU) has a shard of 0 elements, and no gradient.
  std::size_t size() const { return engine_->core_.declared.units().size(); }
  /// A unit by its number in the declared order. @pre index < size()
  Unit& operator[](std::size_t index) const { return *engine_->core_.declared.units()[index]; }
  Unit& operator[](UnitId id) const { return (*this)[id.index]; }  ///< unit by an id of this engine; not checked

  /// Calls `f(stream, gradients)` each time the unit's gradient shard has been reduced: in backward passes, on the
  /// calling thread. f enqueues on `stream`, behind the reduction and before norms and optimizers read the shard.
  /// Several functions of one unit are called in the order of registration.
  ///
  /// The function is called once per reduction, not once per step. A pass under no_sync(), or under no_replica_sync()
  /// where it does not complete the reduction, calls nothing. Of several passes that reduce, each calls it, with the
  /// sum so far. In a world of one, every pass that is not under no_sync() reduces. Evaluations and passes under
  /// frozen_parameters() call nothing.
  ///
  /// Ranks that keep the same shard (NoShard, replicas of HybridShard) each call f: it must change them alike.
  /// @param unit  it trains
  /// @param f     any type that can be moved, called as f(Stream&, std::span<float>). `gradients` are the elements of
  ///              this rank's gradient shard (shard_numel), in device memory, averaged over all ranks, padding included
  ///              (zeroes, which must stay zeroes). With a GradScaler, they are scaled. f may use them in kernels on
  ///              `stream`; the host may not read them, nor may other streams. An exception of f interrupts the pass,
  ///              as one of a module does. f must not begin passes, steps or other uses of the engine: they throw
  /// @throws UsageError if the engine is sealed, the unit is frozen, or it is another engine's. If the unit turns out
  /// to have no parameters, sealing throws
  /// @note Stream: reduce, replicate, or compute: the stream of the last operation that writes the shard.
  /// @note Collective: no; but all ranks register as many functions for each unit, which sealing compares.
  template <class F>
  void on_reduced(Unit const& unit, F f) const {
    constexpr bool callable = std::is_invocable_v<F&, typename E::Stream&, std::span<float>>;
    static_assert(callable, "fsdp: on_reduced takes a function f(Device::Stream&, std::span<float>)");
    auto const entry = enter("on_reduced");
    expect_hookable(unit);
    if constexpr (callable)
      (*this)[unit.index()].hooks.add(new detail::ReducedHookOf<typename E::Stream, F>(std::move(f)));
  }
  /// on_reduced() for a unit that engine.add_unit or AdoptedUnit::unit returned. @throws UsageError also if there is no
  /// such unit
  template <class F>
  void on_reduced(UnitId id, F f) const {
    if (id.engine != nullptr && id.engine != engine_) engine_->refuse_foreign("the unit given to on_reduced");
    FSDP_EXPECTS(id.index < size(), "rank {}: on_reduced: there is no unit {}; the engine has {}, counted from 0",
                 engine_->rank(), id.index, size());
    on_reduced((*this)[id], std::move(f));
  }

  /// Sets initial values before the engine is sealed: sealing calls `f(tensor, first, out)` for each part of the unit's
  /// tensors that this rank keeps, in the place of TensorOptions::init, and destroys f when all ranks have sealed. If
  /// it throws, no rank has sealed the engine: sealing again calls all functions again, from the first part on. f must
  /// not communicate, nor add to the engine, nor seal it. Replicas of a part compare a hash of their values.
  /// @param f  any type that can be moved, called as f(TensorInfo const&, std::int64_t first, std::span<float>); it
  ///           stores elements [first, first + size) of the tensor. They are rounded to nearest even where shards are
  ///           narrower
  /// @throws UsageError if the engine is sealed, or the unit belongs to another engine
  template <class F>
  void set_initial_values(Unit const& unit, F f) const {
    auto const entry = enter("set_initial_values");
    expect_of_engine(unit);
    engine_->core_.expect_unsealed(formatted("unit '{}' was given initial values", unit.name()), "give them");
    (*this)[unit.index()].initial = std::make_unique<detail::InitialValuesOf<F>>(std::move(f));
  }
  /// Parts of the unit's tensors that this rank keeps; before sealing, those that it will keep if none is added.
  std::vector<Segment> shard_segments(Unit const& unit) const {
    expect_of_engine(unit);
    return unit.shard_segments(engine_->placement());
  }
  /// Former name of shard_segments().
  [[deprecated("write shard_segments")]] std::vector<Segment> kept(Unit const& unit) const {
    return shard_segments(unit);
  }

  /// The calling thread is inside a call of the engine while the result lives. Calls nest.
  /// @param call  its name, a literal
  /// @throws UsageError if another thread is inside one
  [[nodiscard]] detail::CallGuard::Entry enter(char const* call) const { return engine_->core_.calls.enter(call); }

  /// Seals the engine for an optimizer that reads the gradient shards. @note Collective: the first time.
  void attach_optimizer() const;
  /// A write of a unit's master shard: make it before the write is enqueued on compute, and destroy it after. While it
  /// lives, no update begins (nor another write, if state is offloaded), and no use of a unit begins or ends.
  class [[nodiscard]] Write {
   public:
    Write(Write&&) = delete;
    /// The unit's next gather waits for the writes. If the scope was left by an exception, an update does not count.
    ~Write() noexcept(false) {
      if (operation_ != nullptr) shards_.end_write(*operation_, updates_, std::uncaught_exceptions() <= exceptions_);
    }

   private:
    friend Shards;
    Write(Shards shards, Unit const& unit, bool updates)
        : shards_(shards),
          operation_(unit.empty() ? nullptr : &shards.engine_->core_.program.updates[unit.index()]),
          updates_(updates),
          access_(shards.engine_->core_.passes.accesses(), unit.name(), updates || shards.engine_->core_.offload) {
      if (operation_ != nullptr) shards_.before_write(*operation_, updates_);
    }
    Shards shards_;
    step::Operation const* operation_;  ///< nullptr: there is nothing to write
    bool updates_;
    step::OpenAccesses::Writing access_;
    int exceptions_ = std::uncaught_exceptions();
  };
  /// Begins an optimizer's update of the unit: compute waits until its gradient shard is complete. When the scope ends,
  /// the gradients are used, and the next backward pass begins new sums. A step is complete when each unit that has a
  /// gradient (has_gradient) had an update scope, even if nothing changed. Before that, the engine refuses passes,
  /// other steps, exports, saves and discard_gradients(), as after an exception between two units.
  /// @note Stream: reads of the gradient shard and writes of the master shard go to compute
  /// @throws UsageError without begin_step, if the unit is frozen, has no gradient, or was updated in this step
  Write update(Unit const& unit) const {
    expect_own(unit);
    engine_->core_.passes.expect_update(unit.index());
    return Write(*this, unit, true);
  }
  /// Begins a write of the unit's master shard by an import, an average of weights or the like. @note Stream: compute
  /// @throws UsageError before the engine is sealed
  Write write(Unit const& unit) const {
    expect_own(unit);
    return Write(*this, unit, false);
  }

  /// A scope in which all gradient shards may be read. While it lives, no use of a unit begins or ends.
  class [[nodiscard]] Reading {
   public:
    Reading(Reading&&) = delete;
    ~Reading() noexcept(false) { shards_.end_reading(std::uncaught_exceptions() <= exceptions_); }

   private:
    friend Shards;
    explicit Reading(Shards shards) : shards_(shards), access_(shards.engine_->core_.passes.accesses()) {
      shards_.order_reading();
    }
    Shards shards_;
    step::OpenAccesses::Reading access_;
    int exceptions_ = std::uncaught_exceptions();
  };
  /// Begins to read gradients: compute waits until all gradient shards are complete.
  Reading read_gradients() const { return Reading(*this); }

  /// Begins an optimizer's step.
  ///
  /// [Note: All ranks step, or none] If streams can fail, compute waits for the gradients of all units before the first
  /// update. An all-reduce of 0 elements then waits until all ranks have done so. So a task that throws before the
  /// updates leaves the weights of all ranks as they were.
  /// @param given  a GradNorm, whose factor the step applies
  /// @throws UsageError if gradients are missing or left half-way, the norm is not theirs or is left out (see
  /// clip_grad_norm), or a GradScaler lives and this is not its step; nothing has changed then
  template <class Norm = detail::NoNorm>
  void begin_step(std::string_view optimizer, float learning_rate, Norm const& given = {}) const {
    auto const entry = enter("begin_step");
    expect_own(optimizer, given);
    FSDP_EXPECTS(norm().loss_scale == nullptr || norm().scaler_steps,
                 "rank {}: {}: the gradients are scaled by a GradScaler: call GradScaler::step(optimizer) instead of "
                 "the optimizer's step",
                 engine_->rank(), optimizer);
    auto& core = engine_->core_;
    core.checks.expect_step(given.measurement());
    core.passes.abandon("an optimizer step begins");
    core.passes.complete_gradients();
    core.checks.set_stepped(given.measurement());
    history().add("step with learning rate", learning_rate);
    if constexpr (ReportsFailure<typename E::Stream>) meet();
    if (given.measurement() != 0) kernels::count_skipped(engine_->device(), engine_->compute(), norm().result);
    core.passes.begin_updates();
    if (core.offload) core.offload->begin_step();
  }
  /// Makes compute wait for the unit's masters, if they are offloaded.
  void order_read(Unit const& unit) const {
    if (auto const& offload = engine_->core_.offload; offload) offload->order_read(unit.index());
  }
  /// Blocks the calling thread until offloaded state is in host memory.
  void await_stores() const {
    if (auto const& offload = engine_->core_.offload; offload) offload->await_stores();
  }
  /// The engine's parts, for headers of the library: see EngineCore.
  auto& core() const { return engine_->core_; }
  /// The number of a use in the declared order. @throws UsageError if there is no such use, or it is another engine's
  std::size_t index_of(UseId use) const { return engine_->index_of(use); }
  /// @param given  a GradNorm
  /// @throws UsageError, on behalf of `what`, if the norm is of another engine's gradients
  template <class Norm>
  void expect_own(std::string_view what, Norm const& given) const {
    FSDP_EXPECTS(given.engine() == nullptr || given.engine() == engine_,
                 "rank {}: {}: the norm belongs to another engine's gradients", engine_->rank(), what);
  }
  /// Checks gradients and their norm, for norms and exports.
  detail::GradientChecks& checks() const { return engine_->core_.checks; }
  /// Former name of checks().
  [[deprecated("write checks(), or passes()")]] detail::GradientChecks& gate() const { return checks(); }
  /// The state of passes and parameters.
  auto& passes() const { return engine_->core_.passes; }
  /// Drops a forward pass in progress: every unit is dropped, and the next use starts a new pass.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  /// @param what  the refused action, for the message
  void abandon_pass(std::string_view what) const;
  /// Events that must be equal on all ranks; collectives compare them.
  detail::History& history() const { return engine_->core_.history; }

  /// Calls `act`, a collective of this engine.
  /// @throws why a stream of this rank has failed, in place of a PeerError that comes of it
  template <class Act>
  decltype(auto) with_cause(Act const& act) const {
    return engine_->core_.failures.with_cause(act);
  }

  /// The state of gradient norms, in device memory.
  auto& norm() const { return engine_->core_.storage.norm(); }
  /// All ranks; its collectives are enqueued on compute. @pre sealed
  auto& scalar_communicator() const { return *engine_->core_.scalar_comm; }
  /// The ranks that share units' shards; its collectives are enqueued on gather_stream(). @pre some unit has several
  auto& gather_communicator() const { return engine_->core_.executor.communicator(step::Group::gather); }
  auto& gather_stream() const { return engine_->core_.streams[StreamKind::gather]; }  ///< the stream of all-gathers

  /// Whether the unit trains, and a backward pass since the last step has come to it; without paths, every unit that
  /// trains has a gradient when a step begins. After begin_step: the step updates the unit, and has not yet.
  bool has_gradient(Unit const& unit) const { return passes().has_gradient(unit.index()); }

  /// Number of waits for a late event: see [Note: Events]. It is 0 in all steps that the event planner covers.
  std::size_t late_events() const { return engine_->core_.executor.late_events(); }
  /// Former name of late_events().
  [[deprecated("write late_events()")]] std::size_t late_records() const { return late_events(); }

  TraceHook<typename E::Device> const& trace() const { return engine_->core_.trace; }  ///< hook that records spans
  /// The span of a unit's update, which begins on compute.
  auto trace_update(Unit const& unit) const {
    return trace().begin(engine_->compute(), StreamKind::compute, unit.name(), "optimizer", "optimizer",
                         unit.shard_numel() * static_cast<std::int64_t>(size_of(unit.types().master)));
  }

 private:
  [[gnu::cold, gnu::noinline]] void expect_hookable(Unit const& unit) const;
  [[gnu::noinline]] void expect_own(Unit const& unit) const;
  void expect_of_engine(Unit const& unit) const {
    FSDP_EXPECTS(unit.index() < size() && &(*this)[unit.index()] == &unit,
                 "rank {}: unit '{}' belongs to another engine; pass a unit of this engine", engine_->rank(),
                 unit.name());
  }
  void order_reading() const {
    for (auto const& operation : engine_->core_.program.norms) engine_->core_.executor.order(operation);
  }
  [[gnu::noinline]] void end_reading(bool whole) const;
  [[gnu::noinline]] void before_write(step::Operation const& operation, bool updates) const;
  /// @param whole  false: an exception has ended the scope
  [[gnu::noinline]] void end_write(step::Operation const& operation, bool updates, bool whole) const;
  void meet() const;

  E* engine_;
};

template <class E>
void Shards<E>::attach_optimizer() const {
  auto const entry = enter("attach_optimizer");
  engine_->seal();
  engine_->core_.storage.count_gradients();
}

template <class E>
void Shards<E>::abandon_pass(std::string_view what) const {
  engine_->core_.passes.abandon(what);
}

template <class E>
void Shards<E>::expect_hookable(Unit const& unit) const {
  expect_of_engine(unit);
  engine_->core_.expect_unsealed(formatted("on_reduced was called for unit '{}'", unit.name()), "call it");
  FSDP_EXPECTS(!unit.frozen, "rank {}: on_reduced: unit '{}' is frozen: it has no gradients", engine_->rank(),
               unit.name());
}

template <class E>
void Shards<E>::expect_own(Unit const& unit) const {
  FSDP_EXPECTS(engine_->sealed(), "rank {}: unit '{}' is written before the engine is sealed; call seal() first",
               engine_->rank(), unit.name());
  expect_of_engine(unit);
}

template <class E>
void Shards<E>::end_reading(bool whole) const {
  for (auto const& operation : engine_->core_.program.norms) engine_->core_.executor.remember(operation, whole);
}

template <class E>
void Shards<E>::before_write(step::Operation const& operation, bool updates) const {
  if (auto const& offload = engine_->core_.offload; offload) offload->before_write(operation.unit, updates);
  engine_->core_.executor.order(operation);
}

template <class E>
void Shards<E>::end_write(step::Operation const& operation, bool updates, bool whole) const {
  if (auto const& offload = engine_->core_.offload; offload)
    offload->end_write(operation.unit, updates, whole);
  else
    engine_->core_.executor.remember(operation, whole);
  if (!updates || !whole) return;
  passes().note_update(operation);
}

template <class E>
void Shards<E>::meet() const {
  order_reading();
  if (engine_->world_size() == 1) return;
  with_cause([&] {
    scalar_communicator().all_reduce(engine_->compute(), static_cast<double const*>(nullptr),
                                     static_cast<double*>(nullptr), 0, history().label("all units", "optimizer"));
  });
}

namespace detail {
/// Calls `update(unit)` for every unit that has a gradient, each in its update scope and span: a step after begin_step.
template <class E, class Update>
void update_units(Shards<E> const& shards, Update&& update) {
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (!shards.has_gradient(unit)) continue;
    auto const updating = shards.update(unit);
    auto span = shards.trace_update(unit);
    update(unit);
    span.end();
  }
}
}  // namespace detail

/// A line for each unit: its strategy, over how many ranks, its elements without and with padding, and the elements of
/// this rank's shard.
/// @pre the engine is sealed
template <class E>
[[gnu::cold]] std::string to_text(Shards<E> const& shards) {
  std::string text;
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto const& unit = shards[u];
    auto const& at = unit.placement();
    text += formatted("unit '{}': {} over {}{}; {} elements, padded to {}; rank {}: {} to {}\n", unit.name(),
                      unit.strategy().name, at.shards, unit.frozen ? ", frozen" : "", unit.layout().numel(),
                      unit.full_numel(), at.rank, unit.shard().begin, unit.shard().end);
  }
  return text;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
