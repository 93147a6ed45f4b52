// SPDX-License-Identifier: Apache-2.0
// Layout and segment arithmetic, by properties over many random layouts.
// skip-sanitizers
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "fsdp/detail/step/memory_plan.hpp"
#include "fsdp/detail/step/place_buffers.hpp"
#include "fsdp/layout.hpp"
#include "tests/catch.hpp"

namespace {

fsdp::FlatLayout random_layout(std::mt19937& random, int world, int shards) {
  fsdp::FlatLayout layout;
  auto const tensors = 1 + random() % 9;
  for (unsigned i = 0; i < tensors; ++i) {
    std::vector<std::int64_t> shape;
    for (unsigned axis = 0; axis <= random() % 3; ++axis) shape.push_back(1 + static_cast<std::int64_t>(random() % 40));
    layout.add({"t" + std::to_string(i), shape, 0, 0, true, {}});
  }
  layout.seal(world, shards);
  return layout;
}

/// A random number that divides `world`.
int divisor(std::mt19937& random, int world) {
  int shards = 1 + static_cast<int>(random() % static_cast<unsigned>(world));
  while (world % shards != 0) --shards;
  return shards;
}

}  // namespace

TEST_CASE("tensors are aligned, in order, disjoint, and inside the padded length") {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    int const world = 1 + static_cast<int>(random() % 9), shards = divisor(random, world);
    auto const layout = random_layout(random, world, shards);
    std::int64_t end = 0, numel = 0;
    for (auto const& tensor : layout.tensors()) {
      REQUIRE(tensor.offset % fsdp::layout_alignment == 0);
      REQUIRE(tensor.offset >= end);
      REQUIRE(tensor.offset - end < fsdp::layout_alignment);
      end = tensor.range().end;
      numel += tensor.numel;
    }
    REQUIRE(layout.numel() == numel);
    REQUIRE(layout.padded() >= end);
    REQUIRE(layout.padded() - end < fsdp::layout_alignment * world);
    REQUIRE(layout.padded() % (fsdp::layout_alignment * shards) == 0);
  }
}

