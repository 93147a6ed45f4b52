// SPDX-License-Identifier: Apache-2.0
// The task: from uniform x in [-1, 1]^width, predict sin(2 x[i] + x[i + 1]); and the memory that one rank trains in.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "fsdp/fsdp.hpp"

namespace mlp {

/// dy = 2 (y - target) / elements, loss = mean square; one block.
struct SquaredError {
  template <class Block>
  FSDP_HD void operator()(Block const& block, std::int64_t, float const* y, float const* target, float* dy, float* loss,
                          std::int64_t elements) const {
    float const scale = 1.0f / static_cast<float>(elements);
    if (block.thread() != 0) return;
    *loss = 0.0f;
    for (std::int64_t i = 0; i < elements; ++i) {
      float const difference = y[i] - target[i];
      dy[i] = 2.0f * difference * scale;
      *loss += difference * difference * scale;
    }
  }
};

/// A rank's fixed batch, its activations and their gradients, on the engine's device.
template <class E>
class Regression {
 public:
  Regression(E& engine, std::int64_t rows, std::int64_t width, std::size_t depth)
      : engine_(&engine), elements_(rows * width), batch_(2 * static_cast<std::size_t>(elements_)) {
    for (std::size_t layer = 0; layer <= depth; ++layer) x_.push_back(array(elements_));
    for (std::size_t layer = 0; layer < depth; ++layer) hidden_.push_back(array(4 * elements_));
    target_ = array(elements_), dy_ = array(elements_), dhidden_ = array(4 * elements_), loss_ = array(1);

    auto state = 1u + static_cast<std::uint32_t>(engine.rank());  // each rank has samples of its own
    for (std::int64_t i = 0; i < elements_; ++i) {
      state = state * 1664525u + 1013904223u;
      input(i) = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t i = 0; i < width; ++i)
        input(elements_ + row * width + i) = std::sin(2.0f * input(row * width + i) + input(row * width + (i + 1) % width));
    auto const bytes = static_cast<std::size_t>(elements_) * sizeof(float);
    engine.device().copy_async(engine.compute(), x(0), &input(0), bytes);
    engine.device().copy_async(engine.compute(), target_.data(), &input(elements_), bytes);
  }
  ~Regression() { engine_->drain(); }
  Regression(Regression&&) = delete;

  float* x(std::size_t layer) { return x_[layer].template as<float>(); }
  float* hidden(std::size_t layer) { return hidden_[layer].template as<float>(); }
  float* dy() { return dy_.template as<float>(); }
  float* dhidden() { return dhidden_.template as<float>(); }

  /// Enqueues the loss of the last layer's output, and its gradient into dy.
  void compare() {
    engine_->device().launch(engine_->compute(), std::int64_t{1}, SquaredError{}, static_cast<float const*>(x(x_.size() - 1)),
                             static_cast<float const*>(target_.template as<float>()), dy(), loss_.template as<float>(), elements_);
  }
  /// The loss, averaged over ranks. @note Collective: yes; waits for compute.
  double loss() {
    float value = 0.0f;
    engine_->device().copy_async(engine_->compute(), &value, loss_.data(), sizeof value);
    engine_->device().synchronize(engine_->compute());
    return engine_->mean_over_ranks({static_cast<double>(value)})[0];
  }
  void print_loss(int step) {
    auto const mean = loss();
    if (engine_->rank() == 0) std::printf("step %4d: loss %.6f\n", step, mean);
  }

 private:
  using Array = fsdp::AccountedMemory<typename E::Device const>;
  Array array(std::int64_t elements) {
    return {engine_->device(), engine_->account(), fsdp::MemoryTag::activations,
            static_cast<std::size_t>(elements) * sizeof(float)};
  }
  float& input(std::int64_t i) { return batch_[static_cast<std::size_t>(i)]; }

  E* engine_;
  std::int64_t elements_;
  std::vector<float> batch_;  ///< inputs, then targets
  std::vector<Array> x_, hidden_;
  Array target_, dy_, dhidden_, loss_;
};

}  // namespace mlp
