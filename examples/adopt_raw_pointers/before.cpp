// SPDX-License-Identifier: Apache-2.0
// A trainer on raw pointers in one process, which holds all parameters.
#include <cstdio>
#include <vector>

#include "kernels.hpp"

void adamw(float* w, float* g, float* m, float* v, std::int64_t n, int step, float weight_decay) {
  float const m_scale = 1.0f / (1.0f - std::pow(beta1, static_cast<float>(step)));
  float const v_scale = 1.0f / (1.0f - std::pow(beta2, static_cast<float>(step)));
  for (std::int64_t i = 0; i < n; ++i) {
    m[i] = beta1 * m[i] + (1.0f - beta1) * g[i];
    v[i] = beta2 * v[i] + (1.0f - beta2) * g[i] * g[i];
    w[i] -= rate * (m[i] * m_scale / (std::sqrt(v[i] * v_scale) + eps) + weight_decay * w[i]);
    g[i] = 0.0f;
  }
}

void train() {
  std::int64_t const rows = batch, first_row = 0;
  std::int64_t const size = width * width + width;
  std::vector<float> weights(depth * size), gradients(depth * size), m(depth * size), v(depth * size);
  Layer w[depth], g[depth];
  for (std::int64_t l = 0; l < depth; ++l) {
    auto* const own_w = weights.data() + l * size;
    auto* const own_g = gradients.data() + l * size;
    w[l] = {own_w, own_w + width * width};
    g[l] = {own_g, own_g + width * width};
    for (std::int64_t i = 0; i < width * width; ++i) w[l].weight[i] = 0.3f * noise(l, i);
  }

  std::vector<std::vector<float>> x(depth + 1, std::vector<float>(static_cast<std::size_t>(rows * width)));
  auto target = x[0], d = x[0];
  for (std::int64_t i = 0; i < rows * width; ++i) {
    x[0][static_cast<std::size_t>(i)] = noise(100, first_row * width + i);
    target[static_cast<std::size_t>(i)] = std::sin(3.0f * noise(100, first_row * width + i));
  }

  for (int step = 1; step <= 200; ++step) {
    for (std::size_t l = 0; l < depth; ++l) {
      forward(w[l], x[l].data(), x[l + 1].data(), rows);
    }
    double loss = compare(x[depth].data(), target.data(), d.data(), rows * width);
    for (std::size_t l = depth; l-- > 0;) {
      backward(w[l], g[l], x[l].data(), x[l + 1].data(), d.data(), rows);
    }
    for (std::int64_t l = 0; l < depth; ++l) {
      auto *const own_m = m.data() + l * size, *const own_v = v.data() + l * size;
      adamw(w[l].weight, g[l].weight, own_m, own_v, width * width, step, decay);
      adamw(w[l].bias, g[l].bias, own_m + width * width, own_v + width * width, width, step, 0.0f);
    }
    if (step % 50 == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
}

int main() { train(); }
