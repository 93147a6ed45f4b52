// SPDX-License-Identifier: Apache-2.0
// A small residual network with a tied embedding, on single-source kernels: what the engine's tests train.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fsdp.hpp"

namespace toy {

/// C[row][col] = (accumulate: +=) factor * sum over k of A[row][k] * B[k][col], any strides; a block is a row.
struct MatMul {
  struct Operand {
    float const* data;
    std::int64_t row, col;
  };
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, Operand a, Operand b, float* c, std::int64_t columns,
                          std::int64_t depth, bool accumulate) const {
    for (std::int64_t col = block.thread(); col < columns; col += block.threads()) {
      float sum = 0.0f;
      for (std::int64_t k = 0; k < depth; ++k) sum += a.data[row * a.row + k * a.col] * b.data[k * b.row + col * b.col];
      float& out = c[row * columns + col];
      out = accumulate ? out + sum : sum;
    }
  }
};

/// y = x + softsign(pre + bias), row by row.
struct Activate {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* pre, float const* bias, float* out,
                          std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      float const v = pre[row * n + i] + bias[i];
      out[row * n + i] = v / (1.0f + (v < 0.0f ? -v : v));
    }
  }
};

/// dpre = dout * softsign'(pre + bias).
struct ActivateBackward {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* pre, float const* bias, float const* dout,
                          float* dpre, std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      float const v = pre[row * n + i] + bias[i];
      float const d = 1.0f + (v < 0.0f ? -v : v);
      dpre[row * n + i] = dout[row * n + i] / (d * d);
    }
  }
};

/// out += in.
struct Add {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float const* in, float* out, std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) out[row * n + i] += in[row * n + i];
  }
};

/// bias gradient: out[i] += sum over rows of in[row][i]; one block.
struct ColumnSum {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float const* in, float* out, std::int64_t rows,
                          std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      float sum = 0.0f;
      for (std::int64_t row = 0; row < rows; ++row) sum += in[row * n + i];
      out[i] += sum;
    }
  }
};

/// Inputs or targets: a hash of (salt, step, global row, column) in [-1, 1).
struct Data {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t row, float* out, std::int64_t n, std::uint32_t salt,
                          std::int64_t first_row) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      auto h = salt ^ static_cast<std::uint32_t>((first_row + row) * 7919 + i * 104729 + 1);
      h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
      out[row * n + i] = static_cast<float>(h >> 8) * (2.0f / 16777216.0f) - 1.0f;
    }
  }
};

/// dy = (y - target) * scale; *loss += sum of squares / 2 * scale, by one thread in order.
struct LossGradient {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float const* y, float const* target, float* dy,
                          double* loss, std::int64_t count, float scale) const {
    for (std::int64_t i = block.thread(); i < count; i += block.threads()) dy[i] = (y[i] - target[i]) * scale;
    if (block.thread() != 0) return;
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i)
      sum += 0.5 * static_cast<double>(y[i] - target[i]) * static_cast<double>(y[i] - target[i]);
    *loss += sum * static_cast<double>(scale);
  }
};

template <class D>
struct Embed {
  D device;
  std::int64_t rows, inputs, width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> table;  // (inputs, width)
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {inputs, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.3f)});
  }
  void forward(typename D::Stream& s, Params<float const> const& w, float const* x, float* h) const {
    device.launch(s, rows, MatMul{}, MatMul::Operand{x, inputs, 1}, MatMul::Operand{w.table.data, width, 1}, h, width,
                  inputs, false);
  }
  void backward(typename D::Stream& s, Params<float const> const&, Params<float> const& g, float const* x,
                float const* dh) const {
    device.launch(s, inputs, MatMul{}, MatMul::Operand{x, 1, inputs}, MatMul::Operand{dh, width, 1}, g.table.data,
                  width, rows, true);
  }
};

