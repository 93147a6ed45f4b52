// SPDX-License-Identifier: Apache-2.0
// A residual two-layer perceptron, written against fsdp's Device: compute only, no rank, no sharding.
#pragma once

#include <cstdint>

#include "fsdp/fsdp.hpp"
#include "fsdp/kernels.hpp"

namespace mlp {

/// Row-major matrices below: x, y, dy (rows, width); hidden, dhidden (rows, 4 width).

/// hidden = tanh(x up^T + bias); a block is a row.
struct Hidden {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* x, float const* up, float const* bias,
                          float* hidden, std::int64_t width) const {
    for (std::int64_t j = block.thread(); j < 4 * width; j += block.threads()) {
      float sum = bias[j];
      for (std::int64_t k = 0; k < width; ++k) sum += x[row * width + k] * up[j * width + k];
      hidden[row * 4 * width + j] = fsdp::math::tanh(sum);
    }
  }
};

/// y = x + hidden down^T + bias; a block is a row.
struct Output {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* x, float const* hidden, float const* down,
                          float const* bias, float* y, std::int64_t width) const {
    for (std::int64_t j = block.thread(); j < width; j += block.threads()) {
      float sum = x[row * width + j] + bias[j];
      for (std::int64_t k = 0; k < 4 * width; ++k) sum += hidden[row * 4 * width + k] * down[j * 4 * width + k];
      y[row * width + j] = sum;
    }
  }
};

/// dhidden = (dy down) * (1 - hidden^2); a block is a row.
struct HiddenGradient {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* dy, float const* hidden, float const* down,
                          float* dhidden, std::int64_t width) const {
    for (std::int64_t k = block.thread(); k < 4 * width; k += block.threads()) {
      float sum = 0.0f;
      for (std::int64_t j = 0; j < width; ++j) sum += dy[row * width + j] * down[j * 4 * width + k];
      float const h = hidden[row * 4 * width + k];
      dhidden[row * 4 * width + k] = sum * (1.0f - h * h);
    }
  }
};

/// weight (outputs, inputs) += dout^T in, bias (outputs) += column sums of dout; a block is an output.
struct WeightGradient {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t output, float const* dout, float const* in, float* weight,
                          float* bias, std::int64_t rows, std::int64_t outputs, std::int64_t inputs) const {
    for (std::int64_t k = block.thread(); k < inputs; k += block.threads()) {
      float sum = 0.0f;
      for (std::int64_t row = 0; row < rows; ++row) sum += dout[row * outputs + output] * in[row * inputs + k];
      weight[output * inputs + k] += sum;
    }
    if (block.thread() != 0) return;
    for (std::int64_t row = 0; row < rows; ++row) bias[output] += dout[row * outputs + output];
  }
};

/// dy += dhidden up: the gradient of x takes the place of that of y; a block is a row.
struct InputGradient {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* dhidden, float const* up, float* dy,
                          std::int64_t width) const {
    for (std::int64_t k = block.thread(); k < width; k += block.threads()) {
      float sum = 0.0f;
      for (std::int64_t j = 0; j < 4 * width; ++j) sum += dhidden[row * 4 * width + j] * up[j * width + k];
      dy[row * width + k] += sum;
    }
  }
};

/// y = x + down tanh(up x + up_bias) + down_bias.
template <class D>
struct Mlp {
  D device;
  std::int64_t rows;
  std::int64_t width;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> up, down;
    fsdp::Tensor<T, 1> up_bias, down_bias;
  };

  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    fsdp::TensorOptions const weight{.init = fsdp::init::normal(0.3f)};
    tensor("up.weight", p.up, {4 * width, width}, weight);
    tensor("up.bias", p.up_bias, {4 * width}, fsdp::no_decay);
    tensor("down.weight", p.down, {width, 4 * width}, weight);
    tensor("down.bias", p.down_bias, {width}, fsdp::no_decay);
  }

  void forward(typename D::Stream& stream, Params<float const> const& w, float const* x, float* y,
               float* hidden) const {
    device.launch(stream, rows, Hidden{}, x, w.up.data, w.up_bias.data, hidden, width);
    device.launch(stream, rows, Output{}, x, static_cast<float const*>(hidden), w.down.data, w.down_bias.data, y,
                  width);
  }

  /// dy comes in as the gradient of y and leaves as that of x.
  void backward(typename D::Stream& stream, Params<float const> const& w, Params<float> const& g, float const* x,
                float const* hidden, float* dy, float* dhidden) const {
    float const* const dout = dy;
    device.launch(stream, rows, HiddenGradient{}, dout, hidden, w.down.data, dhidden, width);
    device.launch(stream, width, WeightGradient{}, dout, hidden, g.down.data, g.down_bias.data, rows, width, 4 * width);
    device.launch(stream, 4 * width, WeightGradient{}, static_cast<float const*>(dhidden), x, g.up.data, g.up_bias.data,
                  rows, 4 * width, width);
    device.launch(stream, rows, InputGradient{}, static_cast<float const*>(dhidden), w.up.data, dy, width);
  }
};

}  // namespace mlp
