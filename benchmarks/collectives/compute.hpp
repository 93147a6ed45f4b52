// SPDX-License-Identifier: Apache-2.0
// Matrix products that run during communication.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "fsdp/concepts.hpp"
#include "fsdp/host.hpp"
#include "settings.hpp"
#include "transformer/math/gemm.hpp"
#if defined(__CUDACC__)
#include "transformer/math/gemm_cuda.hpp"
#else
#include "transformer/math/gemm_host.hpp"
#endif

namespace bench {

/// Description of the computation.
template <class D>
std::string describe_compute(Settings const& settings) {
#if defined(__CUDACC__)
  char const* const library = "cuBLASLt";
#elif defined(TRANSFORMER_PLAIN_GEMM)
  char const* const library = "plain loops (no OpenBLAS)";
#else
  char const* const library = "OpenBLAS, one thread a rank";
#endif
  return fmt::format("fp32 products ({} x {}) ({} x {}) by {}", settings.rows, settings.width, settings.width,
                     settings.width, library);
}

/// Zeroed device memory of one rank.
template <class D>
class Scratch {
 public:
  Scratch(D const& device, typename D::Stream& stream, std::size_t floats)
      : device_(device), bytes_(floats * sizeof(float)), data_(device.allocate(bytes_)) {
    device.zero_async(stream, data_, bytes_);
    device.synchronize(stream);
  }
  Scratch(Scratch const&) = delete;
  Scratch& operator=(Scratch const&) = delete;
  ~Scratch() { device_.deallocate(data_, bytes_); }
  float* data() const { return static_cast<float*>(data_); }

 private:
  D device_;
  std::size_t bytes_;
  void* data_;
};

/// The products of one unit, on one stream. All read the same activations: only their cost matters.
template <class D>
class Products {
 public:
  using Stream = typename D::Stream;

  Products(D const& device, Stream& stream, std::int64_t rows, std::int64_t width)
      : gemm_(device),
        rows_(rows),
        width_(width),
        activations_(device, stream, static_cast<std::size_t>(3 * rows * width)),
        weight_(device, stream, static_cast<std::size_t>(width * width)) {}

  std::int64_t matrix() const { return width_ * width_; }
  float const* weight() const { return weight_.data(); }

  /// y = x W^T. @param weight (width, width)
  void forward(Stream& stream, float const* weight) {
    transformer::linear(gemm_, stream, rows_, width_, width_, static_cast<float const*>(x()), weight, y(), width_);
  }
  /// dW += dy^T x, dx = dy W.
  void backward(Stream& stream, float const* weight, float* gradient) {
    auto const* const dy = static_cast<float const*>(y());
    transformer::linear_weight_gradient(gemm_, stream, rows_, width_, width_, static_cast<float const*>(x()), dy,
                                        width_, gradient);
    transformer::linear_input_gradient(gemm_, stream, rows_, width_, width_, dy, width_, weight, dx());
  }

 private:
  float* x() const { return activations_.data(); }
  float* y() const { return activations_.data() + rows_ * width_; }
  float* dx() const { return activations_.data() + 2 * rows_ * width_; }

  transformer::Gemm<D> gemm_;
  std::int64_t rows_, width_;
  Scratch<D> activations_;  // (3, rows, width)
  Scratch<D> weight_;       // (width, width)
};

}  // namespace bench
