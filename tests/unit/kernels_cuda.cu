// SPDX-License-Identifier: Apache-2.0
// The library's own kernels on a GPU: what they compute on the host, and nothing beside what they are given. Small, so
// that compute-sanitizer can run it.
// timeout: 470
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/cuda.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/detail/kernels/muon.hpp"
#include "fsdp/detail/kernels/norms.hpp"
#include "fsdp/detail/kernels/optimizers.hpp"
#include "tests/catch.hpp"
#include "tests/conformance/gpu.hpp"
#include "tests/conformance/values.hpp"
#include "tests/unit/kernels_support.hpp"

namespace {

namespace kernels = fsdp::kernels;
using fsdp::bf16;
using fsdp::NormKind;

bool const ready = fsdp::testing::need_gpu();

/// Arrays of a device, and what kernels have left in them.
template <class D>
class Arrays {
 public:
  using Stream = typename D::Stream;
  struct Result {
    std::string kernel;
    std::vector<double> values;
  };

  /// @param shift  elements before an array: kernels take aligned arrays and others
  Arrays(D device, std::size_t shift)
      : device_(std::move(device)), stream_(device_.make_stream("test", fsdp::StreamPriority::normal)), shift_(shift) {}
  Arrays(Arrays const&) = delete;
  Arrays& operator=(Arrays const&) = delete;
  ~Arrays() {
    for (auto const& memory : memories_) device_.deallocate(memory.first, memory.second);
  }

  D const& device() const { return device_; }
  Stream& stream() { return stream_; }

  /// The values, between elements of value 77.
  template <class T>
  T* put(std::vector<T> values) {
    values.insert(values.begin(), shift_, edge<T>());
    values.push_back(edge<T>());
    auto const bytes = values.size() * sizeof(T);
    auto* const memory = static_cast<T*>(device_.allocate(bytes));
    memories_.emplace_back(memory, bytes);
    fsdp::conformance::upload(device_, stream_, memory, values);
    return memory + shift_;
  }
  template <class T>
  T* put(std::int64_t count, T value) {
    return put(std::vector<T>(static_cast<std::size_t>(count), value));
  }
  /// The content of `array` of `count` values; its edges must be unchanged.
  template <class T>
  void take(std::string kernel, T const* array, std::int64_t count) {
    auto const size = static_cast<std::size_t>(count);
    auto const all = fsdp::conformance::download(device_, stream_, array - shift_, shift_ + size + 1);
    Result result{std::move(kernel), {}};
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i < shift_ || i == shift_ + size) {
        INFO(result.kernel << " of " << count << " elements, edge " << i);
        CHECK(fsdp::conformance::to_double(all[i]) == 77.0);
      } else {
        result.values.push_back(fsdp::conformance::to_double(all[i]));
      }
    }
    results_.push_back(std::move(result));
  }
  /// Structs, without edges.
  template <class S>
  S* put_structs(std::vector<S> const& values) {
    auto const bytes = values.size() * sizeof(S);
    auto* const memory = static_cast<S*>(device_.allocate(bytes));
    memories_.emplace_back(memory, bytes);
    fsdp::conformance::upload(device_, stream_, memory, values);
    return memory;
  }
  template <class S>
  S get_struct(S const* memory) {
    return fsdp::conformance::download(device_, stream_, memory, 1).front();
  }
  void note(std::string kernel, std::vector<double> values) {
    results_.push_back({std::move(kernel), std::move(values)});
  }
  std::vector<Result> const& results() const { return results_; }

 private:
  template <class T>
  static T edge() {
    return fsdp::conformance::from_double<T>(77.0);
  }

  D device_;
  Stream stream_;
  std::size_t shift_;
  std::vector<std::pair<void*, std::size_t>> memories_;
  std::vector<Result> results_;
};

