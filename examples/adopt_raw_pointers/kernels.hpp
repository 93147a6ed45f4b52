// SPDX-License-Identifier: Apache-2.0
// Kernels of a trainer on raw pointers. They know nothing of ranks.
#pragma once
#include <cmath>
#include <cstdint>

constexpr std::int64_t width = 16, depth = 4, batch = 48;
constexpr float rate = 3e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0.01f;

struct Layer {
  float* weight;  // (width, width)
  float* bias;    // (width)
};

// Both the inputs and the initial weights are a function of where they stand.
inline float noise(std::int64_t seed, std::int64_t i) {
  auto bits = static_cast<std::uint32_t>(seed * 7919 + i) * 2654435761u;
  bits = (bits ^ (bits >> 15)) * 2246822519u;
  return static_cast<float>((bits ^ (bits >> 13)) >> 8) * 0x1p-23f - 1.0f;
}

// y = x + tanh(x weight^T + bias)
inline void forward(Layer const& w, float const* x, float* y, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < width; ++j) {
      float sum = w.bias[j];
      for (std::int64_t k = 0; k < width; ++k) sum += x[r * width + k] * w.weight[j * width + k];
      y[r * width + j] = x[r * width + j] + std::tanh(sum);
    }
}

// g += gradients; d goes from the gradient of y to that of x
inline void backward(Layer const& w, Layer const& g, float const* x, float const* y, float* d, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float before[width];
    for (std::int64_t j = 0; j < width; ++j) {
      float const t = y[r * width + j] - x[r * width + j];
      before[j] = d[r * width + j] * (1.0f - t * t);
      g.bias[j] += before[j];
      for (std::int64_t k = 0; k < width; ++k) g.weight[j * width + k] += before[j] * x[r * width + k];
    }
    for (std::int64_t j = 0; j < width; ++j)
      for (std::int64_t k = 0; k < width; ++k) d[r * width + k] += before[j] * w.weight[j * width + k];
  }
}

// Mean square of y - target, and its gradient
inline double compare(float const* y, float const* target, float* d, std::int64_t elements) {
  double loss = 0.0;
  for (std::int64_t i = 0; i < elements; ++i) {
    float const difference = y[i] - target[i];
    loss += static_cast<double>(difference) * static_cast<double>(difference) / static_cast<double>(elements);
    d[i] = 2.0f * difference / static_cast<float>(elements);
  }
  return loss;
}
