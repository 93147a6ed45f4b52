// SPDX-License-Identifier: Apache-2.0
// Optimizers of torch on the shards of an engine.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/detail/engine/agreement.hpp"
#include "fsdp/detail/libtorch/device.hpp"
#include "fsdp/detail/optim/tensor_selection.hpp"
#include "fsdp/error.hpp"
#include "fsdp/gradients.hpp"
#include "fsdp/layout.hpp"
#include "fsdp/memory.hpp"
#include "fsdp/shards.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch {

namespace detail {
template <class>
inline constexpr bool never = false;
}  // namespace detail

/// Properties of an optimizer of torch for ShardOptimizer, by its options. An optimizer works on shards if it is
/// element-wise: the update of an element reads nothing but the element, its gradient and its state. To use one of your
/// own, specialise this.
///
/// `Optimizer` and `State` are torch's types. `name()` is the name in checkpoints; `arrays(options)` are the names of
/// the arrays, and `array(state, which)` is the tensor of one of them; `set_step(state, n)` stores the count of steps,
/// if there is one. `text(options)` is what ranks compare. `lazy` says that the first step stores a gradient as state,
/// so that no state may be there before.
template <class Options>
struct OptimizerArrays {
  static_assert(detail::never<Options>,
                "fsdp: this optimizer of torch does not work on shards: it is not element-wise, as LBFGS, which takes "
                "inner products over all parameters; or specialise fsdp::libtorch::OptimizerArrays for it");
  using Optimizer = torch::optim::Optimizer;
};

namespace detail {

/// Adam and AdamW.
template <class O, class S>
struct AdamArrays {
  using Optimizer = O;
  using State = S;
  static constexpr bool lazy = false;
  template <class Options>
  static std::vector<std::string_view> arrays(Options const& options) {
    if (options.amsgrad()) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }
  static at::Tensor& array(State& state, std::size_t which) {
    return which == 0 ? state.exp_avg() : which == 1 ? state.exp_avg_sq() : state.max_exp_avg_sq();
  }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  template <class Options>
  static std::string text(Options const& options) {
    return formatted("beta1 {}, beta2 {}, eps {}, weight decay {}, amsgrad {}", std::get<0>(options.betas()),
                     std::get<1>(options.betas()), options.eps(), options.weight_decay(), options.amsgrad());
  }
};

}  // namespace detail

template <>
struct OptimizerArrays<torch::optim::AdamWOptions>
    : detail::AdamArrays<torch::optim::AdamW, torch::optim::AdamWParamState> {
  static constexpr std::string_view name() { return "torch::optim::AdamW"; }
};
template <>
struct OptimizerArrays<torch::optim::AdamOptions>
    : detail::AdamArrays<torch::optim::Adam, torch::optim::AdamParamState> {
  static constexpr std::string_view name() { return "torch::optim::Adam"; }
};
template <>
struct OptimizerArrays<torch::optim::SGDOptions> {
  using Optimizer = torch::optim::SGD;
  using State = torch::optim::SGDParamState;
  static constexpr bool lazy = true;
  static constexpr std::string_view name() { return "torch::optim::SGD"; }
  static std::vector<std::string_view> arrays(torch::optim::SGDOptions const& options) {
    if (options.momentum() != 0) return {"momentum_buffer"};
    return {};
  }
  static at::Tensor& array(State& state, std::size_t) { return state.momentum_buffer(); }
  static void set_step(State&, std::int64_t) {}
  static std::string text(torch::optim::SGDOptions const& options) {
    return formatted("momentum {}, dampening {}, weight decay {}, nesterov {}", options.momentum(), options.dampening(),
                     options.weight_decay(), options.nesterov());
  }
};
template <>
struct OptimizerArrays<torch::optim::RMSpropOptions> {
  using Optimizer = torch::optim::RMSprop;
  using State = torch::optim::RMSpropParamState;
  static constexpr bool lazy = false;
  static constexpr std::string_view name() { return "torch::optim::RMSprop"; }
  static std::vector<std::string_view> arrays(torch::optim::RMSpropOptions const& options) {
    std::vector<std::string_view> names{"square_avg"};
    if (options.momentum() > 0) names.push_back("momentum_buffer");
    if (options.centered()) names.push_back("grad_avg");
    return names;
  }
  static at::Tensor& array(State& state, std::size_t which, torch::optim::RMSpropOptions const& options) {
    if (which == 0) return state.square_avg();
    return which == 1 && options.momentum() > 0 ? state.momentum_buffer() : state.grad_avg();
  }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  static std::string text(torch::optim::RMSpropOptions const& options) {
    return formatted("alpha {}, eps {}, weight decay {}, momentum {}, centered {}", options.alpha(), options.eps(),
                     options.weight_decay(), options.momentum(), options.centered());
  }
};
template <>
struct OptimizerArrays<torch::optim::AdagradOptions> {
  using Optimizer = torch::optim::Adagrad;
  using State = torch::optim::AdagradParamState;
  static constexpr bool lazy = false;
  static constexpr std::string_view name() { return "torch::optim::Adagrad"; }
  static std::vector<std::string_view> arrays(torch::optim::AdagradOptions const&) { return {"sum"}; }
  static at::Tensor& array(State& state, std::size_t) { return state.sum(); }
  static void set_step(State& state, std::int64_t step) { state.step(step); }
  static std::string text(torch::optim::AdagradOptions const& options) {
    return formatted("lr decay {}, eps {}, weight decay {}, initial value {}", options.lr_decay(), options.eps(),
                     options.weight_decay(), options.initial_accumulator_value());
  }
};