template <class A>
void elementwise(A& on, std::int64_t n) {
  auto const& device = on.device();
  auto& stream = on.stream();
  auto const wide = kernel_test::random_values(n, 1);
  auto const narrow = kernel_test::random_values<bf16>(n, 2);
  auto* const in = on.put(wide);
  auto* const narrow_in = on.put(narrow);

  auto* const rounded = on.put(n, bf16());
  kernels::cast(device, stream, static_cast<float const*>(in), rounded, n);
  on.take("cast to bf16", rounded, n);
  auto* const widened = on.put(n, 0.0f);
  kernels::cast(device, stream, static_cast<bf16 const*>(narrow_in), widened, n);
  on.take("cast from bf16", widened, n);
  for (bool const overwrite : {true, false}) {
    kernels::accumulate(device, stream, static_cast<bf16 const*>(narrow_in), widened, n, 0.25f, overwrite);
    on.take(overwrite ? "accumulate, the first" : "accumulate", widened, n);
  }
  kernels::add(device, stream, static_cast<float const*>(in), rounded, n);
  on.take("add", rounded, n);
  kernels::scale(device, stream, widened, n, -3.0f);
  on.take("scale", widened, n);
  for (auto const& init :
       {fsdp::init::zeros, fsdp::init::constant(0.5f), fsdp::init::normal(0.02f), fsdp::init::uniform(-1.0f, 1.0f)}) {
    kernels::initialize(device, stream, widened, n, init, 5, fsdp::hash_name("weight"), 3);
    on.take("initialize", widened, n);
  }
}

template <class A>
void norms(A& on, std::int64_t n) {
  auto const& device = on.device();
  auto& stream = on.stream();
  auto* const gradients = on.put(kernel_test::random_values(n, 3));
  auto const count = kernels::norm_partial_count(n);
  for (auto const kind : {NormKind::l1, NormKind::l2, NormKind::inf}) {
    auto* const partials = on.put(count, 0.0);
    auto* const parts = on.put(kernels::norm_digit_count, 0.125);
    kernels::norm_partials(device, stream, static_cast<float const*>(gradients), n, kind, partials);
    on.take("norm_partials", partials, count);
    kernels::norm_combine(device, stream, static_cast<double const*>(partials), count, kind, parts + 1);
    on.take("norm_combine", parts, kernels::norm_digit_count);
    if (kind != NormKind::inf) kernels::norm_digits(device, stream, static_cast<double const*>(partials), count, parts);
    on.take("norm_digits", parts, kernels::norm_digit_count);
    auto* const scale = on.put_structs(std::vector{fsdp::LossScale{8.0f, 1}});
    auto* const clip = on.put_structs(std::vector<fsdp::ClipScalars>(1));
    kernels::clip_factor(device, stream, static_cast<double const*>(parts), kernels::norm_digit_count, kind, 0.5f,
                         static_cast<float const*>(&scale->scale), clip);
    kernels::update_scale(device, stream, clip, 2.0f, 0.5f, 2, scale);
    auto const got = on.get_struct(clip);
    auto const scaled = on.get_struct(scale);
    on.note("clip_factor", {got.norm, static_cast<double>(got.factor), static_cast<double>(got.skipped)});
    on.note("update_scale", {static_cast<double>(scaled.scale), static_cast<double>(scaled.good_steps)});
  }
}

/// @tparam T  of parameters and moments
template <class T, bool Stochastic, class A>
void optimizers(A& on, std::int64_t n) {
  auto const& device = on.device();
  auto& stream = on.stream();
  auto const first = (n + 1) / 2;
  auto* const chunks = on.put_structs(std::vector<fsdp::OptimizerChunk>{
      {0, static_cast<std::int32_t>(first), 0.1f, 7, 0}, {first, static_cast<std::int32_t>(n - first), 0.0f, 9, 11}});
  auto* const gradients = on.put(kernel_test::random_values(n, 4));
  auto* const step = on.put_structs(std::vector<fsdp::OptimizerStep>(1));
  auto* const clip = on.put_structs(std::vector{fsdp::ClipScalars{1.0, 0.5f, 0}});
  auto* const p = on.put(kernel_test::random_values<T>(n, 5));
  auto* const m = on.put(kernel_test::random_values<T>(n, 6, 0.1));
  auto* const v = on.put(n, fsdp::narrow<T>(0.25f));
  auto* const momentum = on.put(n, 0.0f);
  auto* const moves = on.put(n, 0.0f);
  auto* const average = on.put(n, 0.5f);
  for (int taken = 0; taken < 2; ++taken) {
    kernels::begin_step(device, stream, step, 0.01f, 0.9f, 0.99f, clip);
    kernels::adamw<Stochastic>(device, stream, chunks, 2, step, fsdp::AdamWScalars{0.9f, 0.99f, 1e-8f}, p,
                               static_cast<float const*>(gradients), m, v, 21);
    kernels::sgd<Stochastic>(device, stream, chunks, 2, step, fsdp::SgdScalars{0.5f}, p,
                             static_cast<float const*>(gradients), momentum, 22);
  }
  kernels::muon_momentum(device, stream, chunks, 2, step, fsdp::SgdScalars{0.9f, true},
                         static_cast<float const*>(gradients), momentum, moves);
  kernels::muon_update<Stochastic>(device, stream, chunks, 2, step, p, static_cast<float const*>(moves), 23);
  kernels::update_average(device, stream, average, static_cast<T const*>(p), n, 0.9f, clip);
  kernels::swap(device, stream, average, moves, n);
  on.take("averages", average, n);
  on.take("moves", moves, n);
  on.take("parameters", p, n);
  on.take("first moments", m, n);
  on.take("second moments", v, n);
  on.take("velocities", momentum, n);
  auto const got = on.get_struct(step);
  on.note("begin_step", {static_cast<double>(got.taken), static_cast<double>(got.factor),
                         static_cast<double>(got.correction1), static_cast<double>(got.correction2)});
}

