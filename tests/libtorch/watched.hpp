// SPDX-License-Identifier: Apache-2.0
// A layer whose backward throws when told to.
#pragma once

#include <functional>
#include <stdexcept>

#include "tests/libtorch/networks.hpp"

namespace networks {

/// Its backward calls a function, which may throw.
struct Watched : torch::autograd::Function<Watched> {
  static inline thread_local std::function<void()> in_backward;
  static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list gradients) {
    if (in_backward) in_backward();
    return gradients;
  }
};

inline Network with_throwing_unit(std::size_t unit) {
  auto network = named("six layers");
  network.kinds[unit] = "throws";
  return network;
}
[[noreturn]] inline void boom() { throw std::domain_error("boom in backward"); }

}  // namespace networks