template <class D>
struct Layer {
  D device;
  std::int64_t rows, width, hidden;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> up, down;
    fsdp::Tensor<T, 1> bias;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("up", p.up, {width, hidden}, fsdp::TensorOptions{.init = fsdp::init::normal(0.3f)});
    tensor("bias", p.bias, {hidden}, fsdp::no_decay);
    tensor("down", p.down, {hidden, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.1f)});
  }
  struct Saved {
    float *pre, *act;
  };
  void forward(typename D::Stream& s, Params<float const> const& w, float const* x, float* y, Saved saved) const {
    device.launch(s, rows, MatMul{}, MatMul::Operand{x, width, 1}, MatMul::Operand{w.up.data, hidden, 1}, saved.pre,
                  hidden, width, false);
    device.launch(s, rows, Activate{}, static_cast<float const*>(saved.pre), w.bias.data, saved.act, hidden);
    device.launch(s, rows, MatMul{}, MatMul::Operand{saved.act, hidden, 1}, MatMul::Operand{w.down.data, width, 1}, y,
                  width, hidden, false);
    device.launch(s, rows, Add{}, x, y, width);
  }
  /// dh holds the output's gradient and is left with the input's; scratch: two (rows, hidden).
  void backward(typename D::Stream& s, Params<float const> const& w, Params<float> const& g, float const* x, float* dh,
                Saved saved, float* dact, float* dpre) const {
    device.launch(s, hidden, MatMul{}, MatMul::Operand{saved.act, 1, hidden}, MatMul::Operand{dh, width, 1},
                  g.down.data, width, rows, true);
    device.launch(s, rows, MatMul{}, MatMul::Operand{dh, width, 1}, MatMul::Operand{w.down.data, 1, width}, dact,
                  hidden, width, false);
    device.launch(s, rows, ActivateBackward{}, static_cast<float const*>(saved.pre), w.bias.data,
                  static_cast<float const*>(dact), dpre, hidden);
    device.launch(s, std::int64_t{1}, ColumnSum{}, static_cast<float const*>(dpre), g.bias.data, rows, hidden);
    device.launch(s, width, MatMul{}, MatMul::Operand{x, 1, width}, MatMul::Operand{dpre, hidden, 1}, g.up.data, hidden,
                  rows, true);
    device.launch(s, rows, MatMul{}, MatMul::Operand{dpre, hidden, 1}, MatMul::Operand{w.up.data, 1, hidden}, dh, width,
                  hidden, true);
  }
};

/// Reads out through the embedding's table: y = h * table^T.
template <class D>
struct Head {
  D device;
  std::int64_t rows, inputs, width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> table;
    fsdp::Tensor<T, 1> gain;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {inputs, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.3f)});
    tensor("gain", p.gain, {inputs}, fsdp::TensorOptions{.decay = false, .init = fsdp::init::normal(0.5f)});
  }
  void forward(typename D::Stream& s, Params<float const> const& w, float const* h, float* y) const {
    device.launch(s, rows, MatMul{}, MatMul::Operand{h, width, 1}, MatMul::Operand{w.table.data, 1, width}, y, inputs,
                  width, false);
    for (std::int64_t row = 0; row < rows; ++row)
      device.launch(s, std::int64_t{1}, Add{}, w.gain.data, y + row * inputs, inputs);
  }
  void backward(typename D::Stream& s, Params<float const> const& w, Params<float> const& g, float const* h,
                float const* dy, float* dh) const {
    device.launch(s, inputs, MatMul{}, MatMul::Operand{dy, 1, inputs}, MatMul::Operand{h, width, 1}, g.table.data,
                  width, rows, true);
    device.launch(s, std::int64_t{1}, ColumnSum{}, dy, g.gain.data, rows, inputs);
    device.launch(s, rows, MatMul{}, MatMul::Operand{dy, inputs, 1}, MatMul::Operand{w.table.data, width, 1}, dh, width,
                  inputs, false);
  }
};

struct Shape {
  std::int64_t inputs = 11;
  std::int64_t width = 13;
  std::vector<std::int64_t> hidden = std::vector<std::int64_t>(4, 29);  ///< one block each
  bool tied = true;               ///< embedding and head share the root unit; false: blocks alone
  std::int64_t global_rows = 12;  ///< rows of a micro-step over all ranks
};

/// The network over one engine, with its activations.
template <class E>
class Network {
 public:
  using D = typename E::Device;

