// SPDX-License-Identifier: Apache-2.0
// kernels_bench: the single-source kernels on one core, against hand-written AVX-512 and against memory bandwidth.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string_view>
#include <vector>

#include "avx512.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "fsdp/kernels.hpp"
#include "transformer/kernels/row_kernels.hpp"

namespace {

/// Runs kernels at once on the calling thread.
struct LoopDevice {
  static constexpr std::string_view name = "loop";
  struct Stream {};
  struct Event {};
  Stream make_stream(std::string_view, fsdp::StreamPriority) const { return {}; }
  Event make_event() const { return {}; }
  void* allocate(std::size_t bytes) const {
    return bytes == 0 ? nullptr : ::operator new (bytes, std::align_val_t{256});
  }
  void deallocate(void* memory, std::size_t) const noexcept { ::operator delete (memory, std::align_val_t{256}); }
  void copy_async(Stream&, void* to, void const* from, std::size_t bytes) const { std::memcpy(to, from, bytes); }
  void zero_async(Stream&, void* to, std::size_t bytes) const { std::memset(to, 0, bytes); }
  void record(Event&, Stream&) const {}
  void wait(Stream&, Event const&, fsdp::WaitSite) const {}
  void synchronize(Stream&) const {}
  void synchronize(Event const&) const {}
  /// Not inlined: GCC takes what runs once per process for cold, and compiles kernels inside it for size.
  template <class Kernel, class... Args>
  [[gnu::noinline]] void launch(Stream&, std::int64_t blocks, Kernel kernel, Args... args) const {
    for (std::int64_t i = 0; i < blocks; ++i) kernel(fsdp::HostBlock{}, i, args...);
  }
};

LoopDevice const device;
LoopDevice::Stream stream;

/// An aligned array.
class Array {
 public:
  explicit Array(std::int64_t n, float value = 0.0f)
      : bytes_(static_cast<std::size_t>(n) * sizeof(float)), data_(static_cast<float*>(device.allocate(bytes_))) {
    std::fill_n(data_, n, value);
  }
  Array(Array const&) = delete;
  Array& operator=(Array const&) = delete;
  ~Array() { device.deallocate(data_, bytes_); }
  float* data() { return data_; }
  void randomise(float deviation, std::uint64_t seed) {
    fsdp::kernels::initialize(device, stream, data_, static_cast<std::int64_t>(bytes_ / sizeof(float)),
                              fsdp::init::normal(deviation), seed, 1, 0);
  }

