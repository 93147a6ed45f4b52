// SPDX-License-Identifier: Apache-2.0
// nanogpt's attention in tiles on the host, against its definition in fp64 and the plain formula in its own type.
// needs: OpenBLAS
// links: transformer_math
// optimised
// skip-tsan
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/unit/kernels_support.hpp"
#include "transformer/attention/causal_attention.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using fsdp::bf16;
using transformer::HostAttention;

/// A shape with its operands; rows of qkv behind the last one that counts are NaN.
template <class T>
struct Case {
  HostAttention shape;
  std::vector<T> qkv, up;

  Case(std::int64_t size, std::int64_t length, std::int64_t position = 0, std::int64_t spare = 0,
       std::int64_t heads = 2) {
    shape = {heads, heads, size, length, position, position + length + spare};
    std::int64_t const rows = shape.batch * shape.capacity, wide = 3 * shape.width();
    qkv = kernel_test::random_values<T>(rows * wide, 31);
    up = kernel_test::random_values<T>(shape.batch * length * shape.width(), 32);
    for (std::int64_t row = 0; row < rows; ++row) {
      if (row % shape.capacity < position + length) continue;
      for (std::int64_t i = 0; i < wide; ++i)
        qkv[static_cast<std::size_t>(row * wide + i)] = fsdp::narrow<T>(std::numeric_limits<float>::quiet_NaN());
    }
  }
};

struct Result {
  std::vector<double> mixed, gradient;  // the gradient of qkv: only where the pass begins at position 0
};

/// The definition, a loop for every index: computed in Real, and what is stored between two products rounded to T.
template <class Real, class Stored, class T>
Result by_definition(Case<T> const& c) {
  auto const& s = c.shape;
  std::int64_t const width = s.width();
  auto const round = [](Real value) { return static_cast<Real>(fsdp::widen(fsdp::narrow<Stored>(value))); };
  Result out{std::vector<double>(c.up.size()), std::vector<double>(c.qkv.size())};
  std::vector<Real> sums(c.qkv.size());
  Real const scale = 1 / std::sqrt(static_cast<Real>(s.head_size));
  for (std::int64_t head = 0; head < s.batch * s.heads; ++head) {
    auto const at = [&](std::int64_t row, std::int64_t part) {  // of queries (0), keys (1) or values (2)
      return static_cast<std::size_t>(((head / s.heads * s.capacity + row) * 3 + part) * width +
                                      head % s.heads * s.head_size);
    };
    auto const element = [&](std::size_t first, std::int64_t i) {
      return static_cast<Real>(fsdp::widen(c.qkv[first + static_cast<std::size_t>(i)]));
    };
    for (std::int64_t row = 0; row < s.length; ++row) {
      std::int64_t const query = s.position + row;
      auto const result =
          static_cast<std::size_t>((head / s.heads * s.length + row) * width + head % s.heads * s.head_size);
      std::vector<Real> p;
      Real largest = -std::numeric_limits<Real>::infinity(), sum = 0;
      for (std::int64_t key = 0; key <= query; ++key) {
        Real score = 0;
        for (std::int64_t i = 0; i < s.head_size; ++i) score += element(at(query, 0), i) * element(at(key, 1), i);
        p.push_back(scale * score);
        largest = std::max(largest, p.back());
      }
      for (auto& value : p) sum += value = std::exp(value - largest);
      for (auto& value : p) value /= sum;
      std::vector<Real> slopes(p.size());
      Real mean = 0;
      for (std::int64_t i = 0; i < s.head_size; ++i) {
        Real mixed = 0;
        for (std::size_t key = 0; key < p.size(); ++key)
          mixed += round(p[key]) * element(at(static_cast<std::int64_t>(key), 2), i);
        out.mixed[result + static_cast<std::size_t>(i)] = static_cast<double>(round(mixed));
      }
      auto const up = [&](std::int64_t i) {
        return static_cast<Real>(fsdp::widen(c.up[result + static_cast<std::size_t>(i)]));
      };
      for (std::size_t key = 0; key < p.size(); ++key) {
        for (std::int64_t i = 0; i < s.head_size; ++i)
          slopes[key] += up(i) * element(at(static_cast<std::int64_t>(key), 2), i);
        mean += p[key] * slopes[key];
      }
      for (std::size_t key = 0; key < p.size(); ++key) {
        Real const slope = round(p[key] * (slopes[key] - mean) * scale);
        auto const other = static_cast<std::int64_t>(key);
        for (std::int64_t i = 0; i < s.head_size; ++i) {
          auto const offset = static_cast<std::size_t>(i);
          sums[at(query, 0) + offset] += slope * element(at(other, 1), i);
          sums[at(other, 1) + offset] += slope * element(at(query, 0), i);
          sums[at(other, 2) + offset] += round(p[key]) * up(i);
        }
      }
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i) out.gradient[i] = static_cast<double>(round(sums[i]));
  return out;
}

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
/// Scratch that starts as NaN: nothing may read it unwritten.
std::unique_ptr<std::byte, Free> scratch(std::int64_t bytes) {
  std::unique_ptr<std::byte, Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(64, static_cast<std::size_t>(bytes))));
  REQUIRE(memory != nullptr);
  std::fill_n(reinterpret_cast<float*>(memory.get()), bytes / 4, std::numeric_limits<float>::quiet_NaN());
  return memory;
}