/// A product of matrices of (n / 7 + 1, n / 500 + 1) and (n / 500 + 1, 9), and its transpose.
template <class A>
void products(A& on, std::int64_t n) {
  auto const& device = on.device();
  auto& stream = on.stream();
  auto const m = n / 7 + 1, k = n / 500 + 1;
  std::int64_t const columns = 9;
  auto* const a = on.put(kernel_test::random_values(m * k, 7));
  auto* const b = on.put(kernel_test::random_values(k * columns, 8));
  auto* const c = on.put(kernel_test::random_values(m * columns, 9));
  auto* const turned = on.put(m * columns, 0.0f);
  kernels::product(device, stream, m, columns, k, 1.5f, static_cast<float const*>(a), static_cast<float const*>(b),
                   0.5f, c);
  kernels::transpose(device, stream, m, columns, static_cast<float const*>(c), turned);
  on.take("product", c, m * columns);
  on.take("transposed", turned, m * columns);
}

/// @param unit   how far results may be apart, relative to the largest
/// @param equal  the part of them that must be the same
/// @param run    fills Arrays of either device
template <class Run>
void check_against_host(double unit, double equal, Run const& run) {
  for (std::int64_t const n : {1, 1000, 16385}) {
    for (std::size_t const shift : {0u, 1u}) {
      Arrays<fsdp::cuda::Device> gpu(fsdp::cuda::Device{}, shift);
      Arrays<kernel_test::LoopDevice> host(kernel_test::LoopDevice{}, shift);
      run(gpu, n);
      run(host, n);
      REQUIRE(gpu.results().size() == host.results().size());
      for (std::size_t r = 0; r < host.results().size(); ++r) {
        auto const& [kernel, expected] = host.results()[r];
        auto const& got = gpu.results()[r].values;
        double size = 0, apart = 0, same = 0;
        for (std::size_t i = 0; i < expected.size(); ++i) {
          size = std::max(size, std::fabs(expected[i]));
          double const difference = std::fabs(got[i] - expected[i]);
          apart = difference <= apart ? apart : difference;  // NaN stays
          same += got[i] == expected[i] ? 1 : 0;
        }
        INFO(kernel << " of " << n << " elements, shifted by " << shift);
        CHECK(apart <= unit * size);
        CHECK(same >= equal * static_cast<double>(expected.size()) - 1);
      }
    }
  }
}

}  // namespace

// The host and the GPU round alike, but for fused products, the order of sums and the functions of normal values: a few
// roundings of fp32. Stochastic rounding multiplies one of them to one of bf16, once in thousands of times; rounding to
// nearest instead would give every second element another value.
TEST_CASE("cuda kernels: casts, accumulation, sums and initial values are the host's", "[kernels]") {
  check_against_host(0x1p-20, 0, [](auto& on, std::int64_t n) { elementwise(on, n); });
}

TEST_CASE("cuda kernels: norms, clipping and the loss scale are the host's", "[kernels]") {
  check_against_host(0x1p-22, 0, [](auto& on, std::int64_t n) { norms(on, n); });
}

TEST_CASE("cuda kernels: optimizers in fp32 take the host's steps", "[kernels]") {
  check_against_host(0x1p-18, 0, [](auto& on, std::int64_t n) { optimizers<float, false>(on, n); });
}

TEST_CASE("cuda kernels: optimizers in bf16 round stochastically as on the host", "[kernels]") {
  check_against_host(0x1p-6, 0.99, [](auto& on, std::int64_t n) { optimizers<bf16, true>(on, n); });
}

TEST_CASE("cuda kernels: products and transposed matrices are the host's", "[kernels]") {
  check_against_host(0x1p-18, 0, [](auto& on, std::int64_t n) { products(on, n); });
}
