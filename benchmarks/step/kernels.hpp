// SPDX-License-Identifier: Apache-2.0
// Measures single kernels: memory-bound ones against copy bandwidth, and attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "examples/nanogpt/activations.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "report.hpp"
#include "roof.hpp"
#include "settings.hpp"
#include "step.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/kernels/row_kernels.hpp"

namespace bench {

/// The kernels of a step, called by the launchers that the model calls. The arrays of a memory-bound one hold
/// Roof::working_set together, in rows of the model's width; its bytes are those of [Note: What a class needs].
/// @tparam T  of activations
template <class D, class T>
class Kernels {
 public:
  using Stream = typename D::Stream;

  Kernels(D const& device, Stream& stream, StepSettings const& settings, Roof const& roof)
      : device_(device),
        stream_(stream),
        settings_(settings),
        config_(gpt_config(settings)),
        working_set_(static_cast<std::int64_t>(roof.working_set)),
        memory_(device, roof.working_set + roof.working_set / 2 + (std::size_t{16} << 20)),
        time_(device, stream, roof.cache, settings.repeats) {}

  std::vector<KernelFigures> run() {
    layer_norm();
    elementwise();
    classifier();
    embedding();
    flat();
    attention();
    return std::move(rows_);
  }

 private:
  static constexpr std::int64_t size = sizeof(T);

