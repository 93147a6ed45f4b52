// SPDX-License-Identifier: Apache-2.0
// The whole model, engine and optimizer in emulated thread blocks: what a GPU will run, but for cuBLASLt's products.
// fp32 against the host's fp32, bf16 with flash attention against fp32.
// skip-sanitizers
// labels: emulated
// long
#include <cxxabi.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>

#include "benchmarks/step/classes.hpp"
#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/training.hpp"
#include "tests/support/emulated_device.hpp"
#include "tests/support/emulated_tile.hpp"
#include "transformer/math/gemm_host.hpp"

namespace transformer {
/// The host's products, awaited.
template <>
class Gemm<emulated::Device> {
 public:
  static constexpr bool adds_bias = false;

  explicit Gemm(emulated::Device const&) {}
  template <class T, class Out>
  void run(emulated::Device::Stream&, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
           GemmScalar<Out> alpha, T const* a, std::int64_t lda, T const* b, std::int64_t ldb, GemmScalar<Out> beta,
           Out* c, std::int64_t ldc) {
    host_.run(stream_, op_a, op_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    device_.synchronize(stream_);
  }
  template <class T, class Out>
  void batched(emulated::Device::Stream&, Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
               GemmScalar<Out> alpha, T const* a, std::int64_t lda, std::int64_t stride_a, T const* b, std::int64_t ldb,
               std::int64_t stride_b, GemmScalar<Out> beta, Out* c, std::int64_t ldc, std::int64_t stride_c,
               std::int64_t batch, Lower lower = Lower::none) {
    host_.batched(stream_, op_a, op_b, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c,
                  batch, lower);
    device_.synchronize(stream_);
  }

 private:
  fsdp::host::Device device_;
  fsdp::host::Device::Stream stream_ = device_.make_stream("products", fsdp::StreamPriority::normal);
  Gemm<fsdp::host::Device> host_{device_};
};
}  // namespace transformer

namespace {

using model_test::Outcome;

template <class P, class D>
Outcome train(D const& device) {
  return model_test::train<P>(fsdp::FullShard{}, device, model_test::aligned_run(32, 8));
}

/// Kernels of no step: what the table's "other" may hold.
std::set<std::string> const initial_values{"fsdp::kernels::detail::Fill",
                                           "fsdp::kernels::detail::FillRandom<fsdp::NormalValues>"};

/// Names of kernels that the step benchmark's table would list under "other".
std::set<std::string> unfiled(emulated::Launched const& launched) {
  std::set<std::string> names;
  for (auto const& kernel : launched.kernels()) {
    std::unique_ptr<char, decltype(&std::free)> const text(
        abi::__cxa_demangle(kernel.name(), nullptr, nullptr, nullptr), &std::free);
    REQUIRE(text != nullptr);
    std::string name = text.get();
    constexpr std::string_view version = FSDP_QUOTED(FSDP_VERSION_NAMESPACE) "::";
    for (auto at = name.find(version); at != name.npos; at = name.find(version)) name.erase(at, version.size());
    bool const attends = name.find("flash") != name.npos || name.find("Softmax") != name.npos;
    CAPTURE(name);
    if (attends) CHECK(bench::class_of(name) == bench::KernelClass::attention);
    if (bench::class_of(name) == bench::KernelClass::other) names.insert(name);
  }
  return names;
}

}  // namespace

TEST_CASE("fp32 in thread blocks is the host's fp32, by kernels that the step benchmark knows", "[emulated][model]") {
  emulated::Launched launched;
  emulated::Device device;
  device.launched = &launched;
  model_test::check_alike(train<fsdp::Fp32>(device), train<fsdp::Fp32>(fsdp::host::Device{}), 1e-4, 1e-3f);
  CHECK(unfiled(launched) == initial_values);
}

TEST_CASE("bf16 in thread blocks, with flash attention, trains as the host's fp32 does", "[emulated][model]") {
  // The bounds of model_precision.cpp.
  emulated::Launched launched;
  emulated::Device device;
  device.launched = &launched;
  model_test::check_alike(train<fsdp::Bf16>(device), train<fsdp::Fp32>(fsdp::host::Device{}), 0x1p-8, 10 * 0x1p-9f);
  CHECK(unfiled(launched) == initial_values);
}
