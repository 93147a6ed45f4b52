// SPDX-License-Identifier: Apache-2.0
// Which of torch's optimizers work on shards, and the arrays that they keep for each element.
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"

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

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::libtorch
