// SPDX-License-Identifier: Apache-2.0
// The global gradient norm, clipping by it, and loss scaling for fp16 gradients.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>

#include "fsdp/concepts.hpp"
#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/engine/register_module.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/trace/trace.hpp"
#include "fsdp/error.hpp"
#include "fsdp/memory.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// The norm and the clipping factor that clip_grad_norm computed. The numbers stay in device memory until they
/// are read. An optimizer's step takes the object once. A default-constructed one is empty: a step with it clips
/// nothing.
template <class E>
class GradNorm {
 public:
  GradNorm() = default;
  /// Made by clip_grad_norm. @param measurement  its number among the engine's measurements, from 1
  GradNorm(E& engine, std::uint64_t measurement) : engine_(&engine), measurement_(measurement) {}

  /// The norm before clipping, until the next clip_grad_norm of the engine.
  /// @throws UsageError after that, and if this is no norm
  /// @note Waits for compute.
  double value() const { return read().norm; }
  /// Optimizer steps skipped so far because of a norm that was not finite, with any optimizer and norm of the engine.
  /// @throws UsageError as value() does
  /// @note Waits for compute.
  std::int64_t skipped() const { return read().skipped; }

  E const* engine() const { return engine_; }  ///< nullptr: this is no norm
  /// Numbers the engine's measurements, from 1.
  std::uint64_t measurement() const { return measurement_; }

 private:
  ClipScalars read() const {
    FSDP_EXPECTS(engine_ != nullptr, "GradNorm::value: expected a norm from clip_grad_norm, got an empty one");
    FSDP_EXPECTS(engine_->shards().checks().is_last_measurement(measurement_),
                 "rank {}: this norm is no longer valid, because clip_grad_norm has measured another; read a norm "
                 "before the next clip_grad_norm",
                 engine_->rank());
    auto const entry = engine_->shards().enter("GradNorm::value");
    ClipScalars scalars{};
    engine_->device().copy_async(engine_->compute(), &scalars, engine_->shards().norm().result, sizeof scalars);
    engine_->device().synchronize(engine_->compute());
    return scalars;
  }
  E* engine_ = nullptr;
  std::uint64_t measurement_ = 0;
};

/// Reaction to a gradient norm that is infinite or NaN.
enum class NonFinite : unsigned char {
  skip,   ///< the optimizer step changes nothing; counted in GradNorm::skipped()
  raise,  ///< clip_grad_norm waits for the norm and throws
};

/// Settings of one call of clip_grad_norm.
struct ClipOptions {
  NormKind norm = NormKind::l2;            ///< l2, l1 (sum of absolute values) or inf (the largest absolute value)
  NonFinite non_finite = NonFinite::skip;  ///< reaction to a norm that is infinite or NaN
};