  Network(E& engine, Shape shape)
      : engine_(&engine), shape_(std::move(shape)), rows_(shape_.global_rows / engine.world_size()) {
    auto const& device = engine.device();
    std::int64_t const ends = shape_.tied ? shape_.inputs : shape_.width;
    x_ = array(rows_ * ends), target_ = array(rows_ * ends), y_ = array(rows_ * ends), dy_ = array(rows_ * ends);
    loss_ = {device, engine.account(), fsdp::MemoryTag::activations, sizeof(double)};
    device.zero_async(engine.compute(), loss_.data(), sizeof(double));
    std::int64_t widest = 1;
    for (auto const hidden : shape_.hidden) widest = std::max(widest, hidden);
    dact_ = array(rows_ * widest), dpre_ = array(rows_ * widest), dh_ = array(rows_ * shape_.width);
    for (std::size_t i = 0; i <= shape_.hidden.size(); ++i) h_.push_back(array(rows_ * shape_.width));

    fsdp::UnitId root{};
    if (shape_.tied) {
      root = engine.add_unit("root");
      embed_.emplace(engine.shard(Embed<D>{device, rows_, shape_.inputs, shape_.width}, "ends", root));
    }
    for (std::size_t i = 0; i < shape_.hidden.size(); ++i) {
      auto const hidden = shape_.hidden[i];
      pre_.push_back(array(rows_ * hidden)), act_.push_back(array(rows_ * hidden));
      layers_.push_back(engine.shard(Layer<D>{device, rows_, shape_.width, hidden}, "layers." + std::to_string(i)));
    }
    if (shape_.tied) head_.emplace(engine.shard(Head<D>{device, rows_, shape_.inputs, shape_.width}, "ends", root));
  }
  ~Network() { engine_->drain_compute(); }

  /// Forward alone, on the data of micro-step `step`.
  void forward(std::int64_t step) {
    auto& s = engine_->compute();
    auto const& device = engine_->device();
    std::int64_t const ends = shape_.tied ? shape_.inputs : shape_.width;
    auto const salt = static_cast<std::uint32_t>(step) * 2654435761u;
    auto const first = rows_ * engine_->rank();
    device.launch(s, rows_, Data{}, f(x_), ends, salt, first);
    device.launch(s, rows_, Data{}, f(target_), ends, salt + 77u, first);
    if (embed_) {
      embed_->forward(f(x_), f(h_[0]));
    } else {
      device.copy_async(s, f(h_[0]), f(x_), h_[0].bytes());
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].forward(f(h_[i]), f(h_[i + 1]), saved(i));
    if (head_) {
      head_->forward(f(h_.back()), f(y_));
    } else {
      device.copy_async(s, f(y_), f(h_.back()), y_.bytes());
    }
  }

  /// Gradients of the mean over rows, times `scale`.
  void backward(float scale = 1.0f) {
    auto& s = engine_->compute();
    auto const& device = engine_->device();
    std::int64_t const ends = shape_.tied ? shape_.inputs : shape_.width;
    device.launch(s, std::int64_t{1}, LossGradient{}, static_cast<float const*>(f(y_)),
                  static_cast<float const*>(f(target_)), f(dy_), loss_.template as<double>(), rows_ * ends,
                  scale / static_cast<float>(rows_ * ends));
    if (head_) {
      head_->backward(f(h_.back()), f(dy_), f(dh_));
    } else {
      device.copy_async(s, f(dh_), f(dy_), dh_.bytes());
    }
    for (std::size_t i = layers_.size(); i-- > 0;) layers_[i].backward(f(h_[i]), f(dh_), saved(i), f(dact_), f(dpre_));
    if (embed_) embed_->backward(f(x_), f(dh_));
  }

  void step(std::int64_t micro_step, float scale = 1.0f) {
    forward(micro_step);
    backward(scale);
  }

  /// Sum of this rank's losses so far.
  double loss() {
    double value = 0.0;
    engine_->device().copy_async(engine_->compute(), &value, loss_.data(), sizeof value);
    engine_->device().synchronize(engine_->compute());
    return value;
  }

 private:
  using Array = fsdp::AccountedMemory<D const>;
  Array array(std::int64_t elements) {
    return {engine_->device(), engine_->account(), fsdp::MemoryTag::activations,
            static_cast<std::size_t>(elements) * sizeof(float)};
  }
  static float* f(Array const& array) { return array.template as<float>(); }
  typename Layer<D>::Saved saved(std::size_t i) const { return {f(pre_[i]), f(act_[i])}; }

  E* engine_;
  Shape shape_;
  std::int64_t rows_;
  Array x_, target_, y_, dy_, dact_, dpre_, dh_, loss_;
  std::vector<Array> h_, pre_, act_;
  std::optional<fsdp::ShardedModule<Embed<D>, E>> embed_;
  std::vector<fsdp::ShardedModule<Layer<D>, E>> layers_;
  std::optional<fsdp::ShardedModule<Head<D>, E>> head_;
};

/// All full parameters, tensor by tensor, on rank 0; empty elsewhere. Collective.
template <class E>
std::vector<float> parameters(E& engine) {
  std::vector<float> all;
  fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    all.insert(all.end(), values.begin(), values.end());
  });
  return all;
}

}  // namespace toy