constexpr std::size_t guard = 64;  ///< elements behind a result that must stay as they are

template <class T>
Result in_tiles(Case<T> const& c, int threads = 1) {
  fsdp::host::Device const device{.threads = threads};
  auto stream = device.make_stream("compute");
  auto const& s = c.shape;
  std::int64_t const keys = s.position + s.length;
  std::int64_t const bytes = transformer::host_attention_scratch(keys, s.head_size, sizeof(T), true);
  auto const memory = scratch(bytes * threads);
  T const untouched = fsdp::narrow<T>(12345.0f);
  std::vector<T> mixed(c.up.size() + guard, untouched), gradient(c.qkv.size() + guard, untouched);
  transformer::LaneScratch const lanes{memory.get(), bytes};
  transformer::host_attention_forward(device, stream, s, c.qkv.data(), mixed.data(), lanes);
  if (s.position == 0)
    transformer::host_attention_backward(device, stream, s, c.qkv.data(), c.up.data(), gradient.data(), lanes);
  device.synchronize(stream);
  auto const wide = [&](std::vector<T> const& values) {
    std::vector<double> all;
    for (auto const& value : values) all.push_back(kernel_test::as_double(value));
    for (std::size_t i = values.size() - guard; i < values.size(); ++i)
      CHECK(all[i] == kernel_test::as_double(untouched));
    all.resize(values.size() - guard);
    return all;
  };
  return {wide(mixed), wide(gradient)};
}

/// Root of the mean square of differences, by that of `exact`; NaN where either has one.
double error(std::vector<double> const& values, std::vector<double> const& exact) {
  double difference = 0, square = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += (values[i] - exact[i]) * (values[i] - exact[i]);
    square += exact[i] * exact[i];
  }
  return std::sqrt(difference / square);
}

/// @param unit  half a unit in the last place: below it a plain formula's error is luck
template <class T>
void check(Case<T> const& c, double unit) {
  CAPTURE(sizeof(T), c.shape.head_size, c.shape.length, c.shape.position);
  auto const exact = by_definition<double, double>(c);
  auto const plain = by_definition<float, T>(c);
  auto const tiles = in_tiles(c);
  CHECK(error(tiles.mixed, exact.mixed) <= 1.5 * std::max(unit, error(plain.mixed, exact.mixed)));
  if (c.shape.position == 0)
    CHECK(error(tiles.gradient, exact.gradient) <= 1.5 * std::max(unit, error(plain.gradient, exact.gradient)));
}