TEST_CASE("a unit has the same slices under every strategy, and a shard is a whole number of them") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 2000; ++trial) {
    int const world = 1 + static_cast<int>(random() % 48);
    auto const elements = static_cast<std::int64_t>(random() % (trial % 2 == 0 ? 200 : 200'000));
    auto const all = fsdp::Division(elements, world, world);
    REQUIRE(all.slice == all.shard);
    for (int shards = 1; shards <= world; ++shards) {
      if (world % shards != 0) continue;
      auto const division = fsdp::Division(elements, world, shards);
      REQUIRE(division.slice == all.slice);
      REQUIRE(division.padded == division.shard * shards);
      REQUIRE(division.padded >= elements);
      REQUIRE(division.padded <= all.padded);
      if (elements == 0) continue;
      REQUIRE(division.shard % division.slice == 0);
      REQUIRE(division.slice % fsdp::layout_alignment == 0);
      REQUIRE(division.shard / division.slice <= world / shards);  // each replica has one, or none
      REQUIRE(division.padded - elements < division.slice * shards);
    }
  }
}

TEST_CASE("units of many ranks are padded for the ranks that shard them") {
  constexpr int ranks = 16'384;
  CHECK(fsdp::Division(65'536, ranks, 8).padded == 65'536);
  CHECK(fsdp::Division(65'536, ranks, 1).padded == 65'536);
  CHECK(fsdp::Division(65'536, ranks, ranks).padded == 64 * ranks);  // nothing less divides, in runs of 64
  constexpr std::int64_t block = 12 * 768 * 768 + 13 * 768;          // of GPT-2
  CHECK(fsdp::Division(block, ranks, 8).padded - block < 8 * 448);
  CHECK(fsdp::Division(block, ranks, 1).padded - block < 448);
  CHECK(fsdp::Division(block, ranks, ranks).padded == 448 * ranks);
}

TEST_CASE("the segments of all shards are the tensors, each element once") {
  std::mt19937 random(11);
  for (int trial = 0; trial < 300; ++trial) {
    int const world = 1 + static_cast<int>(random() % 9), shards = divisor(random, world);
    auto const layout = random_layout(random, world, shards);
    std::vector<std::vector<int>> covered;
    for (auto const& tensor : layout.tensors()) covered.emplace_back(static_cast<std::size_t>(tensor.numel), 0);
    for (int rank = 0; rank < shards; ++rank) {
      auto const shard = fsdp::shard_range(layout.padded(), shards, rank);
      REQUIRE(shard.begin % fsdp::layout_alignment == 0);
      for (auto const& part : layout.segments(shard)) {
        auto const& tensor = layout.tensors()[part.tensor];
        REQUIRE(part.count > 0);
        REQUIRE(shard.begin + part.offset == tensor.offset + part.first);
        REQUIRE(part.offset + part.count <= shard.size());
        for (std::int64_t i = part.first; i < part.first + part.count; ++i)
          ++covered[part.tensor][static_cast<std::size_t>(i)];
      }
    }
    for (auto const& tensor : covered)
      for (auto const times : tensor) REQUIRE(times == 1);
  }
}

TEST_CASE("a name that is there already is the same storage; saying anything else of it is an error") {
  fsdp::FlatLayout layout;
  auto const first = layout.add({"wte", {5, 7}, 0, 0, true, {}});
  layout.add({"other", {3}, 0, 0, true, {}});
  CHECK(layout.add({"wte", {5, 7}, 0, 0, true, {}}) == first);
  CHECK(layout.numel() == 38);
  CHECK_THROWS_AS(layout.add({"wte", {7, 5}, 0, 0, true, {}}), fsdp::UsageError);
  CHECK_THROWS_AS(layout.add({"wte", {5, 7}, 0, 0, false, {}}), fsdp::UsageError);
  CHECK_THROWS_AS(layout.add({"wte", {5, 7}, 0, 0, true, fsdp::init::ones}), fsdp::UsageError);
  CHECK_THROWS_AS(layout.add({"negative", {4, -1}, 0, 0, true, {}}), fsdp::UsageError);
}

TEST_CASE("a tensor without elements takes no room, and is in no segment") {
  fsdp::FlatLayout layout;
  layout.add({"none", {4, 0}, 0, 0, true, {}});
  layout.add({"some", {3}, 0, 0, true, {}});
  layout.add({"none more", {0}, 0, 0, true, {}});
  layout.seal(1, 1);
  CHECK(layout.numel() == 3);
  CHECK(layout.padded() == 64);
  auto const parts = layout.segments({0, 64});
  REQUIRE(parts.size() == 1);
  CHECK(parts[0].tensor == 1);
  CHECK(layout.padding() == std::vector<fsdp::Range>{{3, 64}});
}

TEST_CASE("ranges intersect as sets do") {
  CHECK(fsdp::intersect({0, 10}, {5, 20}) == fsdp::Range{5, 10});
  CHECK(fsdp::intersect({0, 10}, {10, 20}).empty());
  CHECK(fsdp::intersect({15, 20}, {0, 10}).empty());
  CHECK(fsdp::intersect({0, 10}, {2, 3}) == fsdp::Range{2, 3});
}

TEST_CASE("buckets cover all gradients once, the first one smaller") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::int64_t> ends;
    std::int64_t end = 0;
    for (unsigned i = 0; i < 1 + random() % 12; ++i)
      ends.push_back(end += 64 * static_cast<std::int64_t>(1 + random() % 50));
    auto const bytes = static_cast<std::int64_t>(1 + random() % 20000);
    auto const first = static_cast<std::int64_t>(1 + random() % 5000);
    auto const buckets = fsdp::make_buckets(ends, 4, bytes, first);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < buckets.size(); ++i) {
      REQUIRE(buckets[i].begin == at);
      REQUIRE(buckets[i].size() > 0);
      REQUIRE(buckets[i].size() * 4 <= fsdp::align_up(i == 0 ? first : bytes, 256));
      at = buckets[i].end;
    }
    REQUIRE(at == end);
    REQUIRE(fsdp::make_buckets(ends, 4, 0, first).size() == ends.size());
  }
}

TEST_CASE("the plan of GPT-2 124M under FullShard on eight ranks") {
  // 12 blocks of 7,077,888 + 2 * 768 elements without biases, and a root of (50257 + 1024 + 1) * 768.
  fsdp::MemoryPlanInput input;
  std::int64_t const block = fsdp::align_up(12 * 768 * 768 + 2 * 768, 512),
                     root = fsdp::align_up((50257 + 1024 + 1) * 768, 512);
  input.units.push_back({root});
  input.uses.push_back(0);
  for (std::size_t i = 1; i <= 12; ++i) {
    input.units.push_back({block});
    input.uses.push_back(i);
  }
  input.uses.push_back(0);  // the head is tied to the embedding
  input.shards = 8;
  auto const plan = fsdp::memory_plan(input);
  auto const P = (12 * block + root) * 4;
  CHECK(plan.rest() == 4 * P / 8);
  CHECK(plan.reserved() == 4 * P / 8 + 4 * block * 4 + 2 * root * 4);
  input.shards = 1;
  CHECK(fsdp::memory_plan(input).reserved() == 4 * P);
}
