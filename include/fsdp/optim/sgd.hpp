// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent on flat shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/kernels/math.hpp"
#include "fsdp/optim/optimizer_state.hpp"

namespace fsdp {

struct SgdOptions {
  float lr = 1e-2f;
  float momentum = 0.0f;             ///< 0: no momentum, and no memory for it
  float weight_decay = 0.0f;         ///< L2 penalty of tensors whose TensorOptions::decay is set
  bool stochastic_rounding = false;  ///< of masters narrower than fp32: [Note: Stochastic rounding]
  std::uint64_t seed = 0;            ///< of stochastic rounding; the same on every rank
};

/// p -= lr * (g + weight_decay * p), with heavy-ball momentum in fp32 if asked for. The engine must outlive it.
template <class E>
class Sgd {
 public:
  /// Seals the engine; with momentum takes S of memory.
  /// @throws UsageError on options out of range, or stochastic rounding of fp32 masters; ConfigError on every rank if
  /// ranks' options differ
  /// @note Collective: yes.
  explicit Sgd(E& engine, SgdOptions options = {})
      : engine_(&engine),
        options_(checked(options)),
        state_(engine, "Sgd", text(options), options.momentum > 0.0f ? 1 : 0, options.weight_decay,
               options.stochastic_rounding) {}

  template <class None = void>
  Sgd(E&, ...) = delete;  // fsdp: expected (engine[, SgdOptions]); check the names in braces

  void step() { step(options_.lr); }
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }

  /// One step over all units; see AdamW::step for clipping, streams and errors.
  void step(float lr, GradNorm<E> const& norm = {}) {
    state_.step(lr, norm, 0.0f, 0.0f, [this](auto& unit, auto const& part) {
      if constexpr (State::narrow) {
        if (options_.stochastic_rounding) return this->launch<true>(unit, part);
      }
      this->launch<false>(unit, part);
    });
  }

  E const& engine() const { return *engine_; }
  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const { return state_.steps(); }

  // What a checkpoint keeps: fsdp::checkpoint::Checkpointable says what each is.
  static constexpr std::string_view name() { return "Sgd"; }
  std::vector<std::string_view> state_names() const {
    if (options_.momentum > 0.0f) return {"momentum_buffer"};
    return {};
  }
  float* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  /// Continues as after `steps` steps. @note Waits for compute.
  void set_steps(std::int64_t steps) { state_.set_steps(steps); }

 private:
  using State = OptimizerState<E, float>;

  static SgdOptions const& checked(SgdOptions const& options) {
    FSDP_EXPECTS(options.momentum >= 0.0f && options.momentum < 1.0f && math::is_finite(options.weight_decay) &&
                     options.weight_decay >= 0.0f,
                 "Sgd: momentum {} must be in [0, 1) and weight decay {} finite and not negative", options.momentum,
                 options.weight_decay);
    State::expect_learning_rate("Sgd", options.lr);
    return options;
  }
  static std::string text(SgdOptions const& options) {
    return formatted("lr {}, momentum {}, weight decay {}, stochastic rounding {}, seed {}", options.lr,
                     options.momentum, options.weight_decay, options.stochastic_rounding, options.seed);
  }

  template <bool Stochastic>
  void launch(typename E::Unit& unit, typename State::Part const& part) {
    unit.with_master([&](auto* master) {
      kernels::sgd<Stochastic>(engine_->device(), engine_->compute(), part.chunks, part.chunk_count, part.step,
                               options_.momentum, master, static_cast<float const*>(unit.gradient),
                               state_.moment(0, part), options_.seed);
    });
  }

  E* engine_;
  SgdOptions options_;
  State state_;
};
template <class E>
Sgd(E&) -> Sgd<E>;

}  // namespace fsdp