namespace detail {

/// Bytes of torch's allocator that an engine's account lists as optimizer state.
class ListedState {
 public:
  explicit ListedState(MemoryAccount& account) : account_(&account) {}
  ListedState(ListedState&& other) noexcept : account_(other.account_), bytes_(std::exchange(other.bytes_, 0)) {}
  ListedState& operator=(ListedState&& other) noexcept {
    set(0);
    account_ = other.account_;
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~ListedState() { set(0); }
  void set(std::int64_t bytes) {
    auto const more = bytes - std::exchange(bytes_, bytes);
    if (more == 0) return;
    account_->reserve(MemoryTag::optimizer, more);
    account_->add_live(MemoryTag::optimizer, more);
  }

 private:
  MemoryAccount* account_;
  std::int64_t bytes_ = 0;
};

/// An optimizer of torch that only its ShardOptimizer may step: gradients are there only then.
/// @tparam O  torch's optimizer
template <class O>
class SteppedByShards final : public O {
 public:
  using O::O;
  at::Tensor step(torch::optim::Optimizer::LossClosure = nullptr) override {
    fail<UsageError>("step() of the optimizer inside a ShardOptimizer was called: call ShardOptimizer::step");
  }
  void step_shards() { O::step(); }
};

}  // namespace detail

/// A torch::optim optimizer whose parameters are the parts of tensors that this rank keeps: an element-wise optimizer
/// does the same to a part of a tensor as to the whole.
///
/// ```
/// fsdp::libtorch::ShardOptimizer adamw{engine, torch::optim::AdamWOptions(1e-3)};
/// adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
/// torch::optim::StepLR schedule{adamw.optimizer(), 30, 0.1};  // schedules of torch
/// ```
/// It works with fsdp::GradScaler (`scaler.step(adamw, lr)`), and checkpoints keep its state. With engines that offload
/// state, or whose master weights are narrower than fp32, use the library's optimizers. The engine must outlive it.
/// @tparam Options  torch's: AdamWOptions, AdamOptions, SGDOptions, RMSpropOptions, AdagradOptions, or a type for which
/// OptimizerArrays is specialised
template <class E, class Options>
class ShardOptimizer {
  using Arrays = OptimizerArrays<Options>;
  static_assert(std::is_same_v<typename E::Master, float>,
                "fsdp: optimizers of torch need fp32 master weights: Precision's third type");

 public:
  using Optimizer = typename Arrays::Optimizer;
  /// Other options for the tensors whose full names match a pattern (see fsdp::matches), such as "*.bias".
  struct Group {
    std::string pattern;
    Options options;
  };