template <class T>
void check_shapes(double unit) {
  if (!transformer::host_attention_serves<T>(64)) {
    WARN("skipped: this processor, or this build, has no attention in tiles for " << sizeof(T) << "-byte elements");
    return;
  }
  // Rows beside tiles (14), blocks (56), vectors (16) and panels (32); more keys than a chunk of operands (448) has.
  for (std::int64_t const length : {1, 2, 3, 13, 14, 15, 16, 17, 31, 33, 55, 56, 57, 71, 113, 130})
    if (fsdp::testing::next_cell(5)) check(Case<T>(32, length), unit);
  check(Case<T>(64, 100), unit);
  check(Case<T>(96, 59), unit);
  check(Case<T>(256, 30), unit);
  auto const long_ones = fsdp::testing::sanitized ? std::vector{464} : std::vector{447, 464, 910};
  for (std::int64_t const length : long_ones) check(Case<T>(32, length, 0, 0, 1), unit);
  for (std::int64_t const position : {1, 15, 64, 437}) check(Case<T>(32, 23, position, 3), unit);
}

}  // namespace

TEST_CASE("attention in tiles errs no more than 1.5 times as much as the plain formula: fp32", "[attention]") {
  check_shapes<float>(0x1p-25);
}
TEST_CASE("attention in tiles errs no more than 1.5 times as much as the plain formula: bf16", "[attention]") {
  check_shapes<bf16>(0x1p-10);
}

TEST_CASE("attention in tiles has the same bits on any number of threads", "[attention]") {
  if (!transformer::host_attention_serves<float>(64)) {
    WARN("skipped: this processor, or this build, has no attention in tiles");
    return;
  }
  Case<float> const c(64, 75);
  auto const alone = in_tiles(c);
  for (int const threads : {2, 3, 5, 16}) {
    CAPTURE(threads);
    auto const shared = in_tiles(c, threads);
    CHECK((shared.mixed == alone.mixed && shared.gradient == alone.gradient));
  }
}

TEST_CASE("attention in tiles serves whole vectors of a head alone", "[attention]") {
  for (std::int64_t const size : {1, 16, 24, 48, 65, 288}) {
    CHECK_FALSE(transformer::host_attention_serves<float>(size));
    CHECK_FALSE(transformer::host_attention_serves<bf16>(size));
  }
}

TEST_CASE("attention goes in tiles where there is room for them, not for a few rows, and not with dropout",
          "[attention]") {
  using Device = fsdp::host::Device;
  if (!transformer::host_attention_serves<float>(32)) {
    WARN("skipped: this processor, or this build, has no attention in tiles");
    return;
  }
  Device const device;
  auto stream = device.make_stream("compute");
  transformer::Gemm<Device> gemm(device);
  transformer::AttentionContext<Device, float> context{device, &gemm, {}, {}};
  context.plan.shape = {2, 32};
  context.plan.panel = 8;
  std::vector<float> scores(2 * 8 * 40), scores_gradient(scores.size());
  context.scratch.scores = scores.data();
  context.scratch.scores_gradient = scores_gradient.data();
  context.scratch.score_elements = static_cast<std::int64_t>(scores.size());
  std::int64_t const bytes = transformer::host_attention_scratch(40, 32, sizeof(float), true);
  auto const went_in_tiles = [&](std::int64_t length, std::int64_t room, float dropout) {
    auto const memory = scratch(bytes);
    context.scratch.tiles = memory.get();
    context.scratch.tile_bytes = room;
    transformer::Pass pass;
    pass.length = pass.capacity = length;
    auto const qkv = kernel_test::random_values<float>(length * 3 * 64, 5);
    std::vector<float> mixed(static_cast<std::size_t>(length) * 64);
    transformer::CausalAttention<Device, float> const attention(context);
    attention.forward(stream, pass, {dropout, 1, 2, 3}, qkv.data(), mixed.data(), nullptr);
    device.synchronize(stream);
    return !std::isnan(*reinterpret_cast<float const*>(memory.get()));  // packed keys come first
  };
  CHECK(went_in_tiles(40, bytes, 0.0f));
  CHECK(went_in_tiles(16, bytes, 0.0f));
  CHECK_FALSE(went_in_tiles(15, bytes, 0.0f));
  CHECK_FALSE(went_in_tiles(40, 0, 0.0f));
  CHECK_FALSE(went_in_tiles(40, bytes, 0.5f));
  stream = Device{.threads = 2}.make_stream("compute");  // and room for one
  CHECK_THROWS_AS(went_in_tiles(40, bytes, 0.0f), fsdp::UsageError);
  CHECK_THROWS_AS(went_in_tiles(40, 0, 0.0f), fsdp::UsageError);
}
