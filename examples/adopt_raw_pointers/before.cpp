// SPDX-License-Identifier: Apache-2.0
// A trainer that owns its pointers and its kernels: one process, all of the parameters.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr std::int64_t width = 16, depth = 4, batch = 48;
constexpr float rate = 3e-3f, beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, decay = 0.01f;

struct Layer {
  float* weight;  // (width, width)
  float* bias;    // (width)
};

// Both the inputs and the initial weights are a function of where they stand.
float noise(std::int64_t seed, std::int64_t i) {
  auto bits = static_cast<std::uint32_t>(seed * 7919 + i) * 2654435761u;
  bits = (bits ^ (bits >> 15)) * 2246822519u;
  return static_cast<float>((bits ^ (bits >> 13)) >> 8) * 0x1p-23f - 1.0f;
}

// y = x + tanh(x weight^T + bias)
void forward(Layer const& w, float const* x, float* y, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t j = 0; j < width; ++j) {
      float sum = w.bias[j];
      for (std::int64_t k = 0; k < width; ++k) sum += x[r * width + k] * w.weight[j * width + k];
      y[r * width + j] = x[r * width + j] + std::tanh(sum);
    }
}

// g += gradients; d goes from the gradient of y to that of x
void backward(Layer const& w, Layer const& g, float const* x, float const* y, float* d, std::int64_t rows) {
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
double compare(float const* y, float const* target, float* d, std::int64_t elements) {
  double loss = 0.0;
  for (std::int64_t i = 0; i < elements; ++i) {
    float const difference = y[i] - target[i];
    loss += static_cast<double>(difference) * static_cast<double>(difference) / static_cast<double>(elements);
    d[i] = 2.0f * difference / static_cast<float>(elements);
  }
  return loss;
}

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
    w[l] = {&weights[static_cast<std::size_t>(l * size)], &weights[static_cast<std::size_t>(l * size + width * width)]};
    g[l] = {&gradients[static_cast<std::size_t>(l * size)], &gradients[static_cast<std::size_t>(l * size + width * width)]};
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
    for (std::size_t l = 0; l < depth; ++l) {
      auto const at = l * static_cast<std::size_t>(size);
      adamw(w[l].weight, g[l].weight, &m[at], &v[at], width * width, step, decay);
      adamw(w[l].bias, g[l].bias, &m[at + width * width], &v[at + width * width], width, step, 0.0f);
    }
    if (step % 20 == 0) std::printf("step %d: loss %.5f\n", step, loss);
  }
}

int main() { train(); }
