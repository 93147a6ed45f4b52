// SPDX-License-Identifier: Apache-2.0
// The kernels of a Llama in emulated thread blocks: the same bits under every schedule, and what plain loops give.
// skip-sanitizers
// timeout: 600
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/catch.hpp"
#include "tests/emulated/everywhere.hpp"
#include "transformer/kernels/rms_norm.hpp"
#include "transformer/kernels/rope.hpp"
#include "transformer/kernels/swiglu.hpp"

using namespace emulated;
using fsdp::bf16;
using kernel_test::as_double;
using kernel_test::random_values;

namespace {

kernel_test::LoopDevice const host;
kernel_test::LoopDevice::Stream stream;

struct Shape {
  std::int64_t rows, columns;
};
/// One element; less than a pack; odd; more than all threads take at once; more than one chunk of rows.
std::vector<Shape> const shapes{{1, 1}, {2, 64}, {3, 65}, {2, 4099}, {34, 259}, {37, 768}};

/// Roundings of A that two devices may be apart: each has one, and those of fp32 sums in another order.
template <class A>
constexpr double apart = sizeof(A) == 2 ? 2.2 : 64.0;

}  // namespace

TEMPLATE_TEST_CASE("emulated: rms norm and its gradients", "[emulated][llama]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const n = s.rows * s.columns;
    auto const x = random_values<A>(n, 1), residual = random_values<A>(n, 2), weight = random_values<A>(s.columns, 3);
    auto const dy = random_values<A>(n, 4), past = random_values<A>(n, 5);
    auto const run = [&](auto const& device, std::size_t skip) {
      View<A> const in(x, skip), before(residual, skip), w(weight, skip), up(dy, skip);
      View<A> y(x, skip), sum(x, skip), dx(past, skip), frozen(dy, skip);
      View<float> scale(std::vector<float>(size(s.rows)), skip);
      View<float> dw(std::vector<float>(size(s.columns), 0.5f), skip);
      View<float> partials(std::vector<float>(size(transformer::rms_norm_partials(s.rows, s.columns))), skip);
      transformer::residual_rms_norm_forward(device, stream, before.in(), in.in(), sum.out(), w.in(), y.out(),
                                             scale.out(), s.rows, s.columns, 1e-5);
      // The gradient of the inputs overwrites what is added to it, or what comes from above.
      transformer::rms_norm_backward(device, stream, up.in(), sum.in(), w.in(), scale.in(), dx.in(), dx.out(), dw.out(),
                                     s.rows, s.columns, partials.out());
      transformer::rms_norm_backward(device, stream, frozen.in(), sum.in(), w.in(), scale.in(),
                                     static_cast<A const*>(nullptr), frozen.out(), static_cast<float*>(nullptr), s.rows,
                                     s.columns, static_cast<float*>(nullptr));
      return std::vector{doubles(sum), doubles(y), doubles(dx), doubles(frozen), doubles(scale), doubles(dw)};
    };
    auto const exact = run(host, 0);
    for (std::size_t const skip_of_views : {0u, 1u}) {
      auto const got = everywhere(run, {skip_of_views});
      CHECK(got[0] == exact[0]);
      for (std::size_t array : {1u, 2u, 3u}) check_close<A>(got[array], exact[array], apart<A>, 4.0);
      check_close<float>(got[4], exact[4], 64.0, 0.0);
      check_close<float>(got[5], exact[5], 64.0, static_cast<double>(s.rows) + 1.0);
    }
  }
}

TEMPLATE_TEST_CASE("emulated: rope and its gradient, in packs and without", "[emulated][llama]", float, bf16) {
  using A = TestType;
  for (auto const& heads : {transformer::GroupedHeads{1, 1, 2}, {6, 2, 10}, {9, 3, 64}, {8, 1, 16}}) {
    transformer::Pass pass{.batch = 2, .length = 5, .position = 3, .capacity = 9};
    CAPTURE(heads.heads, heads.kv_heads, heads.size);
    auto const table = transformer::rope_table({}, 10000.0, heads.size, 8);
    auto const in = random_values<A>(pass.rows() * heads.projected(), 6);
    auto const up = random_values<A>(pass.rows() * 3 * heads.width(), 7);
    std::vector<A> const blank(size(pass.batch * pass.capacity * 3 * heads.width()), A(3.0f));
    auto const run = [&](auto const& device, std::size_t skip) {
      View<A> const from(in, skip), above(up, skip);
      View<float> const angles(table, skip);
      View<A> packed(blank, skip), gradient(in, skip);
      auto first = pass;
      first.position = 0;
      first.capacity = first.length;
      transformer::rope_forward(device, stream, heads, pass, from.in(), angles.in(), packed.out());
      transformer::rope_backward(device, stream, heads, first, above.in(), angles.in(), gradient.out());
      return std::vector{doubles(packed), doubles(gradient)};
    };
    // Each element has the same arithmetic everywhere, but for what a compiler fuses.
    auto const exact = run(host, 0), got = everywhere(run, {0, 1});
    for (std::size_t array : {0u, 1u})
      check_close<A>(got[array], exact[array], sizeof(A) == 2 ? 2.2 : 4.0, 4.0 * static_cast<double>(heads.group()));
  }
}

TEMPLATE_TEST_CASE("emulated: swiglu and its gradient", "[emulated][llama]", float, bf16) {
  using A = TestType;
  for (auto const s : shapes) {
    CAPTURE(s.rows, s.columns);
    auto const in = random_values<A>(2 * s.rows * s.columns, 8, 3.0), up = random_values<A>(s.rows * s.columns, 9);
    auto const run = [&](auto const& device, std::size_t skip) {
      View<A> both(in, skip), gradient(up, skip), y(up, skip);
      transformer::swiglu_forward(device, stream, both.in(), y.out(), s.rows, s.columns);
      transformer::swiglu_backward(device, stream, both.out(), gradient.out(), s.rows, s.columns);
      return std::vector{doubles(y), doubles(gradient), doubles(both)};
    };
    auto const exact = run(host, 0), got = everywhere(run);
    CHECK(got[1] == got[0]);
    check_close<A>(got[0], exact[0], sizeof(A) == 2 ? 2.2 : 16.0, 0.0);
    check_close<A>(got[2], exact[2], sizeof(A) == 2 ? 2.2 : 16.0, 16.0);
  }
}