/// Computes the global norm of the gradients. The optimizer's step then scales them so that the norm is at most
/// `max_norm`: `adamw.step(lr, norm)`. While a GradScaler lives, the norm is that of the gradients without the loss
/// scale.
///
/// [Note: A norm that does not depend on the layout] Each unit is cut into the same slices whatever the strategy (see
/// Division), and one rank has each. It sums every 16,384 elements of a slice in double, in a fixed order. These shares
/// are added without rounding ([Note: Exact sums of shares]), so it does not matter which rank has which. Padding is
/// zero, shared parameters are stored once, and replicas do not count twice. The norm and the factor stay in device
/// memory: the optimizer kernel reads the factor.
///
/// Called again before the step, it goes on from what the first call has decided, whose norm it replaces: a call with
/// infinity then measures what the step will take. What was measured before another backward pass is void. A step that
/// is not given the norm that was to be limited is refused, as one with a norm that is void, replaced or used.
///
/// @param max_norm  positive; infinity measures without clipping
/// @throws UsageError if max_norm is not positive, or gradients are missing or left half-way; Error if the norm is not
/// finite and must not be
/// @note Stream: compute waits until all gradient shards are complete. The calling thread waits only under
/// NonFinite::raise.
/// @note Collective: one all-reduce of kernels::norm_digit_count doubles, or of W for the largest element.
template <class E>
[[nodiscard]] GradNorm<E> clip_grad_norm(E& engine, float max_norm, ClipOptions options = {}) {
  FSDP_EXPECTS(max_norm > 0.0f, "rank {}: clip_grad_norm: expected a positive max_norm, got {}", engine.rank(),
               max_norm);
  auto const shards = engine.shards();
  auto const entry = shards.enter("clip_grad_norm");
  shards.checks().expect_reduced("clip_grad_norm is called");
  shards.passes().complete_gradients();
  auto& norm = shards.norm();
  auto& compute = engine.compute();
  auto const& device = engine.device();
  auto const world = engine.world_size();
  auto const reading = shards.read_gradients();
  if (world > 1)
    shards.with_cause(
        [&] { shards.scalar_communicator().wait_for_peers(compute, norm.ticket, WaitSite::norm_peers_read); });
  auto span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "norm", "optimizer");
  auto const parts = options.norm == NormKind::inf ? world : kernels::norm_digit_count;
  std::int64_t partials = 0;
  for (std::size_t u = 0; u < shards.size(); ++u) {
    auto& unit = shards[u];
    if (!shards.has_gradient(unit)) continue;
    auto const slice = unit.slice();
    kernels::norm_partials(device, compute, static_cast<float const*>(unit.gradient + slice.begin), slice.size(),
                           options.norm, norm.partials + partials);
    partials += kernels::norm_partial_count(slice.size());
  }
  if (options.norm == NormKind::inf) {
    device.zero_async(compute, norm.parts, static_cast<std::size_t>(parts) * sizeof(double));
    kernels::norm_combine(device, compute, static_cast<double const*>(norm.partials), partials, options.norm,
                          norm.parts + engine.rank());
  } else {
    kernels::norm_digits(device, compute, static_cast<double const*>(norm.partials), partials, norm.parts);
  }
  span.end();
  if (world > 1) {
    span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "all-reduce", "optimizer",
                                parts * static_cast<std::int64_t>(sizeof(double)));
    std::array<char, 128> said{};
    auto const history = shards.history().text();
    auto const compared = formatted_to(said, "{} norm with max_norm {}{}{}", name(options.norm), max_norm,
                                       history.empty() ? "" : ", ", history);
    norm.ticket = shards.with_cause([&] {
      return shards.scalar_communicator().all_reduce(compute, static_cast<double const*>(norm.parts), norm.parts,
                                                     static_cast<std::size_t>(parts),
                                                     Label{"gradient norm", "optimizer", compared});
    });
    span.end();
  }
  span = shards.trace().begin(compute, StreamKind::compute, "gradient norm", "clip factor", "optimizer");
  kernels::clip_factor(device, compute, static_cast<double const*>(norm.parts), parts, options.norm, max_norm,
                       norm.loss_scale, norm.result, shards.checks().measured());
  span.end();
  GradNorm<E> const result(engine, shards.checks().set_measured(max_norm < std::numeric_limits<float>::infinity()));
  if (options.non_finite == NonFinite::raise) {
    auto const value = result.value();
    if (!math::is_finite(value))
      fail<Error>("rank {}: clip_grad_norm: the global gradient norm is {}, expected a finite number", engine.rank(),
                  value);
  }
  return result;
}
// clang-format off
void clip_grad_norm(detail::LastResort, ...) = delete;  // fsdp: expected (engine, max_norm[, ClipOptions]); check the names in braces
// clang-format on

/// Defaults are PyTorch's.
struct GradScalerOptions {
  float init_scale = 65536.0f;          ///< loss scale at the beginning; finite, above 0
  float growth_factor = 2.0f;           ///< multiplies the scale after growth_interval good steps; finite, above 1
  float backoff_factor = 0.5f;          ///< multiplies the scale after a step that was skipped; above 0, below 1
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
    auto const entry = engine_->shards().enter("GradScaler::skipped");
    ClipScalars now{};
    engine_->device().copy_async(engine_->compute(), &now, engine_->shards().norm().result, sizeof now);
    engine_->device().synchronize(engine_->compute());
    return now.skipped;
  }
  /// Scale and steps taken since it last changed, for checkpoints. @note Waits for compute.
  LossScale state() const {
    auto const entry = engine_->shards().enter("GradScaler::state");
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
    auto const entry = engine_->shards().enter("GradScaler::load_state");
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
    struct SetWhile {
      bool& on;
      explicit SetWhile(bool& flag) : on(flag) { on = true; }
      SetWhile(SetWhile const&) = delete;
      ~SetWhile() { on = false; }
    };
    {
      SetWhile const scaled(norm.scaler_steps);
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
