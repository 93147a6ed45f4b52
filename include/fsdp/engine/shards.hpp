// SPDX-License-Identifier: Apache-2.0
// The second door of an engine: for what works on shards, between passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "fsdp/engine/call_guard.hpp"
#include "fsdp/engine/history.hpp"
#include "fsdp/engine_options.hpp"
#include "fsdp/error.hpp"
#include "fsdp/failure.hpp"
#include "fsdp/trace/trace.hpp"
#include "fsdp/wait_site.hpp"

namespace fsdp {

namespace detail {
/// In the place of a GradNorm.
struct NoNorm {
  static constexpr void const* engine() { return nullptr; }
  static constexpr std::uint64_t measurement() { return 0; }
};
}  // namespace detail

/// What optimizers, norms, exports, checkpoints and the like need of an engine, and training loops do not. A handle:
/// copied as a pointer is. docs/extending.md says who needs what.
///
/// Everything here is enqueued on the engine's compute stream unless a comment says otherwise, by the thread that calls
/// the modules.
template <class E>
class Shards {
 public:
  using Unit = typename E::Unit;

  explicit Shards(E& engine) : engine_(&engine) {}

  /// Units in declared order. Their shards, layouts and slices are fixed once the engine is sealed. A unit without
  /// parameters (a ReLU) has a shard of 0 elements, and no gradient.
  std::size_t size() const { return engine_->core_.declared.units().size(); }
  Unit& operator[](std::size_t index) const { return *engine_->core_.declared.units()[index]; }
  Unit& operator[](UnitId id) const { return (*this)[id.index]; }

  /// The calling thread is inside a call of the engine while the result lives. Calls nest.
  /// @param call  its name, a literal
  /// @throws UsageError if another thread is inside one
  [[nodiscard]] detail::CallGuard::Turn enter(char const* call) const { return engine_->core_.calls.enter(call); }

  /// An optimizer will read the gradient shards: seals the engine. @note Collective: the first time.
  void attach_optimizer() const {
    auto const turn = enter("attach_optimizer");
    engine_->seal();
    engine_->core_.storage.lease_gradients();
  }
  /// Compute waits until the unit's gradient shard is complete.
  void await_reduced(Unit& unit) const {
    unit.reduced.await_pending(engine_->device(), engine_->compute(), WaitSite::optimizer_reduced);
  }
  /// Compute has been given a write of the unit's master shard: its next gather waits for this.
  void mark_written(Unit& unit) const { engine_->core_.mark_written(unit); }
  /// The write was an optimizer's: the gradients are used, and the next backward pass begins their sums anew. A step is
  /// complete when all units with parameters are marked, also those that it leaves as they are; until then the engine
  /// takes no other call, as after an exception between two units.
  void mark_updated(Unit& unit) const {
    mark_written(unit);
    if (!std::exchange(unit.fresh, true)) gate().updated();
  }

  /// An optimizer's step begins.
  ///
  /// [Note: All ranks step, or none] Where streams can fail, compute waits for every unit's gradients before the first
  /// update, and for the other ranks' compute streams, which wait for theirs: a collective of 0 elements. So a task
  /// that throws before the updates leaves the weights of all ranks as they were.
  /// @param given  a GradNorm, whose factor the step applies
  /// @throws UsageError if gradients are missing or left half-way, the norm is not theirs or is left out (see
  /// clip_grad_norm), or a GradScaler lives and this is not its step; nothing has changed then
  template <class Norm = detail::NoNorm>
  void begin_step(std::string_view optimizer, float learning_rate, Norm const& given = {}) const {
    auto const turn = enter("begin_step");
    expect_own(optimizer, given);
    FSDP_EXPECTS(norm().loss_scale == nullptr || norm().scaler_steps,
                 "rank {}: {}: the gradients are scaled by a GradScaler: call GradScaler::step(optimizer) instead of "
                 "the optimizer's step",
                 engine_->rank(), optimizer);
    gate().begin_step(given.measurement());
    history().add("step", learning_rate);
    if constexpr (TellsFailure<typename E::Stream>) meet();
    gate().begin_updates();
  }
  /// @param given  a GradNorm, of this engine's gradients or of none
  /// @param what   it is given to, for the message
  /// @throws UsageError
  template <class Norm>
  void expect_own(std::string_view what, Norm const& given) const {
    FSDP_EXPECTS(given.engine() == nullptr || given.engine() == engine_,
                 "rank {}: {}: the norm belongs to another engine's gradients", engine_->rank(), what);
  }
  /// Whether gradients are what a norm or an export takes them for.
  auto& gate() const { return engine_->core_.gate; }
  /// Forgets a forward pass under way: every unit is dropped, the next use starts a new one.
  /// @throws UsageError inside a use, or in the middle of a backward pass
  /// @param what  forgets it, for the message
  void abandon_pass(std::string_view what) const { engine_->core_.passes.abandon(what); }
  /// What all ranks must have done alike: collectives compare it.
  History& history() const { return engine_->core_.history; }

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
  auto& gather_communicator() const { return engine_->core_.gather.communicator(); }
  auto& gather_stream() const { return engine_->core_.gather.stream(); }

  TraceHook<typename E::Device> const& trace() const { return engine_->core_.trace; }
  /// The span of a unit's update, which begins on compute.
  auto trace_update(Unit const& unit) const {
    return trace().begin(engine_->compute(), StreamKind::compute, unit.name(), "optimizer", "optimizer",
                         unit.shard_numel() * static_cast<std::int64_t>(sizeof(typename E::Master)));
  }

 private:
  void meet() const {
    for (std::size_t u = 0; u < size(); ++u) await_reduced((*this)[u]);
    if (engine_->world_size() == 1) return;
    with_cause([&] {
      scalar_communicator().all_reduce(engine_->compute(), static_cast<double const*>(nullptr),
                                       static_cast<double*>(nullptr), 0, history().label("all units", "optimizer"));
    });
  }

  E* engine_;
};

}  // namespace fsdp
