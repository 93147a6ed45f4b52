// SPDX-License-Identifier: Apache-2.0
// A small residual network with a tied embedding, on single-source kernels: what the engine's tests train.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/fsdp.hpp"

namespace toy {

/// An operand of MatMul: element (row, col) is data[row * row_stride + col * col_stride].
template <class T>
struct Operand {
  T const* data;
  std::int64_t row, col;
};
template <class T>
FSDP_HD Operand<std::remove_const_t<T>> rows_of(T* data, std::int64_t columns) {
  return {data, columns, 1};
}
template <class T>
FSDP_HD Operand<std::remove_const_t<T>> columns_of(T* data, std::int64_t columns) {
  return {data, 1, columns};
}

/// C[row][col] = (accumulate: +=) sum over k of A[row][k] * B[k][col]; a block is a row. Low-precision elements are
/// multiplied and summed in fp32, and C is rounded once.
struct MatMul {
  template <class Block, class A, class B, class C>
  FSDP_HD void operator()(Block const& block, std::int64_t row, Operand<A> a, Operand<B> b, C* c, std::int64_t columns,
                          std::int64_t depth, bool accumulate) const {
    using Sum = fsdp::Compute<A>;
    for (std::int64_t col = block.thread(); col < columns; col += block.threads()) {
      Sum sum{};
      for (std::int64_t k = 0; k < depth; ++k)
        sum += fsdp::widen(a.data[row * a.row + k * a.col]) * fsdp::widen(b.data[k * b.row + col * b.col]);
      C& out = c[row * columns + col];
      out = fsdp::narrow<C>(accumulate ? fsdp::widen(out) + sum : sum);
    }
  }
};

/// y = softsign(pre + bias), row by row.
struct Activate {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* pre, W const* bias, A* out,
                          std::int64_t n) const {
    using F = fsdp::Compute<A>;
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      F const v = fsdp::widen(pre[row * n + i]) + fsdp::widen(bias[i]);
      out[row * n + i] = fsdp::narrow<A>(v / (F(1) + (v < F(0) ? -v : v)));
    }
  }
};

/// dpre = dout * softsign'(pre + bias).
struct ActivateBackward {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* pre, W const* bias, A const* dout, A* dpre,
                          std::int64_t n) const {
    using F = fsdp::Compute<A>;
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      F const v = fsdp::widen(pre[row * n + i]) + fsdp::widen(bias[i]);
      F const d = F(1) + (v < F(0) ? -v : v);
      dpre[row * n + i] = fsdp::narrow<A>(fsdp::widen(dout[row * n + i]) / (d * d));
    }
  }
};

/// out += in.
struct Add {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A const* in, A* out, std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads())
      out[row * n + i] = fsdp::narrow<A>(fsdp::widen(out[row * n + i]) + fsdp::widen(in[row * n + i]));
  }
};

/// out[row] += in, the same for every row.
struct AddToRow {
  template <class Block, class A, class W>
  FSDP_HD void operator()(Block const& block, std::int64_t row, W const* in, A* out, std::int64_t n) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads())
      out[row * n + i] = fsdp::narrow<A>(fsdp::widen(out[row * n + i]) + fsdp::widen(in[i]));
  }
};

/// bias gradient: out[i] = (accumulate: +=) sum over rows of in[row][i]; one block.
struct ColumnSum {
  template <class Block, class A, class G>
  FSDP_HD void operator()(Block const& block, std::int64_t, A const* in, G* out, std::int64_t rows, std::int64_t n,
                          bool accumulate) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      fsdp::Compute<A> sum{};
      for (std::int64_t row = 0; row < rows; ++row) sum += fsdp::widen(in[row * n + i]);
      out[i] = fsdp::narrow<G>(accumulate ? fsdp::widen(out[i]) + sum : sum);
    }
  }
};

/// Inputs or targets: a hash of (salt, step, global row, column) in [-1, 1).
struct Data {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t row, A* out, std::int64_t n, std::uint32_t salt,
                          std::int64_t first_row) const {
    for (std::int64_t i = block.thread(); i < n; i += block.threads()) {
      auto h = salt ^ static_cast<std::uint32_t>((first_row + row) * 7919 + i * 104729 + 1);
      h ^= h >> 16, h *= 0x7feb352du, h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
      float const value = static_cast<float>(h >> 8) * (2.0f / 16777216.0f) - 1.0f;
      out[row * n + i] = fsdp::narrow<A>(static_cast<fsdp::Compute<A>>(value));
    }
  }
};

