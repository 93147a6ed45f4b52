// SPDX-License-Identifier: Apache-2.0
// AdamW and stochastic gradient descent on flat shards, and a step by several optimizers, each of which owns some
// tensors.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/detail/optim/optimizer_state.hpp"
#include "fsdp/error.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/shards.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

/// Options of AdamW, equal on all ranks.
struct AdamWOptions {
  float lr = 1e-3f;                  ///< learning rate of step() without an argument
  float beta1 = 0.9f;                ///< decay of the first moment, in [0, 1)
  float beta2 = 0.999f;              ///< decay of the second moment, in [0, 1)
  float eps = 1e-8f;                 ///< added to the root of the second moment; finite, not negative
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
  [[gnu::cold]] AdamW(E& engine, TensorSelection tensors, AdamWOptions const& options = {}, ParamGroups groups = {});

  // clang-format off
  template <class None = void>
  AdamW(E&, ...) = delete;  // fsdp: expected (engine[, tensors][, AdamWOptions[, groups]]); check the names in braces
  // clang-format on

  void step() { step(options_.lr); }  ///< takes a step with AdamWOptions::lr, without clipping
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }  ///< takes a clipped step with AdamWOptions::lr

  /// Takes a step over all units with learning rate `lr`.
  /// @param norm  of clip_grad_norm: gradients are multiplied by the factor that it decided. A step that clipping skips
  /// changes nothing, nor the bias correction of later ones
  /// @throws UsageError if a unit has no reduced gradients, a backward pass is left half-way, the norm is not that of
  /// these gradients or is left out (see clip_grad_norm), or a GradScaler lives (call its step); a step that is refused
  /// changes nothing
  /// @note Stream: on compute; each unit's update waits for its own reduction only, and the next gather of a unit for
  /// its own update only.
  /// @note Collective: no.
  void step(float lr, GradNorm<E> const& norm = {});

  /// Begins a step of fsdp::Optimizers: see OptimizerPart. @param clip  nullptr: nothing is clipped
  void begin_step(float lr, ClipScalars const* clip) { state_.begin_step(lr, clip); }
  void update(typename E::Unit& unit);  ///< enqueues the update of the unit's tensors that it owns: see OptimizerPart
  bool owns(TensorInfo const& tensor) const { return state_.owns(tensor); }  ///< whether it updates the tensor
  /// The tensors of `among` that this optimizer does not own.
  TensorSelection rest(TensorSelection among = TensorSelection::all()) const { return state_.rest(std::move(among)); }

  E& engine() const { return state_.engine(); }  ///< engine whose parameters it updates
  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const { return state_.steps(); }
  AdamWOptions const& options() const { return options_; }  ///< as given to the constructor

  /// Name of its state in checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return "AdamW"; }
  static std::vector<std::string_view> state_names() { return {"exp_avg", "exp_avg_sq"}; }  ///< names of its moments
  /// Moment 0 or 1 of a unit that it owns whole, laid out as the shard; else nullptr. @note Waits for offloaded state.
  Moment* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  /// Moment 0 or 1 for a part of the unit's shard. @pre it owns the part's tensor. @note Waits for offloaded state.
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

template <class E, class Moment>
AdamW<E, Moment>::AdamW(E& engine, TensorSelection tensors, AdamWOptions const& options, ParamGroups groups)
    : options_(checked(options)),
      state_(
          engine, name(), text(options), 2,
          detail::OwnedTensors(name(), detail::OwnedTensors::Decays::betas,
                               {.weight_decay = options.weight_decay, .first = options.beta1, .second = options.beta2},
                               std::move(tensors), std::move(groups)),
          options.stochastic_rounding) {}

template <class E, class Moment>
void AdamW<E, Moment>::step(float lr, GradNorm<E> const& norm) {
  state_.step(lr, norm, [this](auto& unit) { update(unit); });
}

template <class E, class Moment>
void AdamW<E, Moment>::update(typename E::Unit& unit) {
  state_.for_each_part(unit, [&](auto const& part) {
    if constexpr (State::narrow) {
      if (options_.stochastic_rounding) return this->launch<true>(unit, part);
    }
    this->launch<false>(unit, part);
  });
}

template <class E>
AdamW(E&) -> AdamW<E>;

/// Options of Sgd, equal on all ranks.
struct SgdOptions {
  float lr = 1e-2f;                  ///< learning rate of step() without an argument
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

  void step() { step(options_.lr); }  ///< takes a step with SgdOptions::lr, without clipping
  void step(GradNorm<E> const& norm) { step(options_.lr, norm); }  ///< takes a clipped step with SgdOptions::lr

  /// Takes a step over all units; see AdamW::step for clipping, streams and errors.
  void step(float lr, GradNorm<E> const& norm = {});

