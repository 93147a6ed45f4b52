// SPDX-License-Identifier: Apache-2.0
// Loss scaling for fp16 gradients: grows while steps succeed, backs off when gradients overflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/kernels/norms.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/optim/grad_clip.hpp"
#include "fsdp/optim/grad_norm.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Defaults are PyTorch's.
struct GradScalerOptions {
  float init_scale = 65536.0f;
  float growth_factor = 2.0f;
  float backoff_factor = 0.5f;
  std::int32_t growth_interval = 2000;  ///< steps taken in a row before the scale grows
};

/// Keeps the factor that backward multiplies its loss gradient by, so that small gradients do not vanish in fp16.
///
/// ```
/// fsdp::GradScaler scaler(engine);
/// // backward's first kernel: dy = (y - target) * *scaler.scale()
/// auto norm = fsdp::clip_grad_norm(engine, 1.0f);  // optional: the norm is that of the unscaled gradients
/// scaler.step(adamw, lr, norm);                    // instead of adamw.step(lr, norm)
/// ```
///
/// A step whose gradients are not all finite changes no parameter and no moment on any rank, and multiplies the scale
/// by backoff_factor; growth_interval steps in a row without one multiply it by growth_factor, unless that overflows
/// (Micikevicius et al.: Mixed Precision Training, ICLR 2018; the rules of torch.amp.GradScaler). Whether gradients are
/// finite follows from their global norm, so all ranks decide alike, and without the host: scale and count live in
/// device memory. The engine must outlive the scaler; micro-steps of one step share one scale.
template <class E>
class GradScaler {
 public:
  /// Seals the engine. From here on clip_grad_norm takes the scale out, and optimizers step through the scaler alone.
  /// @throws UsageError on options out of range, or if the engine has a scaler; ConfigError if ranks' options differ
  /// @note Collective: yes. Waits for compute once.
  explicit GradScaler(E& engine, GradScalerOptions options = {}) : engine_(&engine), options_(options) {
    FSDP_EXPECTS(math::is_finite(options.growth_factor) && options.growth_factor > 1.0f &&
                     options.backoff_factor > 0.0f && options.backoff_factor < 1.0f,
                 "GradScaler: growth_factor {} must be above 1, and backoff_factor {} must be in (0, 1)",
                 options.growth_factor, options.backoff_factor);
    FSDP_EXPECTS(options.growth_interval > 0, "GradScaler: the growth interval must be positive, got {}",
                 options.growth_interval);
    engine.seal();
    FSDP_EXPECTS(engine.shards().norm().loss_scale == nullptr,
                 "rank {}: the engine already has a GradScaler; expected one for each engine", engine.rank());
    detail::expect_equal_texts(engine.world(),
                               formatted("GradScaler: growth {}, backoff {}, interval {}", options.growth_factor,
                                         options.backoff_factor, options.growth_interval),
                               "GradScaler options");
    memory_ = {engine.device(), engine.account(), MemoryTag::scalars, sizeof(LossScale)};
    load_state({options.init_scale, 0});
    engine.shards().norm().loss_scale = scale();
  }
  GradScaler(GradScaler&&) = delete;
  template <class None = void>
  GradScaler(E&, ...) = delete;  // fsdp: expected (engine[, GradScalerOptions]); check the names in braces
  ~GradScaler() {
    engine_->drain();
    if (memory_) engine_->shards().norm().loss_scale = nullptr;
  }

  /// The address of the scale in device memory. Work on compute may read it.
  float const* scale() const { return &on_device()->scale; }
  /// The scale. @note Waits for compute.
  float value() const { return state().scale; }