/// dy = (y - target) * scale * *loss_scale (none: 1); *loss += sum of squares / 2 * scale, by one thread in order.
struct LossGradient {
  template <class Block, class A>
  FSDP_HD void operator()(Block const& block, std::int64_t, A const* y, A const* target, A* dy, double* loss,
                          std::int64_t count, fsdp::Compute<A> scale, float const* loss_scale) const {
    using F = fsdp::Compute<A>;
    F const factor = loss_scale == nullptr ? scale : scale * static_cast<F>(*loss_scale);
    for (std::int64_t i = block.thread(); i < count; i += block.threads())
      dy[i] = fsdp::narrow<A>((fsdp::widen(y[i]) - fsdp::widen(target[i])) * factor);
    if (block.thread() != 0) return;
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
      auto const difference = static_cast<double>(fsdp::widen(y[i]) - fsdp::widen(target[i]));
      sum += 0.5 * difference * difference;
    }
    *loss += sum * static_cast<double>(scale);
  }
};

/// A pointer to constant elements, for kernels whose arguments must not deduce a mutable one.
template <class T>
T const* constant(T* data) {
  return data;
}

template <class D>
struct Embed {
  D device;
  std::int64_t rows, inputs, width;
  bool sets_gradients = false;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> table;  // (inputs, width)
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("table", p.table, {inputs, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.3f)});
  }
  template <class W, class A>
  void forward(typename D::Stream& s, Params<W> const& w, A const* x, A* h) const {
    device.launch(s, rows, MatMul{}, rows_of(x, inputs), rows_of(w.table.data, width), h, width, inputs, false);
  }
  template <class W, class G, class A>
  void backward(typename D::Stream& s, Params<W> const&, Params<G> const& g, A const* x, A const* dh) const {
    device.launch(s, inputs, MatMul{}, columns_of(x, inputs), rows_of(dh, width), g.table.data, width, rows,
                  !g.table.fresh);
  }
};

/// @tparam A  element type of activations
template <class D, class A = float>
struct Layer {
  D device;
  std::int64_t rows, width, hidden;
  bool sets_gradients = false;
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
    A *pre, *act;
  };
  template <class W>
  void forward(typename D::Stream& s, Params<W> const& w, A const* x, A* y, Saved saved) const {
    device.launch(s, rows, MatMul{}, rows_of(x, width), rows_of(w.up.data, hidden), saved.pre, hidden, width, false);
    device.launch(s, rows, Activate{}, constant(saved.pre), constant(w.bias.data), saved.act, hidden);
    device.launch(s, rows, MatMul{}, rows_of(saved.act, hidden), rows_of(w.down.data, width), y, width, hidden, false);
    device.launch(s, rows, Add{}, x, y, width);
  }
  /// dh holds the output's gradient and is left with the input's; scratch: two (rows, hidden).
  template <class W, class G>
  void backward(typename D::Stream& s, Params<W> const& w, Params<G> const& g, A const* x, A* dh, Saved saved, A* dact,
                A* dpre) const {
    device.launch(s, hidden, MatMul{}, columns_of(saved.act, hidden), rows_of(dh, width), g.down.data, width, rows,
                  !g.down.fresh);
    device.launch(s, rows, MatMul{}, rows_of(dh, width), columns_of(w.down.data, width), dact, hidden, width, false);
    device.launch(s, rows, ActivateBackward{}, constant(saved.pre), constant(w.bias.data), constant(dact), dpre,
                  hidden);
    device.launch(s, std::int64_t{1}, ColumnSum{}, constant(dpre), g.bias.data, rows, hidden, !g.bias.fresh);
    device.launch(s, width, MatMul{}, columns_of(x, width), rows_of(dpre, hidden), g.up.data, hidden, rows,
                  !g.up.fresh);
    device.launch(s, rows, MatMul{}, rows_of(dpre, hidden), columns_of(w.up.data, hidden), dh, width, hidden, true);
  }
};

/// Reads out through the embedding's table: y = h * table^T.
template <class D>
struct Head {
  D device;
  std::int64_t rows, inputs, width;
  bool sets_gradients = false;
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
  template <class W, class A>
  void forward(typename D::Stream& s, Params<W> const& w, A const* h, A* y) const {
    device.launch(s, rows, MatMul{}, rows_of(h, width), columns_of(w.table.data, width), y, inputs, width, false);
    device.launch(s, rows, AddToRow{}, constant(w.gain.data), y, inputs);
  }
  template <class W, class G, class A>
  void backward(typename D::Stream& s, Params<W> const& w, Params<G> const& g, A const* h, A const* dy, A* dh) const {
    device.launch(s, inputs, MatMul{}, columns_of(dy, inputs), rows_of(h, width), g.table.data, width, rows,
                  !g.table.fresh);
    device.launch(s, std::int64_t{1}, ColumnSum{}, dy, g.gain.data, rows, inputs, !g.gain.fresh);
    device.launch(s, rows, MatMul{}, rows_of(dy, inputs), rows_of(w.table.data, width), dh, width, inputs, false);
  }
};

/// Which modules begin the sums of their gradients themselves.
enum class Setting { none, every, ends, even_layers };

struct Shape {
  std::int64_t inputs = 11;
  std::int64_t width = 13;
  std::vector<std::int64_t> hidden = std::vector<std::int64_t>(4, 29);  ///< one block each
  bool tied = true;               ///< embedding and head share the root unit; false: blocks alone
  std::int64_t global_rows = 12;  ///< rows of a micro-step over all ranks
  Setting setting = Setting::none;
  std::optional<fsdp::ShardingStrategy> root{};                     ///< of the root unit; not set: the engine's
  std::vector<std::optional<fsdp::ShardingStrategy>> strategies{};  ///< of the blocks, as far as there are some
};

