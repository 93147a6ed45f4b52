// SPDX-License-Identifier: Apache-2.0
// The computation of a part of a trial's model, in float as a module of the engine and in double for the reference.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "tests/support/trial/model.hpp"

namespace trial {

/// The elements of a part's tensors of rank 1, 2 and 3; null where it has none.
template <class T>
using Weights = std::array<T*, 3>;

/// Sizes of a part. Element j of each tensor belongs to the output's channel j % width, and has a coefficient of its
/// own: a gradient that ends up elsewhere shows.
struct PartSizes {
  Index width = 1;
  std::array<Index, 3> elements{};

  static PartSizes of(Model const& model, PartSpec const& part) {
    PartSizes sizes{model.width};
    for (auto const& tensor : part.tensors) sizes.elements[tensor.shape.size() - 1] = tensor.numel();
    return sizes;
  }
  /// Initial value of element j: exact in float, and so small that large tensors do not outweigh the input.
  template <class T>
  T coefficient(std::size_t t, Index j) const {
    return (T(1) - static_cast<T>(j * 37 % 101) / T(256)) * (T(0.25) / static_cast<T>(1 + elements[t] / width));
  }
  /// The factor of channel `i` of tensor t's contribution, for the row x.
  template <class T>
  T input(std::size_t t, T const* x, Index i) const {
    return t == 0 ? T(1) : x[(i + static_cast<Index>(t)) % width];
  }
  /// The channel's sum of coefficient times element, in T.
  template <class T, class W>
  T channel(std::size_t t, W const* w, Index i) const {
    T sum{};
    for (Index j = i; j < elements[t]; j += width) sum += coefficient<T>(t, j) * static_cast<T>(w[j]);
    return sum;
  }
};

/// y = x + what the tensors make of x; (rows, width) each.
template <class T, class W>
void forward_rows(PartSizes const& n, Weights<W const> const& w, T const* x, T* y, Index rows) {
  for (Index k = 0; k < rows * n.width; ++k) y[k] = x[k];
  for (std::size_t t = 0; t < w.size(); ++t)
    for (Index i = 0; i < n.width; ++i) {
      T const sum = n.channel<T>(t, w[t], i);
      for (Index row = 0; row < rows; ++row) y[row * n.width + i] += sum * n.input(t, x + row * n.width, i);
    }
}

/// dx = the input's gradient; g += the tensors', or g = where it is fresh.
template <class T, class W>
void backward_rows(PartSizes const& n, Weights<W const> const& w, Weights<T> const& g, std::array<bool, 3> fresh,
                   T const* x, T const* dy, T* dx, Index rows) {
  for (Index k = 0; k < rows * n.width; ++k) dx[k] = dy[k];
  for (std::size_t t = 0; t < w.size(); ++t)
    for (Index i = 0; i < n.width; ++i) {
      T slope{};
      for (Index row = 0; row < rows; ++row) slope += dy[row * n.width + i] * n.input(t, x + row * n.width, i);
      for (Index j = i; j < n.elements[t]; j += n.width) {
        T const term = n.coefficient<T>(t, j) * slope;
        g[t][j] = fresh[t] ? term : g[t][j] + term;
      }
      if (t == 0) continue;
      T const sum = n.channel<T>(t, w[t], i);
      for (Index row = 0; row < rows; ++row)
        dx[row * n.width + (i + static_cast<Index>(t)) % n.width] += sum * dy[row * n.width + i];
    }
}

/// dy = (y - target) * scale.
template <class T>
void loss_gradient(Model const& model, Index data, int rank, T const* y, T* dy, T scale) {
  auto const elements = rows_of(model, data, rank) * model.width;
  for (Index i = 0; i < elements; ++i) dy[i] = (y[i] - static_cast<T>(target_of(model, data, rank, i))) * scale;
}

/// A function of the test that runs inside a module, before it computes. It may throw, and may use the compute stream.
using Inside = std::function<void(fsdp::host::Stream&)>;

inline fsdp::TensorOptions options_of(TensorSpec const& tensor) {
  return {.decay = tensor.decay, .init = fsdp::init::normal(tensor.deviation), .frozen = tensor.frozen};
}

/// The part as a module. Each pass is one task of the compute stream.
struct Part {
  PartSpec spec;
  PartSizes sizes;
  bool sets_gradients;
  bool replicates_vectors;

  Part(Model const& model, PartSpec const& part, bool replicates)
      : spec(part),
        sizes(PartSizes::of(model, part)),
        sets_gradients(part.sets_gradients),
        replicates_vectors(replicates) {}

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> one;
    fsdp::Tensor<T, 2> two;
    fsdp::Tensor<T, 3> three;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    for (auto const& t : spec.tensors) {
      auto const options = this->options(t);
      if (t.shape.size() == 1) tensor(t.name, p.one, {t.shape[0]}, options);
      if (t.shape.size() == 2) tensor(t.name, p.two, {t.shape[0], t.shape[1]}, options);
      if (t.shape.size() == 3) tensor(t.name, p.three, {t.shape[0], t.shape[1], t.shape[2]}, options);
    }
  }

  template <class W>
  void forward(fsdp::host::Stream& stream, Params<W const> const& w, float const* x, float* y, Index rows,
               Inside const& inside) const {
    enqueue_forward(stream, data_of<W const>(w), x, y, rows, inside);
  }
  template <class W>
  void backward(fsdp::host::Stream& stream, Params<W const> const& w, Params<fsdp::Gradient<float>> const& g,
                float const* x, float const* dy, float* dx, Index rows, Inside const& inside) const {
    enqueue_backward(stream, data_of<W const>(w), data_of<float>(g), {g.one.fresh, g.two.fresh, g.three.fresh}, x, dy,
                     dx, rows, inside);
  }

  template <class W>
  void enqueue_forward(fsdp::host::Stream& stream, Weights<W const> const& w, float const* x, float* y, Index rows,
                       Inside const& inside) const {
    if (inside) inside(stream);
    stream.enqueue([n = sizes, w, x, y, rows] { forward_rows<float, W>(n, w, x, y, rows); });
  }
  template <class W>
  void enqueue_backward(fsdp::host::Stream& stream, Weights<W const> const& w, Weights<float> const& g,
                        std::array<bool, 3> fresh, float const* x, float const* dy, float* dx, Index rows,
                        Inside const& inside) const {
    if (inside) inside(stream);
    stream.enqueue(
        [n = sizes, w, g, fresh, x, dy, dx, rows] { backward_rows<float, W>(n, w, g, fresh, x, dy, dx, rows); });
  }

  fsdp::TensorOptions options(TensorSpec const& tensor) const {
    auto options = options_of(tensor);
    if (replicates_vectors && tensor.shape.size() == 1) options.strategy = fsdp::NoShard{};
    return options;
  }

 private:
  template <class T, class P>
  static Weights<T> data_of(P const& p) {
    return {p.one.data, p.two.data, p.three.data};
  }
};

}  // namespace trial