  /// Begins a step of fsdp::Optimizers: see OptimizerPart. @param clip  nullptr: nothing is clipped
  void begin_step(float lr, ClipScalars const* clip) { state_.begin_step(lr, clip); }
  void update(typename E::Unit& unit);  ///< enqueues the update of the unit's tensors that it owns: see OptimizerPart
  bool owns(TensorInfo const& tensor) const { return state_.owns(tensor); }  ///< whether it updates the tensor
  /// The tensors of `among` that this optimizer does not own.
  TensorSelection rest(TensorSelection among = TensorSelection::all()) const { return state_.rest(std::move(among)); }

  E& engine() const { return state_.engine(); }  ///< engine whose parameters it updates
  /// Steps taken; skipped ones do not count. @note Waits for compute.
  std::int64_t steps() const { return state_.steps(); }
  SgdOptions const& options() const { return options_; }  ///< as given to the constructor

  /// Name of its state in checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return "Sgd"; }
  /// Name of the momentum; empty if no tensor has momentum.
  std::vector<std::string_view> state_names() const {
    if (has_momentum_) return {"momentum_buffer"};
    return {};
  }
  /// Momentum of a unit that it owns whole, laid out as the shard; else nullptr. @note Waits for offloaded state.
  float* state(std::size_t which, std::size_t unit) const { return state_.moment(which, unit); }
  /// Momentum for a part of the unit's shard. @pre it owns the part's tensor. @note Waits for offloaded state.
  float* state(std::size_t which, std::size_t unit, Segment const& part) const {
    return state_.moment(which, unit, part);
  }
  /// Continues as after `steps` steps. @note Waits for compute.
  void set_steps(std::int64_t steps) { state_.set_steps(steps); }

 private:
  using State = OptimizerState<E, float>;

  Sgd(E& engine, SgdOptions const& options, detail::OwnedTensors owned);

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
Sgd<E>::Sgd(E& engine, SgdOptions const& options, detail::OwnedTensors owned)
    : options_(checked(options)),
      has_momentum_(owned.has_momentum()),
      state_(engine, name(), text(options), has_momentum_ ? 1 : 0, std::move(owned), options.stochastic_rounding) {}

template <class E>
void Sgd<E>::step(float lr, GradNorm<E> const& norm) {
  state_.step(lr, norm, [this](auto& unit) { update(unit); });
}

template <class E>
void Sgd<E>::update(typename E::Unit& unit) {
  state_.for_each_part(unit, [&](auto const& part) {
    if constexpr (State::narrow) {
      if (options_.stochastic_rounding) return this->launch<true>(unit, part);
    }
    this->launch<false>(unit, part);
  });
}

template <class E>
Sgd(E&) -> Sgd<E>;

/// An optimizer that can be one of several: AdamW, Sgd and Muon are, and yours may be.
///
/// - `owns(tensor)` says whether it updates the tensor; the answer stays the same.
/// - `begin_step(lr, clip)` enqueues what precedes the units. `clip->factor` is in device memory: the kernels multiply
///   gradients by it, and change nothing if it is negative. `clip` is null if nothing is clipped.
/// - `update(unit)` enqueues the update of its tensors of this unit. Their gradients are complete on compute. It is
///   called once for every unit that trains, in declared order, whether or not it owns some tensor of the unit.
///
/// Everything is enqueued on the engine's compute stream, or ordered with it.
template <class O, class E>
concept OptimizerPart = requires(O& optimizer, O const& constant, TensorInfo const& tensor, float lr,
                                 ClipScalars const* clip, typename E::Unit& unit) {
  { constant.owns(tensor) } -> std::convertible_to<bool>;
  { constant.name() } -> std::convertible_to<std::string_view>;
  optimizer.begin_step(lr, clip);
  optimizer.update(unit);
};

namespace detail {
template <class O>
concept HasLearningRate = requires(O& optimizer) {
  optimizer.options().lr;
};
template <class O>
struct EngineOf {
  static_assert(
      requires(O & optimizer) { optimizer.engine(); },
      "fsdp: Optimizers takes optimizers alone, and the first of them has a member engine(), which returns the "
      "engine");
  using type = std::remove_cvref_t<decltype(std::declval<O&>().engine())>;
};
}  // namespace detail

/// Several optimizers of one engine, which together own every tensor that trains, each tensor once:
///
/// ```
/// fsdp::Muon muon{engine, fsdp::matching("h.*.weight"), {.lr = 0.02f}};
/// fsdp::AdamW adamw{engine, muon.rest(), {.lr = 3e-4f}};
/// fsdp::Optimizers both{muon, adamw};
/// both.step({0.02f, lr}, fsdp::clip_grad_norm(engine, 1.0f));
/// fsdp::save(engine, both, "out");
/// ```
///
/// One after the other they could not step: the first step uses the gradients up. The optimizers must outlive it and
/// must not be moved.
/// @tparam First  has a member engine(), which returns the engine
template <class First, class... More>
class Optimizers {
  using E = typename detail::EngineOf<First>::type;
  static_assert(OptimizerPart<First, E> && (OptimizerPart<More, E> && ...),
                "fsdp: an optimizer of Optimizers has members owns, name, begin_step and update: see OptimizerPart");

