// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent on flat shards.
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

struct SgdOptions {
  float lr = 1e-2f;
  float momentum = 0.0f;             ///< 0: no momentum, and no memory for it
  bool nesterov = false;             ///< Nesterov momentum
  float weight_decay = 0.0f;         ///< L2 penalty of tensors whose TensorOptions::decay is set
  bool stochastic_rounding = false;  ///< rounds masters narrower than fp32: [Note: Stochastic rounding]
  std::uint64_t seed = 0;            ///< seeds stochastic rounding; equal on all ranks
};

/// p -= lr * (g + weight_decay * p), with heavy-ball or Nesterov momentum in fp32 if asked for, as torch.optim.SGD with
/// dampening 0. The engine must outlive it. Moving it moves no memory.
template <class E>
class Sgd {
 public:
  /// Seals the engine; with momentum takes S of memory.
  /// @throws UsageError on options out of range, or stochastic rounding of fp32 masters; ConfigError on every rank if
  /// ranks' options differ
  /// @note Collective: yes.
  explicit Sgd(E& engine, SgdOptions const& options = {}, ParamGroups groups = {})
      : Sgd(engine, TensorSelection::all(), options, std::move(groups)) {}
  /// @param tensors  its tensors; see AdamW
  /// @param groups  settings of some of them
  /// @throws UsageError as above, and if a pattern matches no tensor that trains
  [[gnu::cold]] Sgd(E& engine, TensorSelection tensors, SgdOptions const& options = {}, ParamGroups groups = {})
      : Sgd(engine, options,
            detail::OwnedTensors(name(), detail::OwnedTensors::Decays::momentum,
                                 {.weight_decay = options.weight_decay, .first = options.momentum}, std::move(tensors),
                                 std::move(groups))) {}

  template <class None = void>
  Sgd(E&, ...) = delete;  // fsdp: expected (engine[, tensors][, SgdOptions[, groups]]); check the names in braces

  void step() { step(options_.lr); }
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }

  /// Takes a step over all units; see AdamW::step for clipping, streams and errors.
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
  SgdOptions const& options() const { return options_; }

  // State for checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return "Sgd"; }
  std::vector<std::string_view> state_names() const {
    if (has_momentum_) return {"momentum_buffer"};
    return {};
  }
  float* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  float* state(std::size_t which, std::size_t unit, Segment const& part) const {
    return state_.moment(which, unit, part);
  }
  /// Continues as after `steps` steps. @note Waits for compute.
  void set_steps(std::int64_t steps) { state_.set_steps(steps); }

 private:
  using State = OptimizerState<E, float>;

  Sgd(E& engine, SgdOptions const& options, detail::OwnedTensors owned)
      : options_(checked(options)),
        has_momentum_(owned.has_momentum()),
        state_(engine, name(), text(options), has_momentum_ ? 1 : 0, std::move(owned), options.stochastic_rounding) {}

  static SgdOptions const& checked(SgdOptions const& options) {
    FSDP_EXPECTS(options.momentum >= 0.0f && options.momentum < 1.0f && math::is_finite(options.weight_decay) &&
                     options.weight_decay >= 0.0f,
                 "Sgd: momentum {} must be in [0, 1) and weight decay {} finite and not negative", options.momentum,
                 options.weight_decay);
    FSDP_EXPECTS(!options.nesterov || options.momentum > 0.0f,
                 "Sgd: nesterov needs SgdOptions::momentum above 0; groups may set another");
    State::expect_learning_rate("Sgd", options.lr);
    return options;
  }
  static std::string text(SgdOptions const& options) {
    return formatted("lr {}, momentum {}, nesterov {}, weight decay {}, stochastic rounding {}, seed {}", options.lr,
                     options.momentum, options.nesterov, options.weight_decay, options.stochastic_rounding,
                     options.seed);
  }

  template <bool Stochastic>
  void launch(typename E::Unit& unit, typename State::Part const& part) {
    unit.with_master([&](auto* master) {
      auto& engine = state_.engine();
      kernels::sgd<Stochastic>(engine.device(), engine.compute(), part.chunks, part.chunk_count, part.step,
                               SgdScalars{part.first, options_.nesterov}, master,
                               static_cast<float const*>(unit.gradient), state_.moment(0, part), options_.seed);
    });
  }

  SgdOptions options_;
  bool has_momentum_;
  State state_;
};
template <class E>
Sgd(E&) -> Sgd<E>;

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