  /// The next array of a case. @param deviation  of the values that fill it; 0: it stays as it is
  template <class E>
  E* take(std::int64_t count, float deviation = 1.0f) {
    auto const begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(E) + 255) / 256 * 256;
    FSDP_EXPECTS(used_ <= memory_.bytes(), "a working set of {} bytes is too small", working_set_);
    E* const array = reinterpret_cast<E*>(memory_.template as<std::byte>() + begin);
    if constexpr (!std::is_integral_v<E>) {
      if (deviation > 0)
        fsdp::kernels::initialize(device_, stream_, array, count, fsdp::init::normal(deviation), 1, ++seed_, 0);
    }
    return array;
  }
  /// Rows of the model's width of which `arrays` fill the working set.
  std::int64_t rows_of(std::int64_t arrays) const {
    return std::max<std::int64_t>(1, working_set_ / (arrays * config_.n_embd * size));
  }
  template <class Call>
  void report(std::string name, std::int64_t bytes, Call&& call, double flop = 0) {
    rows_.push_back({std::move(name), time_(call), static_cast<double>(bytes), flop});
    used_ = 0;
  }
  /// Random ids in [0, bound), on the device. @return how many are different
  std::int64_t draw(std::int32_t* to, std::int64_t count, std::int64_t bound) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>(fsdp::rounding::mix(i + 1) % static_cast<std::uint64_t>(bound));
    device_.copy_async(stream_, to, ids.data(), ids.size() * sizeof(std::int32_t));
    device_.synchronize(stream_);
    return static_cast<std::int64_t>(std::set<std::int32_t>(ids.begin(), ids.end()).size());
  }

  void layer_norm() {
    using Real = transformer::Compute<T>;
    auto const width = config_.n_embd;
    T* const none = nullptr;
    {
      auto const rows = rows_of(2);
      T *const x = take<T>(rows * width), *const y = take<T>(rows * width, 0), *const weight = take<T>(width);
      Real *const mean = take<Real>(rows, 0), *const scale = take<Real>(rows, 0);
      report("LayerNorm forward", rows * width * size * 2 + rows * 8, [=, this] {
        transformer::layer_norm_forward(device_, stream_, static_cast<T const*>(x), static_cast<T const*>(weight),
                                        static_cast<T const*>(none), y, mean, scale, rows, width);
      });
    }
    auto const rows = rows_of(3);
    T *const dy = take<T>(rows * width), *const x = take<T>(rows * width), *const dx = take<T>(rows * width);
    T* const weight = take<T>(width);
    float* const weight_gradient = take<float>(width);
    Real *const mean = take<Real>(rows), *const scale = take<Real>(rows);
    Real* const partials = take<Real>(transformer::layer_norm_partials(rows, width), 0);
    report("LayerNorm backward, residual", rows * width * size * 4 + rows * 8, [=, this] {
      transformer::layer_norm_backward(device_, stream_, static_cast<T const*>(dy), static_cast<T const*>(x),
                                       static_cast<T const*>(weight), static_cast<Real const*>(mean),
                                       static_cast<Real const*>(scale), static_cast<T const*>(dx), dx, weight_gradient,
                                       static_cast<float*>(nullptr), rows, width, partials);
    });
  }

  void elementwise() {
    {
      auto const n = working_set_ / (2 * size);
      T *const x = take<T>(n), *const y = take<T>(n, 0);
      report("GELU forward", 2 * n * size,
             [=, this] { transformer::gelu_forward(device_, stream_, static_cast<T const*>(x), y, n); });
    }
    {
      auto const n = working_set_ / (2 * size);
      T *const x = take<T>(n), *const gradient = take<T>(n);
      report("GELU backward, in place", 4 * n * size,
             [=, this] { transformer::gelu_backward(device_, stream_, x, gradient, n); });
    }
    auto const n = working_set_ / (3 * size);
    T *const a = take<T>(n), *const b = take<T>(n), *const out = take<T>(n, 0);
    report("residual addition", 3 * n * size, [=, this] {
      transformer::add(device_, stream_, static_cast<T const*>(a), static_cast<T const*>(b), out, n);
    });
  }

  void classifier() {
    using Real = transformer::Compute<T>;
    auto const vocabulary = config_.vocab_size, padded = config_.padded_vocab();
    auto const rows = std::max<std::int64_t>(1, working_set_ / (padded * size));
    T* const logits = take<T>(rows * padded);
    Real* const losses = take<Real>(rows, 0);
    auto* const targets = take<std::int32_t>(rows);
    draw(targets, rows, vocabulary);
    report("classifier, loss and gradient", 2 * rows * padded * size, [=, this] {
      transformer::cross_entropy_backward(device_, stream_, logits, static_cast<std::int32_t const*>(targets), losses,
                                          rows, vocabulary, padded, 1.0);
    });
  }

  void embedding() {
    auto const width = config_.n_embd;
    auto const rows_all = std::max<std::int64_t>(1, working_set_ * 3 / 4 / (width * size));
    auto const length = std::min(rows_all, config_.block_size), batch = rows_all / length, rows = batch * length;
    auto const table = [&](std::int64_t element) {
      return std::clamp<std::int64_t>(working_set_ / 4 / (width * element), 1, config_.vocab_size);
    };
    {
      auto const vocabulary = table(size);
      T *const out = take<T>(rows * width, 0), *const tokens = take<T>(vocabulary * width);
      T* const positions = take<T>(length * width);
      auto* const ids = take<std::int32_t>(rows);
      auto const distinct = draw(ids, rows, vocabulary);
      report("embedding forward", (rows + distinct + length) * width * size + rows * 4, [=, this] {
        transformer::embedding_forward(device_, stream_, static_cast<std::int32_t const*>(ids),
                                       static_cast<T const*>(tokens), static_cast<T const*>(positions), out, batch,
                                       length, width);
      });
    }
    auto const vocabulary = table(sizeof(float));
    T* const dy = take<T>(rows * width);
    float *const tokens = take<float>(vocabulary * width), *const positions = take<float>(length * width);
    auto* const ids = take<std::int32_t>(rows);
    auto const distinct = draw(ids, rows, vocabulary);
    report("embedding backward", rows * width * size + (distinct + length) * width * 8 + rows * 4, [=, this] {
      transformer::embedding_backward(device_, stream_, static_cast<std::int32_t const*>(ids),
                                      static_cast<T const*>(dy), tokens, positions, batch, length, width);
    });
  }

  /// The library's own, over flat arrays.
  void flat() {
    {
      auto const n = std::max<std::int64_t>(1, working_set_ / 16);
      std::vector<fsdp::OptimizerChunk> chunks;
      auto const chunk = fsdp::kernels::chunk_elements;
      for (std::int64_t begin = 0; begin < n; begin += chunk)
        chunks.push_back({begin, static_cast<std::int32_t>(std::min(chunk, n - begin)), 0.1f});
      auto const count = static_cast<std::int64_t>(chunks.size());
      fsdp::OptimizerStep const now{
          .taken = 7, .factor = 1.0f, .learning_rate = 1e-6f, .correction1 = 0.5f, .correction2 = 0.3f};
      float *const p = take<float>(n), *const g = take<float>(n), *const m = take<float>(n, 0.1f);
      float* const v = take<float>(n, 0);
      fsdp::kernels::initialize(device_, stream_, v, n, fsdp::init::uniform(0.1f, 0.2f), 1, ++seed_, 0);
      auto* const list = reinterpret_cast<fsdp::OptimizerChunk*>(
          take<std::int64_t>(count * static_cast<std::int64_t>(sizeof(fsdp::OptimizerChunk) / sizeof(std::int64_t))));
      auto* const step = reinterpret_cast<fsdp::OptimizerStep*>(take<std::int64_t>(8));
      device_.copy_async(stream_, list, chunks.data(), chunks.size() * sizeof chunks[0]);
      device_.copy_async(stream_, step, &now, sizeof now);
      device_.synchronize(stream_);
      report("AdamW", 28 * n, [=, this] {
        fsdp::kernels::adamw(device_, stream_, static_cast<fsdp::OptimizerChunk const*>(list), count,
                             static_cast<fsdp::OptimizerStep const*>(step), fsdp::AdamWScalars{}, p,
                             static_cast<float const*>(g), m, v);
      });
    }
    {
      auto const n = working_set_ / 4;
      float* const g = take<float>(n);
      double* const partials = take<double>(fsdp::kernels::norm_partial_count(n), 0);
      report("gradient norm, partial sums", 4 * n, [=, this] {
        fsdp::kernels::norm_partials(device_, stream_, static_cast<float const*>(g), n, fsdp::NormKind::l2, partials);
      });
    }
    {
      auto const n = working_set_ / 6;
      float* const wide = take<float>(n);
      auto* const narrow = take<fsdp::bf16>(n, 0);
      report("cast fp32 to bf16", 6 * n,
             [=, this] { fsdp::kernels::cast(device_, stream_, static_cast<float const*>(wide), narrow, n); });
    }
    {
      auto const n = working_set_ / 6;
      auto* const narrow = take<fsdp::bf16>(n);
      float* const wide = take<float>(n, 0);
      report("cast bf16 to fp32", 6 * n,
             [=, this] { fsdp::kernels::cast(device_, stream_, static_cast<fsdp::bf16 const*>(narrow), wide, n); });
    }
    auto const n = working_set_ / 8;
    float *const sum = take<float>(n), *const shard = take<float>(n);
    report("accumulation of gradients", 12 * n, [=, this] {
      fsdp::kernels::accumulate(device_, stream_, static_cast<float const*>(sum), shard, n, 0.5f, false);
    });
  }

  /// One layer's, at the model's batch and heads.
  void attention() {
    auto config = config_;
    config.n_layer = 1;
    nanogpt::ActivationPlan plan;
    plan.batch = settings_.batch;
    plan.sequence = settings_.block;
    plan.attention_elements = nanogpt::decoder_options<D>().attention_elements;
    fsdp::MemoryAccount account;
    transformer::Gemm<D> gemm(device_);
    nanogpt::Activations<D, T> const activations(device_, account, config, plan);
    transformer::AttentionContext<D, T> const context{device_, &gemm, plan.attention(config.attention()),
                                                      activations.workspace().attention};
    transformer::CausalAttention<D, T> const layer(context);
    transformer::Pass pass;
    pass.batch = plan.batch;
    pass.length = pass.capacity = plan.sequence;
    auto const& block = activations.block(0);
    auto const& work = activations.workspace();
    auto const elements = plan.rows() * config.n_embd;
    auto const fill = [&](T* array, std::int64_t count) {
      fsdp::kernels::initialize(device_, stream_, array, count, fsdp::init::normal(1.0f), 1, ++seed_, 0);
    };
    fill(block.qkv, 3 * elements);
    fill(work.narrow, elements);
    auto const pairs = 0.5 * static_cast<double>(plan.sequence * (plan.sequence + 1) * plan.batch);
    double const product = 2 * pairs * static_cast<double>(config.n_embd);
    report(
        "attention forward", 4 * elements * size,
        [&] { layer.forward(stream_, pass, pass.mask, block.qkv, block.attention_output, block.log_sums); },
        2 * product);
    report(
        "attention backward", 8 * elements * size,
        [&] {
          layer.backward(stream_, pass, pass.mask, block.qkv, block.attention_output, block.log_sums, work.narrow,
                         work.wide);
        },
        5 * product);
    device_.synchronize(stream_);
  }

  D device_;
  Stream& stream_;
  StepSettings const& settings_;
  nanogpt::GptConfig config_;
  std::int64_t working_set_;
  Scratch<D> memory_;
  ColdTimer<D> time_;
  std::size_t used_ = 0;
  std::uint64_t seed_ = 0;
  std::vector<KernelFigures> rows_;
};

/// @tparam T  of activations
template <class T, class D>
void run_kernels(D const& device, std::string const& device_name, std::size_t cache, StepSettings const& settings) {
  gpt_config(settings).validate();
  auto stream = device.make_stream("kernels", fsdp::StreamPriority::normal);
  auto const roof = measure_roof<T>(device, stream, settings, cache, device_name);
  Kernels<D, T> kernels(device, stream, settings, roof);
  report_kernels(settings, roof, device_name, kernels.run());
}

}  // namespace bench