/// The network over one engine, with its activations, which have the parameters' type.
template <class E>
class Network {
 public:
  using D = typename E::Device;
  using A = typename E::Param;

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
      root = engine.add_unit("root", shape_.root.value_or(engine.strategy()));
      embed_.emplace(
          engine.shard(Embed<D>{device, rows_, shape_.inputs, shape_.width, sets(Setting::ends)}, "ends", root));
    }
    for (std::size_t i = 0; i < shape_.hidden.size(); ++i) {
      auto const hidden = shape_.hidden[i];
      pre_.push_back(array(rows_ * hidden)), act_.push_back(array(rows_ * hidden));
      bool const setting = sets(i % 2 == 0 ? Setting::even_layers : Setting::every);
      auto const strategy = i < shape_.strategies.size() ? shape_.strategies[i] : std::nullopt;
      layers_.push_back(engine.shard(Layer<D, A>{device, rows_, shape_.width, hidden, setting},
                                     "layers." + std::to_string(i), strategy.value_or(engine.strategy())));
    }
    if (shape_.tied)
      head_.emplace(
          engine.shard(Head<D>{device, rows_, shape_.inputs, shape_.width, sets(Setting::ends)}, "ends", root));
  }
  ~Network() { engine_->drain(); }

  /// Forward alone, on the data of micro-step `step`.
  void forward(std::int64_t step) {
    auto& s = engine_->compute();
    auto const& device = engine_->device();
    std::int64_t const ends = shape_.tied ? shape_.inputs : shape_.width;
    auto const salt = static_cast<std::uint32_t>(step) * 2654435761u;
    auto const first = rows_ * engine_->rank();
    device.launch(s, rows_, Data{}, a(x_), ends, salt, first);
    device.launch(s, rows_, Data{}, a(target_), ends, salt + 77u, first);
    if (embed_) {
      embed_->forward(constant(a(x_)), a(h_[0]));
    } else {
      device.copy_async(s, a(h_[0]), a(x_), h_[0].bytes());
    }
    for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i].forward(constant(a(h_[i])), a(h_[i + 1]), saved(i));
    if (head_) {
      head_->forward(constant(a(h_.back())), a(y_));
    } else {
      device.copy_async(s, a(y_), a(h_.back()), y_.bytes());
    }
  }

  /// Gradients of the mean over rows, times `scale`, times *loss_scale (in device memory; none: 1).
  void backward(float scale = 1.0f, float const* loss_scale = nullptr) {
    auto& s = engine_->compute();
    auto const& device = engine_->device();
    std::int64_t const ends = shape_.tied ? shape_.inputs : shape_.width;
    device.launch(s, std::int64_t{1}, LossGradient{}, constant(a(y_)), constant(a(target_)), a(dy_),
                  loss_.template as<double>(), rows_ * ends, scale / static_cast<float>(rows_ * ends), loss_scale);
    if (head_) {
      head_->backward(constant(a(h_.back())), constant(a(dy_)), a(dh_));
    } else {
      device.copy_async(s, a(dh_), a(dy_), dh_.bytes());
    }
    for (std::size_t i = layers_.size(); i-- > 0;)
      layers_[i].backward(constant(a(h_[i])), a(dh_), saved(i), a(dact_), a(dpre_));
    if (embed_) embed_->backward(constant(a(x_)), constant(a(dh_)));
  }

  void step(std::int64_t micro_step, float scale = 1.0f, float const* loss_scale = nullptr) {
    forward(micro_step);
    backward(scale, loss_scale);
  }

  /// Sum of this rank's losses so far.
  double loss() {
    double value = 0.0;
    engine_->device().copy_async(engine_->compute(), &value, loss_.data(), sizeof value);
    engine_->device().synchronize(engine_->compute());
    return value;
  }

 private:
  bool sets(Setting some) const { return shape_.setting == Setting::every || shape_.setting == some; }
  using Array = fsdp::AccountedMemory<D const>;
  Array array(std::int64_t elements) {
    return {engine_->device(), engine_->account(), fsdp::MemoryTag::activations,
            static_cast<std::size_t>(elements) * sizeof(A)};
  }
  static A* a(Array const& array) { return array.template as<A>(); }
  typename Layer<D, A>::Saved saved(std::size_t i) const { return {a(pre_[i]), a(act_[i])}; }

  E* engine_;
  Shape shape_;
  std::int64_t rows_;
  Array x_, target_, y_, dy_, dact_, dpre_, dh_, loss_;
  std::vector<Array> h_, pre_, act_;
  std::optional<fsdp::ShardedModule<Embed<D>, E>> embed_;
  std::vector<fsdp::ShardedModule<Layer<D, A>, E>> layers_;
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
