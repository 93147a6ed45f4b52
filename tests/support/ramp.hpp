// SPDX-License-Identifier: Apache-2.0
// A module whose gradient is known in advance, for tests of what becomes of gradients.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

namespace fsdp::testing {

/// `elements` weights, zero at first. Backward adds `by * (element % 7 + 1)` to the gradient of each, or stores that
/// where the gradient is fresh. `before` is called on the calling thread, with the stream, before either pass computes.
template <bool Sets = false>
struct Ramp {
  static constexpr bool sets_gradients = Sets;
  std::int64_t elements = 5;

  template <class T>
  struct Params {
    Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {elements}, no_decay);
  }
  using Before = std::function<void(host::Stream&)>;

  template <class P>
  void forward(host::Stream& stream, Params<P const> const&, Before const& before = {}) const {
    if (before) before(stream);
  }
  template <class P, class G>
  void backward(host::Stream& stream, Params<P const> const&, Params<G> const& gradient, float by,
                Before const& before = {}) const {
    if (before) before(stream);
    stream.enqueue([w = gradient.w, by] {
      for (std::int64_t i = 0; i < w.numel(); ++i) {
        float const earlier = w.fresh ? 0.0f : widen(w.data[i]);
        w.data[i] = narrow<typename decltype(w)::value_type>(earlier + by * static_cast<float>(i % 7 + 1));
      }
    });
  }
};

/// Every weight of the engine in declared order, on rank 0; elsewhere nothing. @note Collective: yes.
template <class E>
std::vector<float> all_weights(E& engine) {
  std::vector<float> all;
  export_full(engine, [&](TensorInfo const&, std::span<float const> values) {
    all.insert(all.end(), values.begin(), values.end());
  });
  return all;
}

}  // namespace fsdp::testing
