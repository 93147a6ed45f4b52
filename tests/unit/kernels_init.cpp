// SPDX-License-Identifier: Apache-2.0
// Counter-based initialisation: known answers of Philox, independence of chunking, distributions.
// skip-tsan
// optimised
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/tensor.hpp"
#include "tests/catch.hpp"
#include "tests/unit/kernels_support.hpp"

using namespace kernel_test;
using fsdp::Init;
namespace init = fsdp::init;

namespace {

std::vector<float> filled(Init const& how, std::int64_t n, std::int64_t first = 0, std::uint64_t seed = 1337,
                          std::uint64_t tensor = fsdp::hash_name("wte")) {
  LoopDevice const device;
  LoopDevice::Stream stream;
  std::vector<float> out(static_cast<std::size_t>(n), -77.0f);
  fsdp::kernels::initialize(device, stream, out.data(), n, how, seed, tensor, first);
  return out;
}

/// A Block that is not HostBlock takes the path of several threads: here one thread after another.
struct OneOfMany {
  int index, count;
  int thread() const { return index; }
  int threads() const { return count; }
  void sync() const {}
};

}  // namespace

TEST_CASE("philox gives the authors' known answers", "[kernels][init]") {
  // Random123's kat_vectors, philox 4x32 with 10 rounds.
  auto const zero = fsdp::philox({0, 0, 0, 0}, 0);
  CHECK((zero.a == 0x6627e8d5u && zero.b == 0xe169c58du && zero.c == 0xbc57ac4cu && zero.d == 0x9b00dbd8u));
  auto const ones = fsdp::philox({~0u, ~0u, ~0u, ~0u}, ~0ull);
  CHECK((ones.a == 0x408f276du && ones.b == 0x41c83b0eu && ones.c == 0xa20bc7c6u && ones.d == 0x6d5451fdu));
  auto const digits = fsdp::philox({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, 0x299f31d0a4093822ull);
  CHECK((digits.a == 0xd16cfe09u && digits.b == 0x94fdccebu && digits.c == 0x5001e420u && digits.d == 0x24126ea1u));
}

TEST_CASE("an element's value does not depend on who fills it", "[kernels][init]") {
  std::int64_t const n = 40000;
  for (auto const& how : {init::normal(0.02f), init::uniform(-1.0f, 2.0f)}) {
    auto const whole = filled(how, n);
    for (std::int64_t const piece : {1, 63, 64, 1000, 16384, 17001}) {
      std::int64_t const end = piece == 1 ? 300 : n;
      for (std::int64_t first = 0; first < end; first += piece) {
        auto const count = std::min(piece, end - first);
        auto const part = filled(how, count, first);
        for (std::int64_t i = 0; i < count; ++i) {
          REQUIRE(part[static_cast<std::size_t>(i)] == whole[static_cast<std::size_t>(first + i)]);
        }
      }
    }
    CHECK(filled(how, 100, 0, 1338) != std::vector<float>(whole.begin(), whole.begin() + 100));
    CHECK(filled(how, 100, 0, 1337, fsdp::hash_name("wpe")) != std::vector<float>(whole.begin(), whole.begin() + 100));
  }
  // Beyond 2^32 elements the counter's upper word takes part.
  std::int64_t const far = (std::int64_t{1} << 34) + 5;
  CHECK(filled(init::normal(1.0f), 100, far) != filled(init::normal(1.0f), 100, 5));
  CHECK(filled(init::normal(1.0f), 100, far + 64)[0] == filled(init::normal(1.0f), 165, far)[64]);
}

TEST_CASE("blocks of many threads draw the same elements", "[kernels][init]") {
  for (std::int64_t const first : {0, 7, 64, 1000}) {
    std::int64_t const n = 1001;
    std::vector<std::uint32_t> one(static_cast<std::size_t>(n)), many(static_cast<std::size_t>(n));
    fsdp::RandomSequence const sequence{3, 4};
    struct Raw {
      fsdp::Four<std::uint32_t> operator()(fsdp::Words w) const { return {w.a, w.b, w.c, w.d}; }
    };
    fsdp::each_random(fsdp::HostBlock{}, n, sequence, first, Raw{},
                      [&](std::int64_t i, std::uint32_t word) { one[static_cast<std::size_t>(i)] = word; });
    for (int thread = 0; thread < 96; ++thread) {
      fsdp::each_random(OneOfMany{thread, 96}, n, sequence, first, Raw{},
                        [&](std::int64_t i, std::uint32_t word) { many[static_cast<std::size_t>(i)] = word; });
    }
    CHECK(one == many);
    CHECK(std::set<std::uint32_t>(one.begin(), one.end()).size() == one.size());
  }
}

TEST_CASE("constants fill every element", "[kernels][init]") {
  for (auto const n : sizes) {
    for (float const v : filled(init::zeros, n)) REQUIRE(v == 0.0f);
    for (float const v : filled(init::ones, n)) REQUIRE(v == 1.0f);
    for (float const v : filled(init::constant(2.5f), n)) REQUIRE(v == 2.5f);
  }
}

TEST_CASE("normal values have the moments and tails of a normal distribution", "[kernels][init]") {
  std::int64_t const n = 1 << 20;
  auto const x = filled(init::normal(3.0f, 0.5f), n);
  double sums[5] = {}, neighbour = 0.0, last = 0.0;
  std::int64_t beyond_two = 0;
  for (float const v : x) {
    double const z = (static_cast<double>(v) - 3.0) / 0.5;
    double power = 1.0;
    for (auto& sum : sums) {
      sum += power;
      power *= z;
    }
    neighbour += z * last;
    last = z;
    beyond_two += std::fabs(z) > 2.0;
  }
  double const count = static_cast<double>(n);
  // Five standard errors of each estimate: var z^k is 1, 2, 15, 96.
  double const error = 5.0 / std::sqrt(count);
  CHECK(std::fabs(sums[1] / count) <= error);
  CHECK(std::fabs(sums[2] / count - 1.0) <= std::sqrt(2.0) * error);
  CHECK(std::fabs(sums[3] / count) <= std::sqrt(15.0) * error);
  CHECK(std::fabs(sums[4] / count - 3.0) <= std::sqrt(96.0) * error);
  CHECK(std::fabs(neighbour / count) <= error);
  double const tail = std::erfc(std::sqrt(2.0));
  CHECK(std::fabs(static_cast<double>(beyond_two) / count - tail) <= std::sqrt(tail * (1.0 - tail)) * error);
}

TEST_CASE("uniform values stay in their range", "[kernels][init]") {
  std::int64_t const n = 1 << 20;
  double sum = 0.0, square = 0.0;
  for (float const v : filled(init::uniform(-2.0f, 4.0f), n)) {
    REQUIRE((v >= -2.0f && v < 4.0f));
    double const u = (static_cast<double>(v) + 2.0) / 6.0;
    sum += u;
    square += u * u;
  }
  double const count = static_cast<double>(n), error = 5.0 / std::sqrt(count);
  CHECK(std::fabs(sum / count - 0.5) <= std::sqrt(1.0 / 12.0) * error);
  CHECK(std::fabs(square / count - 1.0 / 3.0) <= std::sqrt(4.0 / 45.0) * error);
}

TEST_CASE("name hashes differ and are fixed", "[kernels][init]") {
  static_assert(fsdp::hash_name("a") != fsdp::hash_name("b"));
  std::set<std::uint64_t> hashes;
  for (int i = 0; i < 1000; ++i) {
    hashes.insert(fsdp::hash_name("h." + std::to_string(i) + ".weight"));
    hashes.insert(fsdp::hash_name("h." + std::to_string(i) + ".bias"));
  }
  CHECK(hashes.size() == 2000);
}
