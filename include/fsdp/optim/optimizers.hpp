// SPDX-License-Identifier: Apache-2.0
// A step by several optimizers, each of which owns some tensors.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fsdp/engine/shards.hpp"
#include "fsdp/engine/texts.hpp"
#include "fsdp/error.hpp"
#include "fsdp/kernels/math.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/optim/grad_norm.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE {

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
  static constexpr std::size_t count = 1 + sizeof...(More);
  using LearningRates = std::array<float, count>;  ///< of each optimizer, in the order of the constructor

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
    auto const turn = shards.enter("Optimizers::step");
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

  E& engine() const { return *engine_; }
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