 public:
  static constexpr std::size_t count = 1 + sizeof...(More);  ///< number of optimizers
  using LearningRates = std::array<float, count>;            ///< of each optimizer, in the order of the constructor

  /// @throws UsageError if a tensor that trains has no owner, or two; or the optimizers belong to different engines.
  /// ConfigError on every rank if ranks give tensors to different optimizers
  /// @note Collective: yes.
  [[gnu::cold]] explicit Optimizers(First& first, More&... more) : engine_(&first.engine()), parts_(&first, &more...) {
    auto& engine = *engine_;
    for_each_part([&](auto const& part) {
      if constexpr (requires { part.engine(); })
        FSDP_EXPECTS(static_cast<void const*>(&part.engine()) == &engine,
                     "rank {}: Optimizers: '{}' belongs to another engine than the first optimizer", engine.rank(),
                     std::string_view(part.name()));
    });
    auto const shards = engine.shards();
    for (std::size_t u = 0; u < shards.size(); ++u)
      for (auto const& tensor : shards[u].layout().tensors())
        if (!shards[u].frozen) expect_one_owner(tensor);
    std::string text;
    for_each_part([&](auto const& part) {
      text += formatted("optimizer '{}' of:\n", std::string_view(part.name()));
      for (std::size_t u = 0; u < shards.size(); ++u)
        for (auto const& tensor : shards[u].layout().tensors())
          if (!shards[u].frozen && part.owns(tensor)) text += formatted("  tensor '{}'\n", tensor.name);
    });
    detail::expect_equal_texts(engine.world(), text, "owners of tensors");
  }

  /// Takes a step over all units.
  /// @param rates  a learning rate for each optimizer
  /// @param norm  of clip_grad_norm, over the gradients of all tensors
  /// @throws UsageError as AdamW::step; a step that is refused changes nothing
  /// @note Stream, Collective: those of the optimizers' updates.
  void step(LearningRates const& rates, GradNorm<E> const& norm = {}) {
    for (auto const rate : rates) expect_rate(rate);
    auto const shards = engine_->shards();
    auto const entry = shards.enter("Optimizers::step");
    shards.begin_step("Optimizers", rates[0], norm);
    for (std::size_t other = 1; other < count; ++other)
      shards.history().add("step with another learning rate", rates[other]);
    ClipScalars const* const clip = norm.engine() != nullptr ? shards.norm().result : nullptr;
    std::size_t i = 0;
    for_each_part([&](auto& part) { part.begin_step(rates[i++], clip); });
    detail::update_units(shards, [this](auto& unit) { this->for_each_part([&](auto& part) { part.update(unit); }); });
  }
  /// Takes a step with the learning rates of the optimizers' options: each has a member options().lr.
  void step(GradNorm<E> const& norm = {}) {
    static_assert(
        detail::HasLearningRate<First> && (detail::HasLearningRate<More> && ...),
        "fsdp: step() without learning rates needs optimizers that have options().lr; call step({rate, ...})");
    LearningRates rates{};
    std::size_t i = 0;
    for_each_part([&](auto const& part) { rates[i++] = part.options().lr; });
    step(rates, norm);
  }

  E& engine() const { return *engine_; }  ///< engine of all of them
  /// Calls `act(optimizer)` for each in turn. A checkpoint lists them.
  template <class Act>
  void for_each_part(Act&& act) const {
    std::apply([&](auto*... part) { (act(*part), ...); }, parts_);
  }

 private:
  [[gnu::cold]] void expect_one_owner(TensorInfo const& tensor) const {
    std::string_view owner;
    for_each_part([&](auto const& part) {
      if (!part.owns(tensor)) return;
      FSDP_EXPECTS(owner.empty(), "rank {}: Optimizers: tensor '{}' belongs to '{}' and to '{}'; expected one of them",
                   engine_->rank(), tensor.name, owner, std::string_view(part.name()));
      owner = part.name();
    });
    FSDP_EXPECTS(!owner.empty(), "rank {}: Optimizers: no optimizer owns tensor '{}'; give one of them rest()",
                 engine_->rank(), tensor.name);
  }
  static void expect_rate(float rate) {
    FSDP_EXPECTS(math::is_finite(rate) && rate >= 0.0f,
                 "Optimizers: learning rates must be finite and not negative, got {}", rate);
  }

  E* engine_;
  std::tuple<First*, More*...> parts_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE
