// SPDX-License-Identifier: Apache-2.0
// An exponential moving average of the weights, in shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/base/fixed_array.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// An exponential moving average of all weights that train, in fp32, for evaluation and export:
///
/// ```
/// fsdp::Ema ema{engine, 0.999f};
/// adamw.step(lr, norm);
/// ema.update();                                      // after each step
/// { auto const on = ema.swap(); evaluate(engine); }  // the model has the averages while `on` lives
/// fsdp::TrainingState state{adamw, ema};             // both in a checkpoint
/// fsdp::save(engine, state, "out");
/// ```
///
/// The average begins with the weights. Memory: one fp32 value for each element of this rank's shards that train. The
/// engine must outlive it. Moving it moves no memory.
template <class E>
class Ema {
  /// State of an Ema. It stays in place when the Ema is moved, and as long as a swap lasts.
  struct State {
    [[gnu::cold]] State(E& of, std::string_view called) : engine(&of), name(called) {
      auto const shards = engine->shards();
      offsets = detail::FixedArray<std::int64_t>(shards.size() + 1);
      for (std::size_t u = 0; u < shards.size(); ++u)
        offsets[u + 1] = offsets[u] + (shards[u].trains() ? shards[u].shard_numel() : 0);
      auto const bytes = static_cast<std::size_t>(offsets.back()) * sizeof(float);
      averages = {engine->device(), engine->account(), MemoryTag::optimizer, bytes};
      engine->account().add_live(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    }
    State(State&&) = delete;
    [[gnu::cold]] ~State() {
      engine->drain();
      engine->account().add_live(MemoryTag::optimizer, -static_cast<std::int64_t>(averages.bytes()));
    }
    /// Calls `act(unit, averages)` for every unit that trains.
    template <class Act>
    void for_each_unit(Act&& act) const {
      auto const shards = engine->shards();
      for (std::size_t u = 0; u < shards.size(); ++u)
        if (shards[u].trains()) act(shards[u], averages.template as<float>() + offsets[u]);
    }

    E* engine;
    std::string name;
    std::int64_t updates = 0;
    detail::FixedArray<std::int64_t> offsets;  ///< of each unit's averages; one more for the end
    AccountedMemory<typename E::Device const> averages;
  };

 public:
  /// Seals the engine.
  /// @param decay  of update() without an argument
  /// @param name   in checkpoints; several averages of one checkpoint have names of their own
  /// @throws UsageError unless 0 <= decay < 1; ConfigError on every rank if ranks' differ
  /// @note Collective: yes.
  [[gnu::cold]] explicit Ema(E& engine, float decay = 0.999f, std::string_view name = "Ema") : decay_(decay) {
    expect_decay(decay);
    engine.seal();
    auto const entry = engine.shards().enter("Ema's constructor");
    detail::expect_equal_texts(engine.world(), formatted("{}: decay {}", name, decay), "options of Ema");
    state_.reset(new State(engine, name));
    reset();
  }
  template <class None = void>
  Ema(E&, ...) = delete;  // fsdp: expected (engine[, decay[, name]])

  void update() { update(decay_); }  ///< updates the averages with the decay of the constructor
  /// Updates each average to decay * average + (1 - decay) * weight, unless clipping or a GradScaler skipped the last
  /// step. Call it once after each step.
  /// @throws UsageError unless 0 <= decay < 1; inside a use, an evaluation or swap(), or half-way through a step; or if
  /// clip_grad_norm has measured since the step: then it is not known any more whether the step was skipped
  /// @note Stream: on compute. The calling thread waits for nothing.
  /// @note Collective: no; but all ranks update alike, which the next collective compares.
  void update(float decay) {
    expect_decay(decay);
    auto const& now = state();
    auto& of = *now.engine;
    auto const shards = of.shards();
    auto const entry = shards.enter("Ema::update");
    auto const& passes = shards.passes();
    passes.expect_at_rest("averages of weights are updated");
    passes.expect_not_swapped("averages of weights are updated");
    auto const* const step = shards.checks().last_step_measured("Ema::update") ? shards.norm().result : nullptr;
    shards.history().add("Ema::update with decay", decay);
    now.for_each_unit([&](auto& unit, float* average) {
      shards.order_read(unit);
      unit.with_master([&](auto const* master) {
        kernels::update_average(of.device(), of.compute(), average, master, unit.shard_numel(), decay,
                                static_cast<ClipScalars const*>(step));
      });
    });
    ++state().updates;
  }
  /// Sets the averages to the weights. @note Stream: on compute
  void reset() {
    auto& now = state();
    auto& of = *now.engine;
    auto const shards = of.shards();
    auto const entry = shards.enter("Ema::reset");
    shards.passes().expect_not_swapped("averages of weights are reset");
    shards.history().add("Ema::reset");
    now.for_each_unit([&](auto& unit, float* average) {
      shards.order_read(unit);
      unit.with_master(
          [&](auto const* master) { kernels::cast(of.device(), of.compute(), master, average, unit.shard_numel()); });
    });
    now.updates = 0;
  }

  /// A scope in which the model has the averages, rounded where masters are narrower than fp32, and the weights wait.
  class [[nodiscard]] Swapped {
   public:
    Swapped(Swapped&&) = delete;
    /// Restores the weights, bit by bit. A forward pass under way is dropped; if a use is open, its end throws a
    /// UsageError.
    /// @throws what enqueueing throws, unless another exception is on its way. The parameters are not whole then: load
    /// a checkpoint, or import them
    ~Swapped() noexcept(false) {
      bool const unwinding = std::uncaught_exceptions() > exceptions_;
      try {
        swap_back(*state_, kept_);
      } catch (...) {
        state_->engine->shards().passes().begin_replacing("Ema::swap");
        if (!unwinding) throw;
      }
    }

   private:
    friend Ema;
    explicit Swapped(std::shared_ptr<State> state) : state_(std::move(state)), kept_(swap_in(*state_)) {}
    std::shared_ptr<State> state_;
    AccountedMemory<typename E::Device const> kept_;  ///< masters that are narrower than fp32
    int exceptions_ = std::uncaught_exceptions();
  };
  /// Replaces the weights by the averages while the result lives: evaluate or export inside. Until it ends, backward
  /// passes, optimizer steps, imports, saves, loads and updates throw.
  /// @throws UsageError inside a use, an evaluation or another swap(), or half-way through a step. A forward pass under
  /// way is forgotten
  /// @note Stream: on compute; the next gather of a unit waits for its averages. No memory for fp32 masters; for
  /// narrower ones a copy of them.
  /// @note Collective: no; but all ranks swap alike, which the next collective compares.
  Swapped swap() { return state(), Swapped(state_); }

  E& engine() const { return *state().engine; }  ///< the engine whose weights are averaged
  float decay() const { return decay_; }         ///< decay of update() without an argument; >= 0, < 1

  // State for checkpoints: see fsdp::checkpoint::Checkpointable.
  std::string_view name() const { return state().name; }                      ///< name in checkpoints
  static std::vector<std::string_view> state_names() { return {"average"}; }  ///< names of its arrays in checkpoints
  /// A unit's averages, laid out as its shard; nullptr if it is frozen.
  float* state(std::size_t, std::size_t unit) const {
    auto const& now = state();
    return now.engine->shards()[unit].frozen ? nullptr : now.averages.template as<float>() + now.offsets[unit];
  }
  /// Calls of update() since the averages were the weights.
  std::int64_t steps() const { return state().updates; }
  void set_steps(std::int64_t steps) { state().updates = steps; }  ///< sets the count of steps(), when a load ends

 private:
  static void expect_decay(float decay) {
    FSDP_EXPECTS(math::is_finite(decay) && decay >= 0.0f && decay < 1.0f, "Ema: the decay must be in [0, 1), got {}",
                 decay);
  }
  State& state() const {
    FSDP_EXPECTS(state_ != nullptr, "Ema was used after it was moved from");
    return *state_;
  }
  [[gnu::cold]] static AccountedMemory<typename E::Device const> swap_in(State& state) {
    auto& engine = *state.engine;
    auto const shards = engine.shards();
    auto const entry = shards.enter("Ema::swap");
    shards.passes().expect_at_rest("Ema::swap is called");
    shards.passes().expect_not_swapped("Ema::swap is called");
    shards.abandon_pass("averages of weights are swapped in");
    std::size_t bytes = 0;
    state.for_each_unit([&](auto& unit, float*) {
      if (unit.types().master != DType::f32)
        bytes += static_cast<std::size_t>(unit.shard_numel()) * size_of(unit.types().master);
    });
    AccountedMemory<typename E::Device const> kept;
    if (bytes > 0) kept = {engine.device(), engine.account(), MemoryTag::workspace, bytes};
    shards.passes().set_swapped(true);
    try {
      exchange(state, kept.data(), true);
    } catch (...) {
      shards.passes().set_swapped(false);
      shards.passes().begin_replacing("Ema::swap");
      throw;
    }
    return kept;
  }
  [[gnu::cold]] static void swap_back(State& state, AccountedMemory<typename E::Device const> const& kept) {
    auto& engine = *state.engine;
    auto const shards = engine.shards();
    auto const entry = shards.enter("Ema::swap");
    shards.passes().set_swapped(false);
    shards.passes().cut("the scope of Ema::swap ended");
    exchange(state, kept.data(), false);
    if (kept) engine.device().synchronize(engine.compute());  // the copy is freed now
  }

  /// Exchanges averages and masters. Masters that are narrower than fp32 are copied to `kept`.
  /// @param in  the averages become the masters; false: the masters come back
  [[gnu::cold]] static void exchange(State& state, std::byte* kept, bool in) {
    auto& engine = *state.engine;
    auto const shards = engine.shards();
    shards.history().add("Ema::swap");
    state.for_each_unit([&](auto& unit, float* average) {
      auto const writing = shards.write(unit);
      unit.with_master([&](auto* master) {
        if constexpr (std::is_same_v<decltype(master), float*>) {
          kernels::swap(engine.device(), engine.compute(), master, average, unit.shard_numel());
        } else {
          auto const bytes = static_cast<std::size_t>(unit.shard_numel()) * sizeof(*master);
          auto* const copy = std::exchange(kept, kept + bytes);
          engine.device().copy_async(engine.compute(), in ? static_cast<void*>(copy) : master,
                                     in ? static_cast<void const*>(master) : copy, bytes);
          if (in)
            kernels::cast(engine.device(), engine.compute(), static_cast<float const*>(average), master,
                          unit.shard_numel());
        }
      });
    });
  }

  float decay_;
  std::shared_ptr<State> state_;  ///< null: moved from
};
template <class E>
Ema(E&) -> Ema<E>;
template <class E>
Ema(E&, float) -> Ema<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