 private:
  std::size_t bytes_;
  float* data_;
};

/// Best time of several runs, in seconds: other load on the machine only ever adds.
template <class F>
double best_of(int runs, F f) {
  double best = 1e30;
  for (int run = 0; run < runs; ++run) {
    auto const begin = std::chrono::steady_clock::now();
    f();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

[[maybe_unused]] void print(char const* what, double elements, double ours, double hand) {
  std::printf("%-34s %9.3f ns/element   by hand %9.3f   ratio %5.2f\n", what, 1e9 * ours / elements,
              1e9 * hand / elements, ours / hand);
}

void rows() {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  for (std::int64_t const columns : {384, 768, 1600}) {
    std::int64_t const count = (std::int64_t{1} << 17) / columns;  // 512 KiB in, 512 KiB out: second-level cache
    double const elements = static_cast<double>(count * columns);
    Array x(count * columns), y(count * columns), w(columns), b(columns), mean(count), scale(count);
    x.randomise(1.0f, 1), w.randomise(1.0f, 2), b.randomise(1.0f, 3);
    double const ours = best_of(200, [&] {
      transformer::layer_norm_forward(device, stream, static_cast<float const*>(x.data()),
                                      static_cast<float const*>(w.data()), static_cast<float const*>(b.data()),
                                      y.data(), mean.data(), scale.data(), count, columns);
    });
    double const hand = best_of(200, [&] {
      for (std::int64_t r = 0; r < count; ++r) {
        by_hand::layer_norm(x.data() + r * columns, w.data(), b.data(), y.data() + r * columns, mean.data() + r,
                            scale.data() + r, columns);
      }
    });
    char name[64];
    std::snprintf(name, sizeof name, "layer norm forward, %d columns", static_cast<int>(columns));
    print(name, elements, ours, hand);
  }
  for (std::int64_t const keys : {256, 1024}) {
    std::int64_t const panel = 256, panels = 2;
    double elements = 0;
    for (std::int64_t r = 0; r < panel; ++r) elements += static_cast<double>(panels * (keys - panel + r + 1));
    Array source(panels * panel * keys), x(panels * panel * keys);
    source.randomise(4.0f, 4);
    auto const bytes = static_cast<std::size_t>(panels * panel * keys) * sizeof(float);
    std::memcpy(x.data(), source.data(), bytes);  // afterwards: softmax of softmax costs the same
    double const ours =
        best_of(100, [&] { transformer::causal_softmax(device, stream, x.data(), panels, panel, keys); });
    std::memcpy(x.data(), source.data(), bytes);
    double const hand = best_of(100, [&] {
      for (std::int64_t r = 0; r < panels * panel; ++r) {
        std::int64_t const length = keys - panel + r % panel + 1;
        by_hand::softmax(x.data() + r * keys, length);
        std::fill(x.data() + r * keys + length, x.data() + (r + 1) * keys, 0.0f);
      }
    });
    char name[64];
    std::snprintf(name, sizeof name, "causal softmax, %d keys", static_cast<int>(keys));
    print(name, elements, ours, hand);
  }
  {
    std::int64_t const n = 1 << 17;
    Array x(n), y(n);
    x.randomise(1.5f, 5);
    double const ours = best_of(
        200, [&] { transformer::gelu_forward(device, stream, static_cast<float const*>(x.data()), y.data(), n); });
    double const hand = best_of(200, [&] { by_hand::gelu(x.data(), y.data(), n); });
    print("gelu forward", static_cast<double>(n), ours, hand);
  }
#else
  std::puts("no AVX-512 on this target: the row kernels have no reference");
#endif
}

/// Time per element of kernels without a reference here.
void others() {
  std::int64_t const n = 1 << 17, columns = 768, count = n / columns;
  Array x(n), y(n), z(n), hidden(n), w(columns), g(columns), b(columns), mean(count), scale(count, 1.0f);
  Array partials(transformer::layer_norm_partials(count, columns));
  x.randomise(1.0f, 6), y.randomise(1.0f, 7), w.randomise(1.0f, 8), hidden.randomise(1.0f, 10);
  auto const report = [&](char const* what, double elements, auto f) {
    std::printf("%-34s %9.3f ns/element\n", what, 1e9 * best_of(50, f) / elements);
  };
  double const all = static_cast<double>(n);
  float const* const in = x.data();
  float const* const up = y.data();
  report("layer norm backward", static_cast<double>(count * columns), [&] {
    transformer::layer_norm_backward(device, stream, up, in, static_cast<float const*>(w.data()),
                                     static_cast<float const*>(mean.data()), static_cast<float const*>(scale.data()),
                                     up, z.data(), g.data(), b.data(), count, columns, partials.data());
  });
  report("bias backward", static_cast<double>(count * columns),
         [&] { transformer::bias_backward(device, stream, up, count, columns, g.data(), partials.data()); });
  report("gelu forward", all, [&] { transformer::gelu_forward(device, stream, in, z.data(), n); });
  report("gelu backward", all, [&] { transformer::gelu_backward(device, stream, hidden.data(), z.data(), n); });
  report("gelu_new forward", all,
         [&] { transformer::gelu_forward<transformer::TanhGelu>(device, stream, in, z.data(), n); });
  report("gelu_new backward", all,
         [&] { transformer::gelu_backward<transformer::TanhGelu>(device, stream, hidden.data(), z.data(), n); });
  report("dropout", all, [&] { transformer::dropout(device, stream, in, z.data(), n, {0.2f, 1, 2, 3}, 0); });
  report("initialize, normal", all,
         [&] { fsdp::kernels::initialize(device, stream, z.data(), n, fsdp::init::normal(1.0f), 1, 2, 0); });
  std::vector<fsdp::bf16> narrow(static_cast<std::size_t>(n));
  report("cast fp32 to bf16", all, [&] { fsdp::kernels::cast(device, stream, in, narrow.data(), n); });
  report("cast bf16 to fp32", all,
         [&] { fsdp::kernels::cast(device, stream, static_cast<fsdp::bf16 const*>(narrow.data()), z.data(), n); });
  std::vector<fsdp::fp16> half(static_cast<std::size_t>(n));
  report("cast fp32 to fp16", all, [&] { fsdp::kernels::cast(device, stream, in, half.data(), n); });
  report("cast fp16 to fp32", all,
         [&] { fsdp::kernels::cast(device, stream, static_cast<fsdp::fp16 const*>(half.data()), z.data(), n); });
  std::int64_t const vocabulary = 50257, padded = 50304, rows = 8;
  Array logits(rows * padded), losses(rows);
  logits.randomise(1.0f, 9);
  std::vector<std::int32_t> const targets(static_cast<std::size_t>(rows), 17);
  report("cross-entropy with gradient", static_cast<double>(rows * padded), [&] {
    transformer::cross_entropy_backward(device, stream, logits.data(), targets.data(), losses.data(), rows, vocabulary,
                                        padded, 1.0);
  });
}

/// Kernels over arrays far larger than the caches, as a part of what memcpy moves.
void bandwidth() {
  std::int64_t const n = std::int64_t{1} << 26;  // 256 MiB an array
  Array p(n, 0.5f), g(n, 0.25f), m(n, 0.1f), v(n, 0.1f);
  std::vector<fsdp::OptimizerChunk> chunks;
  for (std::int64_t begin = 0; begin < n; begin += fsdp::kernels::chunk_elements) {
    chunks.push_back({begin, static_cast<std::int32_t>(fsdp::kernels::chunk_elements), 0.1f});
  }
  double const bytes = static_cast<double>(n) * sizeof(float);
  double const copy = best_of(7, [&] { std::memcpy(v.data(), m.data(), static_cast<std::size_t>(bytes)); });
  double const reference = 2.0 * bytes / copy;
  std::printf("%-34s %9.2f GB/s\n", "memcpy", 1e-9 * reference);
  auto const report = [&](char const* what, double moved, auto f) {
    double const rate = moved / best_of(7, f);
    std::printf("%-34s %9.2f GB/s        %5.1f %% of memcpy\n", what, 1e-9 * rate, 100.0 * rate / reference);
  };
  auto const count = static_cast<std::int64_t>(chunks.size());
  auto const* const slope = static_cast<float const*>(g.data());
  fsdp::AdamWScalars const scalars{};
  fsdp::OptimizerStep const step{
      .taken = 7, .factor = 1.0f, .learning_rate = 1e-4f, .correction1 = 0.5f, .correction2 = 0.5f};
  report("adamw", 7.0 * bytes, [&] {
    fsdp::kernels::adamw(device, stream, chunks.data(), count, &step, scalars, p.data(), slope, m.data(), v.data());
  });
  auto const half = [&](float value) {
    return std::vector<fsdp::bf16>(static_cast<std::size_t>(n), fsdp::bf16(value));
  };
  auto half_p = half(0.5f), half_m = half(0.1f), half_v = half(0.1f);
  report("adamw, bf16 moments", 5.0 * bytes, [&] {
    fsdp::kernels::adamw(device, stream, chunks.data(), count, &step, scalars, p.data(), slope, half_m.data(),
                         half_v.data());
  });
  report("adamw, bf16 moments, stochastic", 5.0 * bytes, [&] {
    fsdp::kernels::adamw<true>(device, stream, chunks.data(), count, &step, scalars, p.data(), slope, half_m.data(),
                               half_v.data(), 1);
  });
  report("adamw, all bf16, stochastic", 4.0 * bytes, [&] {
    fsdp::kernels::adamw<true>(device, stream, chunks.data(), count, &step, scalars, half_p.data(), slope,
                               half_m.data(), half_v.data(), 1);
  });
  report("accumulate", 3.0 * bytes, [&] {
    fsdp::kernels::accumulate(device, stream, static_cast<float const*>(g.data()), p.data(), n, 0.5f, false);
  });
  std::vector<double> digits(fsdp::kernels::norm_digit_count);
  std::vector<double> partials(static_cast<std::size_t>(fsdp::kernels::norm_partial_count(n)));
  report("norm_partials and norm_digits", bytes, [&] {
    fsdp::kernels::norm_partials(device, stream, slope, n, fsdp::NormKind::l2, partials.data());
    fsdp::kernels::norm_digits(device, stream, static_cast<double const*>(partials.data()),
                               static_cast<std::int64_t>(partials.size()), digits.data());
  });
  fsdp::ClipScalars clip{};
  fsdp::kernels::clip_factor(device, stream, static_cast<double const*>(digits.data()), fsdp::kernels::norm_digit_count,
                             fsdp::NormKind::l2, 1.0f, nullptr, &clip);
  std::printf("(norm of the gradient: %.6g)\n", clip.norm);
}

}  // namespace

int main() {
  rows();
  others();
  bandwidth();
}
