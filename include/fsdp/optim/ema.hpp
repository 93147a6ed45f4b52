// SPDX-License-Identifier: Apache-2.0
// An exponential moving average of the weights, in shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/engine/moved_pointer.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/fixed_array.hpp"
#include "fsdp/kernels/ema.hpp"
#include "fsdp/kernels/math.hpp"
#include "fsdp/memory.hpp"

namespace fsdp {

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
/// It begins with the weights. Memory: one fp32 value for each element of this rank's shards that train. The engine
/// must outlive it. Moving it moves no memory.
template <class E>
class Ema {
 public:
  /// Seals the engine.
  /// @param decay  of update() without an argument
  /// @throws UsageError unless 0 <= decay < 1; ConfigError on every rank if ranks' differ
  /// @note Collective: yes.
  [[gnu::cold]] explicit Ema(E& engine, float decay = 0.999f) : engine_(&engine), decay_(decay) {
    expect_decay(decay);
    engine.seal();
    auto const shards = engine.shards();
    auto const turn = shards.enter("Ema's constructor");
    detail::expect_equal_texts(engine.world(), formatted("Ema: decay {}", decay), "options of Ema");
    offsets_ = detail::FixedArray<std::int64_t>(shards.size() + 1);
    for (std::size_t u = 0; u < shards.size(); ++u)
      offsets_[u + 1] = offsets_[u] + (shards[u].trains() ? shards[u].shard_numel() : 0);
    auto const bytes = static_cast<std::size_t>(offsets_.back()) * sizeof(float);
    averages_ = {engine.device(), engine.account(), MemoryTag::optimizer, bytes};
    engine.account().lease(MemoryTag::optimizer, static_cast<std::int64_t>(bytes));
    reset();
  }
  template <class None = void>
  Ema(E&, ...) = delete;  // fsdp: expected (engine[, decay])
  Ema(Ema&&) noexcept = default;
  [[gnu::cold]] Ema& operator=(Ema&& other) noexcept {
    release();
    engine_ = std::move(other.engine_);
    decay_ = other.decay_;
    updates_ = other.updates_;
    offsets_ = std::move(other.offsets_);
    averages_ = std::move(other.averages_);
    return *this;
  }
  [[gnu::cold]] ~Ema() { release(); }

  void update() { update(decay_); }
  /// Each average becomes decay * average + (1 - decay) * weight, unless clipping or a GradScaler skipped the last
  /// step.
  /// @throws UsageError unless 0 <= decay < 1; inside a use, an evaluation or swap(), or half-way through a step; or if
  /// clip_grad_norm has measured since the step: then it is not known any more whether the step was skipped
  /// @note Stream: on compute. The calling thread waits for nothing.
  /// @note Collective: no; but all ranks update alike, which the next collective compares.
  void update(float decay) {
    expect_decay(decay);
    auto const shards = engine().shards();
    auto const turn = shards.enter("Ema::update");
    auto const& gate = shards.gate();
    gate.expect_at_rest("averages of weights are updated");
    gate.expect_not_swapped("averages of weights are updated");
    auto const* const step = gate.last_step_measured("Ema::update") ? shards.norm().result : nullptr;
    shards.history().add("Ema::update", decay);
    for_each_unit([&](auto& unit, float* average) {
      unit.with_master([&](auto const* master) {
        kernels::update_average(engine().device(), engine().compute(), average, master, unit.shard_numel(), decay,
                                static_cast<ClipScalars const*>(step));
      });
    });
    ++updates_;
  }
  /// The averages become the weights as they are. @note Stream: on compute
  void reset() {
    auto const shards = engine().shards();
    auto const turn = shards.enter("Ema::reset");
    shards.gate().expect_not_swapped("averages of weights are reset");
    shards.history().add("Ema::reset");
    for_each_unit([&](auto& unit, float* average) {
      unit.with_master([&](auto const* master) {
        kernels::cast(engine().device(), engine().compute(), master, average, unit.shard_numel());
      });
    });
    updates_ = 0;
  }

  /// While it lives, the model has the averages, rounded where masters are narrower than fp32, and the weights wait.
  class [[nodiscard]] Swapped {
   public:
    Swapped(Swapped&&) = delete;
    /// The weights are back, bit by bit.
    ~Swapped() noexcept(false) {
      bool const unwinding = std::uncaught_exceptions() > exceptions_;
      try {
        ema_->swap_back(kept_);
      } catch (...) {
        ema_->engine().shards().gate().begin_replacing("Ema::swap");
        if (!unwinding) throw;
      }
    }