  /// Seals the engine.
  /// @param groups  the first that matches decides; `options` for the rest
  /// @throws UsageError if a pattern matches no tensor that trains, or state is offloaded; ConfigError on every rank if
  /// ranks' options differ
  /// @note Collective: yes.
  explicit ShardOptimizer(E& engine, Options options, std::vector<Group> groups = {})
      : engine_(&engine), options_(options) {
    auto const shards = engine.shards();
    auto const entry = shards.enter("an optimizer's constructor");
    shards.attach_optimizer();
    expect_equal_options(groups);
    FSDP_EXPECTS(!shards.core().offload,
                 "rank {}: {}: the engine keeps state in host memory; use an optimizer of the library", engine.rank(),
                 name());
    auto const device = detail::TorchDevice<typename E::Device>::of(engine.device());
    std::vector<std::vector<at::Tensor>> tensors(groups.size() + 1);
    std::vector<bool> matched(groups.size());
    for (std::size_t u = 0; u < shards.size(); ++u) {
      auto& unit = shards[u];
      if (!unit.trains()) continue;
      for (auto const& tensor : unit.layout().tensors())
        if (auto const group = group_of(groups, tensor.name); group < groups.size()) matched[group] = true;
      for (auto const& part : unit.layout().segments(unit.shard())) {
        auto parameter =
            torch::from_blob(unit.master + part.offset, {part.count}, at::dtype(at::kFloat).device(device));
        parameter.set_requires_grad(true);
        tensors[group_of(groups, unit.layout().tensors()[part.tensor].name)].push_back(parameter);
        parts_.push_back({u, part, std::move(parameter), {}});
      }
    }
    for (std::size_t group = 0; group < groups.size(); ++group)
      FSDP_EXPECTS(matched[group], "rank {}: {}: the pattern '{}' matches no tensor that trains", engine.rank(), name(),
                   groups[group].pattern);
    std::vector<torch::optim::OptimizerParamGroup> params;
    params.emplace_back(std::move(tensors.back()), std::make_unique<Options>(options));
    for (std::size_t group = 0; group < groups.size(); ++group)
      params.emplace_back(std::move(tensors[group]), std::make_unique<Options>(groups[group].options));
    optimizer_ = std::make_unique<detail::SteppedByShards<Optimizer>>(params, options);
    for (auto& part : parts_) part.arrays.resize(state_names().size());
    keep_arrays();
  }
  ShardOptimizer(ShardOptimizer&&) noexcept = default;
  ShardOptimizer& operator=(ShardOptimizer&&) noexcept = default;

  /// One step over all units that have a gradient. With a norm, gradients are scaled by the factor that clip_grad_norm
  /// decided, in place; if that says so, the step changes nothing.
  /// @throws UsageError as AdamW::step
  /// @note Waits for compute if a norm is given.
  void step(GradNorm<E> const& norm = {}) {
    auto const shards = engine_->shards();
    auto const entry = shards.enter("an optimizer's step");
    shards.begin_step(name(), static_cast<float>(optimizer_->param_groups()[0].options().get_lr()), norm);
    float const factor = norm.engine() == nullptr ? 1.0f : decided();
    fsdp::detail::update_units(shards, [&](auto& unit) { step_torch(unit, factor); });
    if (factor < 0.0f) return;
    ++steps_;
    keep_arrays();
  }
  /// A step with another learning rate, which all groups keep.
  void step(float lr, GradNorm<E> const& norm = {}) {
    for (auto& group : optimizer_->param_groups()) group.options().set_lr(static_cast<double>(lr));
    step(norm);
  }

  E& engine() const { return *engine_; }
  /// Torch's, for schedules of learning rates and to change options. Its parameters are the parts of this rank; its
  /// step() throws UsageError.
  Optimizer& optimizer() { return *optimizer_; }
  /// Steps taken; skipped ones do not count.
  std::int64_t steps() const { return steps_; }

  // Members for checkpoints: see fsdp::checkpoint::Checkpointable.
  static constexpr std::string_view name() { return Arrays::name(); }
  std::vector<std::string_view> state_names() const { return Arrays::arrays(options_); }
  bool owns(TensorInfo const&) const { return true; }
  float* state(std::size_t, std::size_t) { return nullptr; }
  /// The elements of an array that belong to a part of the unit's shard, on the engine's device.
  float* state(std::size_t which, std::size_t unit, Segment const& segment) {
    for (auto& part : parts_) {
      auto const& own = part.segment;
      if (part.unit != unit || own.tensor != segment.tensor || segment.first < own.first ||
          segment.first + segment.count > own.first + own.count)
        continue;
      return array(part, which).template data_ptr<float>() + (segment.first - own.first);
    }
    fail<UsageError>("rank {}: {}: this rank keeps no such part of a tensor", engine_->rank(), name());
  }
  /// Continues as after `steps` steps, with the arrays that state() has returned.
  void set_steps(std::int64_t steps) {
    FSDP_EXPECTS(steps >= 0, "rank {}: {}::set_steps: expected 0 or more, got {}", engine_->rank(), name(), steps);
    engine_->shards().history().add("set_steps with number of steps", steps);
    steps_ = steps;
    for (auto& part : parts_) {
      if (steps == 0 && Arrays::lazy) {
        optimizer_->state().erase(key(part.parameter));
        continue;
      }
      auto state = std::make_unique<typename Arrays::State>();
      for (std::size_t which = 0; which < part.arrays.size(); ++which) array_of(*state, which) = array(part, which);
      Arrays::set_step(*state, steps);
      optimizer_->state()[key(part.parameter)] = std::move(state);
    }
  }

