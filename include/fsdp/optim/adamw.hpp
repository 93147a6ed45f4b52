// SPDX-License-Identifier: Apache-2.0
// AdamW on flat shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/kernels/math.hpp"
#include "fsdp/optim/optimizer_state.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

struct AdamWOptions {
  float lr = 1e-3f;  ///< learning rate of step() without an argument
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0.01f;        ///< applies to tensors whose TensorOptions::decay is set
  bool stochastic_rounding = false;  ///< rounds masters and moments narrower than fp32: [Note: Stochastic rounding]
  std::uint64_t seed = 0;            ///< seeds stochastic rounding; equal on all ranks
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
/// algorithm 2). Keeps two moments per element of the shards. The engine must outlive it. Moving it moves no memory.
///
/// `fsdp::AdamW adamw(engine)` keeps fp32 moments; `fsdp::AdamW<decltype(engine), fsdp::bf16>` halves their memory: use
/// it with stochastic_rounding, for the second moment moves by less than bf16 resolves (1 - beta2 against 2^-9).
/// @tparam Moment  float or bf16
template <class E, class Moment = float>
class AdamW {
 public:
  /// Seals the engine, and takes 2 S elements of memory for the moments.
  /// @throws UsageError on options out of range, or stochastic rounding of fp32 alone; ConfigError on every rank if
  /// ranks' options differ
  /// @note Collective: yes.
  explicit AdamW(E& engine, AdamWOptions const& options = {}, ParamGroups groups = {})
      : AdamW(engine, TensorSelection::all(), options, std::move(groups)) {}
  /// @param tensors  its tensors: fsdp::matching("head.*"), muon.rest(). Optimizers that own all tensors together step
  /// as fsdp::Optimizers
  /// @param groups  settings of some of them
  /// @throws UsageError as above, and if a pattern matches no tensor that trains
  [[gnu::cold]] AdamW(E& engine, TensorSelection tensors, AdamWOptions const& options = {}, ParamGroups groups = {})
      : options_(checked(options)),
        state_(engine, name(), text(options), 2,
               detail::OwnedTensors(
                   name(), detail::OwnedTensors::Decays::betas,
                   {.weight_decay = options.weight_decay, .first = options.beta1, .second = options.beta2},
                   std::move(tensors), std::move(groups)),
               options.stochastic_rounding) {}

  // clang-format off
  template <class None = void>
  AdamW(E&, ...) = delete;  // fsdp: expected (engine[, tensors][, AdamWOptions[, groups]]); check the names in braces
  // clang-format on

  void step() { step(options_.lr); }
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }

  /// Takes a step over all units with learning rate `lr`.
  /// @param norm  of clip_grad_norm: gradients are multiplied by the factor that it decided. A step that clipping skips
  /// changes nothing, nor the bias correction of later ones
  /// @throws UsageError if a unit has no reduced gradients, a backward pass is left half-way, the norm is not that of
  /// these gradients or is left out (see clip_grad_norm), or a GradScaler lives (call its step); a step that is refused
  /// changes nothing
  /// @note Stream: on compute; each unit's update waits for its own reduction only, and the next gather of a unit for
  /// its own update only.
  /// @note Collective: no.
  void step(float lr, GradNorm<E> const& norm = {}) {
    state_.step(lr, norm, [this](auto& unit) { update(unit); });
  }

  // Parts of a step, for fsdp::Optimizers: see OptimizerPart.
  void begin_step(float lr, ClipScalars const* clip) { state_.begin_step(lr, clip); }
  void update(typename E::Unit& unit) {
    state_.for_each_part(unit, [&](auto const& part) {
      if constexpr (State::narrow) {
        if (options_.stochastic_rounding) return this->launch<true>(unit, part);
      }
      this->launch<false>(unit, part);
    });
  }
  bool owns(TensorInfo const& tensor) const { return state_.owns(tensor); }
  /// The tensors of `among` that this optimizer does not own.
  TensorSelection rest(TensorSelection among = TensorSelection::all()) const { return state_.rest(std::move(among)); }

  E& engine() const { return state_.engine(); }
  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const { return state_.steps(); }
  AdamWOptions const& options() const { return options_; }

  // State for checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return "AdamW"; }
  static std::vector<std::string_view> state_names() { return {"exp_avg", "exp_avg_sq"}; }
  Moment* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  Moment* state(std::size_t which, std::size_t unit, Segment const& part) const {
    return state_.moment(which, unit, part);
  }
  /// Continues as after `steps` steps. @note Waits for compute.
  void set_steps(std::int64_t steps) { state_.set_steps(steps); }

 private:
  using State = OptimizerState<E, Moment>;

  static AdamWOptions const& checked(AdamWOptions const& options) {
    FSDP_EXPECTS(options.beta1 >= 0.0f && options.beta1 < 1.0f && options.beta2 >= 0.0f && options.beta2 < 1.0f,
                 "AdamW: betas must be in [0, 1), got {} and {}", options.beta1, options.beta2);
    FSDP_EXPECTS(math::is_finite(options.eps) && options.eps >= 0.0f && math::is_finite(options.weight_decay) &&
                     options.weight_decay >= 0.0f,
                 "AdamW: eps {} and weight decay {} must be finite and not negative", options.eps,
                 options.weight_decay);
    State::expect_learning_rate("AdamW", options.lr);
    return options;
  }
  [[gnu::cold]] static std::string text(AdamWOptions const& options) {
    return formatted("lr {}, beta1 {}, beta2 {}, eps {}, weight decay {}, stochastic rounding {}, seed {}", options.lr,
                     options.beta1, options.beta2, options.eps, options.weight_decay, options.stochastic_rounding,
                     options.seed);
  }

  template <bool Stochastic>
  void launch(typename E::Unit& unit, typename State::Part const& part) {
    unit.with_master([&](auto* master) {
      auto& engine = state_.engine();
      kernels::adamw<Stochastic>(engine.device(), engine.compute(), part.chunks, part.chunk_count, part.step,
                                 AdamWScalars{part.first, part.second, options_.eps}, master,
                                 static_cast<float const*>(unit.gradient), state_.moment(0, part),
                                 state_.moment(1, part), options_.seed);
    });
  }

  AdamWOptions options_;
  State state_;
};
template <class E>
AdamW(E&) -> AdamW<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