   private:
    friend Ema;
    using Kept = AccountedMemory<typename E::Device const>;
    explicit Swapped(Ema& ema) : ema_(&ema), kept_(ema.swap_in()) {}
    Ema* ema_;
    Kept kept_;  ///< masters that are narrower than fp32
    int exceptions_ = std::uncaught_exceptions();
  };
  /// Evaluate or export inside. Until the result ends, optimizer steps, imports, saves, loads and updates throw. The
  /// average must not be moved.
  /// @throws UsageError inside a use, an evaluation or another swap(), or half-way through a step. A forward pass under
  /// way is forgotten
  /// @note Stream: on compute; the next gather of a unit waits for its averages. No memory for fp32 masters; for
  /// narrower ones a copy of them.
  /// @note Collective: no; but all ranks swap alike, which the next collective compares.
  Swapped swap() { return Swapped(*this); }

  E& engine() const { return *engine_.get("Ema"); }
  float decay() const { return decay_; }

  // What a checkpoint keeps: fsdp::checkpoint::Checkpointable says what each is.
  static constexpr std::string_view name() { return "Ema"; }
  static std::vector<std::string_view> state_names() { return {"average"}; }
  /// A unit's averages, laid out as its shard; nullptr if it is frozen.
  float* state(std::size_t, std::size_t unit) const {
    return engine().shards()[unit].frozen ? nullptr : averages_.template as<float>() + offsets_[unit];
  }
  /// Updates since the averages were the weights.
  std::int64_t steps() const { return updates_; }
  void set_steps(std::int64_t steps) { updates_ = steps; }

 private:
  using Kept = typename Swapped::Kept;

  static void expect_decay(float decay) {
    FSDP_EXPECTS(math::is_finite(decay) && decay >= 0.0f && decay < 1.0f, "Ema: the decay must be in [0, 1), got {}",
                 decay);
  }
  [[gnu::cold]] void release() {
    if (!engine_.is_set()) return;
    engine().drain();
    engine().account().lease(MemoryTag::optimizer, -static_cast<std::int64_t>(averages_.bytes()));
  }
  /// Calls `act(unit, averages)` for every unit that trains.
  template <class Act>
  void for_each_unit(Act&& act) const {
    auto const shards = engine().shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      if (shards[u].trains()) act(shards[u], averages_.template as<float>() + offsets_[u]);
  }
  [[gnu::cold]] Kept swap_in() {
    auto const shards = engine().shards();
    auto const turn = shards.enter("Ema::swap");
    shards.gate().expect_at_rest("averages of weights are swapped in");
    shards.gate().expect_not_swapped("averages of weights are swapped in");
    shards.abandon_pass("averages of weights are swapped in");
    std::size_t bytes = 0;
    for_each_unit([&](auto& unit, float*) {
      if (unit.types().master != DType::f32)
        bytes += static_cast<std::size_t>(unit.shard_numel()) * size_of(unit.types().master);
    });
    Kept kept;
    if (bytes > 0) kept = {engine().device(), engine().account(), MemoryTag::workspace, bytes};
    shards.history().add("Ema::swap");
    shards.gate().set_swapped(true);
    for_each_unit([&, at = kept.data()](auto& unit, float* average) mutable {
      auto const writing = shards.write(unit);
      unit.with_master([&](auto* master) {
        if constexpr (std::is_same_v<decltype(master), float*>) {
          kernels::swap(engine().device(), engine().compute(), master, average, unit.shard_numel());
        } else {
          auto const size = static_cast<std::size_t>(unit.shard_numel()) * sizeof(*master);
          engine().device().copy_async(engine().compute(), at, master, size);
          kernels::cast(engine().device(), engine().compute(), static_cast<float const*>(average), master,
                        unit.shard_numel());
          at += size;
        }
      });
    });
    return kept;
  }
  [[gnu::cold]] void swap_back(Kept const& kept) {
    auto const shards = engine().shards();
    auto const turn = shards.enter("Ema::swap");
    shards.gate().set_swapped(false);
    shards.abandon_pass("weights are swapped back");
    shards.history().add("Ema::swap");
    for_each_unit([&, at = kept.data()](auto& unit, float* average) mutable {
      auto const writing = shards.write(unit);
      unit.with_master([&](auto* master) {
        if constexpr (std::is_same_v<decltype(master), float*>) {
          kernels::swap(engine().device(), engine().compute(), master, average, unit.shard_numel());
        } else {
          auto const size = static_cast<std::size_t>(unit.shard_numel()) * sizeof(*master);
          engine().device().copy_async(engine().compute(), master, at, size);
          at += size;
        }
      });
    });
    if (kept) engine().device().synchronize(engine().compute());  // the copy is freed now
  }

  detail::MovedPointer<E> engine_;
  float decay_;
  std::int64_t updates_ = 0;
  detail::FixedArray<std::int64_t> offsets_;  ///< of each unit's averages; one more than there are
  AccountedMemory<typename E::Device const> averages_;
};
template <class E>
Ema(E&, float) -> Ema<E>;

}  // namespace fsdp