  /// Steps `optimizer` with learning rate `lr` and gradients unscaled, or skips, and adapts the scale.
  /// @param measured  tells whether gradients are finite; none: that is measured
  /// @param optimizer  of this engine
  /// @throws UsageError as the optimizer's step does
  /// @note Stream: on compute. The calling thread waits for nothing.
  /// @note Collective: one all-reduce as clip_grad_norm, unless a norm is given.
  template <class Optimizer>
  requires(!requires { typename Optimizer::LearningRates; }) void step(Optimizer& optimizer, float lr,
                                                                       GradNorm<E> measured = {}) {
    step_with(optimizer, lr, measured);
  }
  /// Steps fsdp::Optimizers: `scaler.step(both, {0.02f, lr}, norm)`.
  template <class Optimizers>
  void step(Optimizers& optimizers, typename Optimizers::LearningRates const& rates, GradNorm<E> measured = {}) {
    step_with(optimizers, rates, measured);
  }

  /// Steps skipped so far, with any scaler of the engine. @note Waits for compute.
  std::int64_t skipped() const {
    auto const turn = engine_->shards().enter("GradScaler::skipped");
    ClipScalars now{};
    engine_->device().copy_async(engine_->compute(), &now, engine_->shards().norm().result, sizeof now);
    engine_->device().synchronize(engine_->compute());
    return now.skipped;
  }
  /// Scale and steps taken since it last changed, for checkpoints. @note Waits for compute.
  LossScale state() const {
    auto const turn = engine_->shards().enter("GradScaler::state");
    LossScale now{};
    engine_->device().copy_async(engine_->compute(), &now, on_device(), sizeof now);
    engine_->device().synchronize(engine_->compute());
    return now;
  }
  /// Continues from a state().
  /// @throws UsageError if the scale is not finite and positive, or the count is negative; ConfigError if ranks give
  /// different states
  /// @note Collective: yes. Waits for compute.
  void load_state(LossScale state) {
    auto const turn = engine_->shards().enter("GradScaler::load_state");
    FSDP_EXPECTS(math::is_finite(state.scale) && state.scale > 0.0f && state.good_steps >= 0,
                 "GradScaler: the scale {} must be finite and positive, the count {} not negative", state.scale,
                 state.good_steps);
    detail::expect_equal_texts(engine_->world(),
                               formatted("GradScaler: scale {}, {} good steps", state.scale, state.good_steps),
                               "GradScaler state");
    engine_->device().copy_async(engine_->compute(), on_device(), &state, sizeof state);
    engine_->device().synchronize(engine_->compute());
  }

 private:
  template <class Optimizer, class Rates>
  void step_with(Optimizer& optimizer, Rates const& rates, GradNorm<E> measured) {
    auto const inside = engine_->shards().enter("GradScaler::step");
    auto& norm = engine_->shards().norm();
    if constexpr (requires { optimizer.engine(); })
      FSDP_EXPECTS(static_cast<void const*>(&optimizer.engine()) == engine_,
                   "rank {}: GradScaler::step: the optimizer belongs to another engine, whose gradients this "
                   "GradScaler does not scale",
                   engine_->rank());
    engine_->shards().expect_own("GradScaler::step", measured);
    auto& checks = engine_->shards().checks();
    checks.expect_reduced("GradScaler::step is called");
    checks.expect_norm(measured.measurement());
    if (measured.engine() == nullptr) measured = clip_grad_norm(*engine_, std::numeric_limits<float>::infinity());
    struct Turn {
      bool& on;
      explicit Turn(bool& flag) : on(flag) { on = true; }
      Turn(Turn const&) = delete;
      ~Turn() { on = false; }
    };
    {
      Turn const turn(norm.scaler_steps);
      optimizer.step(rates, measured);
    }
    kernels::update_scale(engine_->device(), engine_->compute(), static_cast<ClipScalars const*>(norm.result),
                          options_.growth_factor, options_.backoff_factor, options_.growth_interval, on_device());
  }

  LossScale* on_device() const { return memory_.template as<LossScale>(); }

  E* engine_;
  GradScalerOptions options_;
  AccountedMemory<typename E::Device const> memory_;
};
template <class E>
GradScaler(E&) -> GradScaler<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
