// SPDX-License-Identifier: Apache-2.0
// The toy network trained in fp64 by one thread, without an engine: what mixed precision is measured against.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/support/toy_model.hpp"

namespace toy {

/// Tensors by name, each in fp64.
struct NamedTensor {
  std::string name;
  std::vector<double> values;
};
using Tensors = std::vector<NamedTensor>;

/// SGD with momentum, weight decay and clipping by the l2 norm, as fsdp::Sgd and fsdp::clip_grad_norm define them.
class Reference {
 public:
  struct Options {
    double lr, momentum, weight_decay, max_norm;
  };

  /// @param initial  every tensor of a tied network of `shape`
  Reference(Shape shape, Tensors initial, Options options)
      : shape_(std::move(shape)), options_(options), parameters_(std::move(initial)), gradients_(parameters_) {
    for (auto& tensor : gradients_) tensor.values.assign(tensor.values.size(), 0.0);
    momenta_ = gradients_;
    decays_.assign(parameters_.size(), false);
  }

  /// Adds the gradients of micro-step `index`, times `scale`.
  void accumulate(std::int64_t index, double scale) {
    auto const rows = shape_.global_rows, ends = shape_.inputs, width = shape_.width;
    auto const blocks = shape_.hidden.size();
    auto const salt = static_cast<std::uint32_t>(index) * 2654435761u;
    auto x = array(rows * ends), target = array(rows * ends), y = array(rows * ends), dy = array(rows * ends);
    auto dh = array(rows * width);
    std::vector<std::vector<double>> h(blocks + 1, array(rows * width)), pre, act;
    device_.launch(stream_, rows, Data{}, x.data(), ends, salt, std::int64_t{0});
    device_.launch(stream_, rows, Data{}, target.data(), ends, salt + 77u, std::int64_t{0});

    Embed<Device> const embed{device_, rows, ends, width};
    Head<Device> const head{device_, rows, ends, width};
    embed.forward(stream_, bind(embed, "ends", parameters_), constant(x.data()), h[0].data());
    for (std::size_t i = 0; i < blocks; ++i) {
      pre.push_back(array(rows * shape_.hidden[i])), act.push_back(array(rows * shape_.hidden[i]));
      auto const layer = layer_of(i);
      layer.forward(stream_, bind(layer, name_of(i), parameters_), h[i].data(), h[i + 1].data(),
                    {pre[i].data(), act[i].data()});
    }
    head.forward(stream_, bind(head, "ends", parameters_), constant(h.back().data()), y.data());
    double loss = 0.0;
    device_.launch(stream_, std::int64_t{1}, LossGradient{}, constant(y.data()), constant(target.data()), dy.data(),
                   &loss, rows * ends, scale / static_cast<double>(rows * ends), static_cast<float const*>(nullptr));
    head.backward(stream_, bind(head, "ends", parameters_), bind(head, "ends", gradients_), constant(h.back().data()),
                  constant(dy.data()), dh.data());
    for (std::size_t i = blocks; i-- > 0;) {
      auto const layer = layer_of(i);
      auto dact = array(rows * shape_.hidden[i]), dpre = dact;
      layer.backward(stream_, bind(layer, name_of(i), parameters_), bind(layer, name_of(i), gradients_), h[i].data(),
                     dh.data(), {pre[i].data(), act[i].data()}, dact.data(), dpre.data());
    }
    embed.backward(stream_, bind(embed, "ends", parameters_), bind(embed, "ends", gradients_), constant(x.data()),
                   constant(dh.data()));
  }

  /// One optimizer step. @return whether the clipping changed it
  bool step() {
    double squares = 0.0;
    for (auto const& tensor : gradients_)
      for (double const g : tensor.values) squares += g * g;
    double const factor = std::min(1.0, options_.max_norm / (std::sqrt(squares) + 1e-6));
    for (std::size_t t = 0; t < parameters_.size(); ++t) {
      double const decay = decays_[t] ? options_.weight_decay : 0.0;
      for (std::size_t i = 0; i < parameters_[t].values.size(); ++i) {
        double& p = parameters_[t].values[i];
        double& v = momenta_[t].values[i];
        v = options_.momentum * v + decay * p + std::exchange(gradients_[t].values[i], 0.0) * factor;
        p -= options_.lr * v;
      }
    }
    return factor < 1.0;
  }

  Tensors const& parameters() const { return parameters_; }
  Tensors const& gradients() const { return gradients_; }

 private:
  using Device = fsdp::host::Device;

  /// Points the tensors of a Params at vectors of the same names.
  struct Binder {
    Reference* owner;
    std::string_view prefix;
    Tensors* tensors;
    template <std::size_t Rank>
    void operator()(std::string_view name, fsdp::Tensor<double, Rank>& tensor, fsdp::Extents<Rank> extents,
                    fsdp::TensorOptions options) const {
      auto const full_name = std::string(prefix) + "." + std::string(name);
      for (std::size_t t = 0; t < tensors->size(); ++t) {
        if ((*tensors)[t].name != full_name) continue;
        owner->decays_[t] = options.decay;
        tensor = {(*tensors)[t].values.data(), extents};
        FSDP_EXPECTS(static_cast<std::size_t>(tensor.numel()) == (*tensors)[t].values.size(), "'{}'", full_name);
        return;
      }
      fsdp::fail<fsdp::UsageError>("no tensor '{}'", full_name);
    }
  };
  template <class M>
  typename M::template Params<double> bind(M const& toy_part, std::string_view prefix, Tensors& tensors) {
    typename M::template Params<double> bound;
    toy_part.describe(bound, Binder{this, prefix, &tensors});
    return bound;
  }
  Layer<Device, double> layer_of(std::size_t i) const {
    return {device_, shape_.global_rows, shape_.width, shape_.hidden[i]};
  }
  static std::string name_of(std::size_t i) { return "layers." + std::to_string(i); }
  static std::vector<double> array(std::int64_t elements) {
    return std::vector<double>(static_cast<std::size_t>(elements), 0.0);
  }

  Shape shape_;
  Options options_;
  Tensors parameters_, gradients_, momenta_;
  std::vector<bool> decays_;
  Device device_;
  Device::Stream stream_ = Device::Stream::inline_stream("reference");
};

}  // namespace toy
