// SPDX-License-Identifier: Apache-2.0
// The trainer's attention where it is flash attention, in emulated thread blocks, against the same class by panels in
// double precision: shapes, places and dropout masks that it hands on.
// skip-tsan
// labels: emulated
#include "tests/catch.hpp"
#include "tests/nanogpt/attention_support.hpp"
#include "tests/support/emulated_device.hpp"
#include "tests/support/emulated_tile.hpp"

namespace transformer {
/// Flash attention needs no other products.
template <>
class Gemm<emulated::Device> {
 public:
  template <class... Args>
  void batched(Args const&...) {
    fsdp::fail<fsdp::Error>("a product outside flash attention");
  }
};
}  // namespace transformer

namespace {

model_test::Attention emulated_flash(model_test::AttentionCase const& c) {
  emulated::Device::Stream stream;
  transformer::Gemm<emulated::Device> gemm;
  return model_test::by_flash(emulated::Device{}, stream, gemm, c);
}

}  // namespace

TEST_CASE("attention of the trainer is the same by flash attention and by panels", "[emulated][flash]") {
  for (float const dropout : {0.0f, 0.25f}) {
    auto const c = model_test::attention_case(2, 64, 2, 70, dropout);
    auto const exact = model_test::by_panels(c), ours = emulated_flash(c);
    CAPTURE(dropout);
    // Probabilities and slopes are rounded to bf16, 2^-9 each; a wrong mask or place gives differences near 1.
    CHECK(model_test::difference(ours.mixed, exact.mixed) < 0.01);
    CHECK(model_test::difference(ours.gradient, exact.gradient) < 0.01);
  }
}

TEST_CASE("attention of the trainer decodes by flash attention", "[emulated][flash]") {
  auto const c = model_test::attention_case(2, 64, 2, 3, 0.0f, 66, 11);
  CHECK(model_test::difference(emulated_flash(c).mixed, model_test::by_panels(c).mixed) < 0.01);
}