 private:
  struct Part {
    std::size_t unit;
    Segment segment;
    at::Tensor parameter;            ///< (segment.count) in the master shard
    std::vector<at::Tensor> arrays;  ///< those of torch's state, once they are there
  };
  using State = std::remove_reference_t<decltype(std::declval<Optimizer&>().state())>;

  /// The key of a parameter's state: an address; before torch 2.0, the address as text.
  static typename State::key_type key(at::Tensor const& parameter) {
    return torch_key<typename State::key_type>(parameter.unsafeGetTensorImpl());
  }
  template <class Key>
  static Key torch_key(c10::TensorImpl* address) {
    if constexpr (std::is_same_v<Key, std::string>) {
      std::ostringstream text;
      text << address;
      return text.str();
    } else {
      return address;
    }
  }
  static std::size_t group_of(std::vector<Group> const& groups, std::string_view tensor) {
    for (std::size_t group = 0; group < groups.size(); ++group)
      if (matches(groups[group].pattern, tensor)) return group;
    return groups.size();
  }
  void expect_equal_options(std::vector<Group> const& groups) const {
    auto text = formatted("{}: lr {}, {}", name(), options_.lr(), Arrays::text(options_));
    for (auto const& [pattern, options] : groups)
      text += formatted("; '{}': lr {}, {}", pattern, options.lr(), Arrays::text(options));
    fsdp::detail::expect_equal_texts(engine_->world(), text, "optimizer options");
  }
  /// @return the factor of gradients; -1: the step is skipped
  float decided() const { return on_device_copy(engine_->shards().norm().result)->factor; }
  template <class Scalars>
  std::unique_ptr<Scalars> on_device_copy(Scalars const* from) const {
    auto copy = std::make_unique<Scalars>();
    engine_->device().copy_async(engine_->compute(), copy.get(), from, sizeof *copy);
    engine_->device().synchronize(engine_->compute());
    return copy;
  }
  /// Gives the unit's parts their gradients, and lets torch step the parts that have one: torch's optimizer steps once
  /// for each unit.
  /// @param factor  of gradients; below 0: nothing is stepped
  void step_torch(typename E::Unit& unit, float factor) {
    if (factor < 0.0f) return;
    torch::NoGradGuard const no_grad;
    auto const first = std::lower_bound(parts_.begin(), parts_.end(), unit.index(),
                                        [](Part const& part, std::size_t index) { return part.unit < index; });
    auto const for_each = [&](auto const& act) {
      for (auto part = first; part != parts_.end() && part->unit == unit.index(); ++part) act(*part);
    };
    for_each([&](Part& part) {
      auto& gradient = part.parameter.mutable_grad();
      gradient = torch::from_blob(unit.gradient + part.segment.offset, {part.segment.count}, part.parameter.options());
      if (factor != 1.0f) gradient.mul_(factor);
    });
    auto const forget_gradients = [&] { for_each([](Part& part) { part.parameter.mutable_grad().reset(); }); };
    try {
      optimizer_->step_shards();
    } catch (...) {  // a later step must not find them
      forget_gradients();
      throw;
    }
    forget_gradients();
  }
  at::Tensor& array_of(typename Arrays::State& state, std::size_t which) const {
    if constexpr (requires { Arrays::array(state, which, options_); })
      return Arrays::array(state, which, options_);
    else
      return Arrays::array(state, which);
  }
  at::Tensor& array(Part& part, std::size_t which) const {
    if (!part.arrays[which].defined()) part.arrays[which] = torch::zeros_like(part.parameter);
    return part.arrays[which];
  }
  /// Notes the arrays that torch has made.
  void keep_arrays() {
    std::int64_t bytes = 0;
    for (auto& part : parts_) {
      auto const found = optimizer_->state().find(key(part.parameter));
      if (found == optimizer_->state().end()) continue;
      auto& state = static_cast<typename Arrays::State&>(*found->second);
      for (std::size_t which = 0; which < part.arrays.size(); ++which)
        if (auto const& made = array_of(state, which); made.defined()) part.arrays[which] = made;
      for (auto const& array : part.arrays)
        if (array.defined()) bytes += static_cast<std::int64_t>(array.nbytes());
    }
    listed_.set(bytes);
  }

  E* engine_;
  Options options_;
  std::vector<Part> parts_;  ///< in ascending order of units
  std::unique_ptr<detail::SteppedByShards<Optimizer>> optimizer_;
  detail::ListedState listed_{engine_->account()};
  std::int64_t steps_ = 0;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
