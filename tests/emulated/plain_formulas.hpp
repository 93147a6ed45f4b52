// SPDX-License-Identifier: Apache-2.0
// The formulas of fused kernels in a type T throughout: one loop after another, sums from left to right.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace plain {

template <class T>
using Lists = std::vector<std::vector<T>>;

/// y, mean and 1 / standard deviation.
template <class T>
Lists<T> layer_norm(std::vector<T> const& x, std::vector<T> const& weight, std::vector<T> const& bias) {
  std::size_t const columns = weight.size();
  Lists<T> out(3);
  for (std::size_t r = 0; r < x.size(); r += columns) {
    T mean = 0, variance = 0;
    for (std::size_t c = 0; c < columns; ++c) mean += x[r + c];
    mean /= static_cast<T>(columns);
    for (std::size_t c = 0; c < columns; ++c) variance += (x[r + c] - mean) * (x[r + c] - mean);
    T const scale = T(1) / std::sqrt(variance / static_cast<T>(columns) + T(1e-5));
    for (std::size_t c = 0; c < columns; ++c) out[0].push_back((x[r + c] - mean) * scale * weight[c] + bias[c]);
    out[1].push_back(mean);
    out[2].push_back(scale);
  }
  return out;
}

/// Gradients of inputs, weight and bias.
template <class T>
Lists<T> layer_norm_gradient(std::vector<T> const& dy, std::vector<T> const& x, std::vector<T> const& weight,
                             std::vector<T> const& mean, std::vector<T> const& scale, std::vector<T> const& past) {
  std::size_t const columns = weight.size();
  Lists<T> out{{}, std::vector<T>(columns), std::vector<T>(columns)};
  for (std::size_t r = 0; r < mean.size(); ++r) {
    T a = 0, b = 0;
    auto const normal = [&](std::size_t c) { return (x[r * columns + c] - mean[r]) * scale[r]; };
    auto const up = [&](std::size_t c) { return dy[r * columns + c]; };
    for (std::size_t c = 0; c < columns; ++c) {
      a += up(c) * weight[c];
      b += up(c) * weight[c] * normal(c);
      out[1][c] += up(c) * normal(c);
      out[2][c] += up(c);
    }
    a /= static_cast<T>(columns);
    b /= static_cast<T>(columns);
    for (std::size_t c = 0; c < columns; ++c) {
      out[0].push_back(past[r * columns + c] + scale[r] * (up(c) * weight[c] - a - normal(c) * b));
    }
  }
  return out;
}

/// Rows of softmax(scale * x) over the first columns: all of them, or what a causal row of a panel of `rows` sees.
template <class T>
std::vector<T> softmax(std::vector<T> const& x, std::size_t columns, T scale, std::size_t rows = 1) {
  std::vector<T> p(x.size());
  for (std::size_t r = 0; r < x.size() / columns; ++r) {
    std::size_t const length = columns - rows + r % rows + 1;
    T largest = x[r * columns], sum = 0;
    for (std::size_t c = 0; c < length; ++c) largest = std::fmax(largest, x[r * columns + c]);
    for (std::size_t c = 0; c < length; ++c) {
      p[r * columns + c] = std::exp(scale * (x[r * columns + c] - largest));
      sum += p[r * columns + c];
    }
    for (std::size_t c = 0; c < length; ++c) p[r * columns + c] /= sum;
  }
  return p;
}

/// Gradient of scores, from probabilities (0 where a row does not see) and the gradient of these.
template <class T>
std::vector<T> softmax_gradient(std::vector<T> const& p, std::vector<T> const& up, std::size_t columns, T scale) {
  std::vector<T> out(p.size());
  for (std::size_t r = 0; r < p.size(); r += columns) {
    T mean = 0;
    for (std::size_t c = r; c < r + columns; ++c) mean += p[c] * up[c];
    for (std::size_t c = r; c < r + columns; ++c) out[c] = p[c] * (up[c] - mean) * scale;
  }
  return out;
}

/// Losses, and the gradient of the logits.
template <class T>
Lists<T> cross_entropy(std::vector<T> const& x, std::size_t columns, std::vector<std::int32_t> const& targets,
                       T scale) {
  Lists<T> out{{}, softmax(x, columns, T(1))};
  for (std::size_t r = 0; r < targets.size(); ++r) {
    auto const target = r * columns + static_cast<std::size_t>(targets[r]);
    out[0].push_back(-std::log(out[1][target]));
    out[1][target] -= T(1);
  }
  for (auto& slope : out[1]) slope *= scale;
  return out;
}

/// x + bias, and gelu of it.
template <class T>
Lists<T> gelu(std::vector<T> x, std::vector<T> const& bias) {
  Lists<T> out(2);
  for (std::size_t i = 0; i < x.size(); ++i) {
    T const v = x[i] + bias[i % bias.size()];
    out[0].push_back(v);
    out[1].push_back(T(0.5) * v * (T(1) + std::erf(v * T(0.70710678118654752))));
  }
  return out;
}

template <class T>
std::vector<T> gelu_gradient(std::vector<T> const& x, std::vector<T> const& dy) {
  std::vector<T> out;
  for (std::size_t i = 0; i < x.size(); ++i) {
    T const cdf = T(0.5) * (T(1) + std::erf(x[i] * T(0.70710678118654752)));
    T const density = T(0.39894228040143268) * std::exp(T(-0.5) * x[i] * x[i]);
    out.push_back(dy[i] * (cdf + x[i] * density));
  }
  return out;
}

template <class T>
std::vector<T> bias_residual(std::vector<T> const& residual, std::vector<T> const& x, std::vector<T> const& bias) {
  std::vector<T> out;
  for (std::size_t i = 0; i < x.size(); ++i) out.push_back(residual[i] + (x[i] + bias[i % bias.size()]));
  return out;
}

/// Sums of the rows of each group: row r belongs to group[r].
template <class T>
std::vector<T> group_sums(std::vector<T> const& rows, std::vector<std::int32_t> const& group, std::size_t groups) {
  std::size_t const columns = rows.size() / group.size();
  std::vector<T> out(groups * columns);
  for (std::size_t i = 0; i < rows.size(); ++i)
    out[static_cast<std::size_t>(group[i / columns]) * columns + i % columns] += rows[i];
  return out;
}

/// Constants of AdamW, as a step of a parameter meets them.
struct Adam {
  float rate, decay, beta1, beta2, epsilon, factor;
  int step;
};

/// Parameters, and both moments.
template <class T>
Lists<T> adamw(Adam const& s, std::vector<T> const& p, std::vector<T> const& g, std::vector<T> const& m,
               std::vector<T> const& v) {
  Lists<T> out(3);
  T const b1 = s.beta1, b2 = s.beta2, rate = s.rate;
  T const correction1 = T(1) - std::pow(b1, static_cast<T>(s.step));
  T const correction2 = T(1) - std::pow(b2, static_cast<T>(s.step));
  for (std::size_t i = 0; i < p.size(); ++i) {
    T const slope = g[i] * static_cast<T>(s.factor);
    T const first = b1 * m[i] + (T(1) - b1) * slope, second = b2 * v[i] + (T(1) - b2) * slope * slope;
    T const root = std::sqrt(second / correction2) + static_cast<T>(s.epsilon);
    out[0].push_back(p[i] - rate * static_cast<T>(s.decay) * p[i] - rate * (first / correction1) / root);
    out[1].push_back(first);
    out[2].push_back(second);
  }
  return out;
}

}  // namespace plain
