// SPDX-License-Identifier: Apache-2.0
// Which sequences are trained on: permutations, epochs, and batches that do not depend on who computes them.
// skip-tsan
// links: nanogpt_data
#include "batch_source.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "data.hpp"
#include "tests/catch.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace nanogpt;
using Folder = fsdp::testing::TemporaryFolder;

/// A data set whose token at i is i, so that a sequence tells where it begins. At most 65,535 tokens a split.
Dataset counting_dataset(Folder const& folder, int train, int val) {
  auto const bytes = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += {static_cast<char>(i & 0xff), static_cast<char>(i >> 8)};
    return text;
  };
  return {Meta{}, TokenFile(folder.file("train.bin", bytes(train)), 2),
          TokenFile(folder.file("val.bin", bytes(val)), 2)};
}

struct Share {
  std::int64_t ranks, micro_steps, batch_size;
};

/// Starts of all sequences of one iteration, in the order of ranks and micro-steps.
template <class Fill>
std::vector<std::int32_t> starts(BatchSource source, Share const& split, Fill fill) {
  std::vector<std::int32_t> all;
  for (std::int64_t micro = 0; micro < split.micro_steps; ++micro) {
    for (std::int64_t rank = 0; rank < split.ranks; ++rank) {
      source.rank = rank;
      source.ranks = split.ranks;
      source.micro_steps = split.micro_steps;
      source.batch_size = split.batch_size;
      auto const block = static_cast<std::size_t>(source.block_size);
      std::vector<std::int32_t> x(static_cast<std::size_t>(split.batch_size) * block), y(x.size());
      fill(source, micro, x, y);
      for (std::size_t i = 0; i < x.size(); ++i) {
        REQUIRE(y[i] == x[i] + 1);
        if (i % block != 0) REQUIRE(x[i] == x[i - 1] + 1);
      }
      for (std::size_t i = 0; i < x.size(); i += block) all.push_back(x[i]);
    }
  }
  return all;
}

std::vector<std::int32_t> training(BatchSource const& source, Share const& split, std::int64_t iteration) {
  return starts(source, split, [&](BatchSource const& mine, std::int64_t micro, auto& x, auto& y) {
    mine.training(iteration, micro, x, y);
  });
}

}  // namespace

TEST_CASE("a rotation meets every index once") {
  for (std::int64_t size = 1; size <= 200; ++size) {
    for (std::uint64_t const key : {0u, 1u, 1337u}) {
      Rotation const rotation(size, key);
      std::vector<int> met(static_cast<std::size_t>(size));
      for (std::int64_t i = 0; i < size; ++i) {
        auto const image = rotation(i);
        REQUIRE((image >= 0 && image < size));
        ++met[static_cast<std::size_t>(image)];
      }
      CHECK(std::count(met.begin(), met.end(), 1) == size);
    }
  }
  std::int64_t const large = (std::int64_t{1} << 31) - 1;
  for (std::int64_t const i : {std::int64_t{0}, large / 2, large - 1})
    CHECK((Rotation(large, 3)(i) >= 0 && Rotation(large, 3)(i) < large));
}

// k points of the golden rotation leave gaps of at most phi^3 / sqrt(5) / k = 1.894 / k (k just below a Fibonacci
// number is the worst). Random points leave gaps of about ln(k) / k.
TEST_CASE("neighbours of a rotation spread evenly, from a start that the key chooses") {
  std::int64_t const size = 15685;
  for (std::int64_t const k : {5, 12, 64}) {
    std::vector<std::int64_t> points;
    for (std::int64_t i = 0; i < k; ++i) points.push_back(Rotation(size, 9)(1000 + i));
    std::sort(points.begin(), points.end());
    std::int64_t widest = points.front() + size - points.back();
    for (std::size_t i = 1; i < points.size(); ++i) widest = std::max(widest, points[i] - points[i - 1]);
    CHECK(10 * k * widest < 19 * size);
  }
  CHECK(Rotation(size, 1)(0) != Rotation(size, 2)(0));
}

TEST_CASE("an epoch covers the text once, but for less than two windows at its ends, in another order each time") {
  struct Text {
    std::int64_t tokens, block, batch;
  };
  for (auto const& [tokens, block, batch] : std::vector<Text>{{1000, 8, 1},
                                                              {1001, 8, 7},
                                                              {1007, 8, 12},
                                                              {64, 1, 9},
                                                              {17, 8, 1},
                                                              {16, 8, 2},
                                                              {1003, 64, 14},
                                                              {1003, 64, 15}}) {
    CAPTURE(tokens, block, batch);
    WindowOrder const order(1337, tokens, block, batch);
    std::set<std::vector<std::int64_t>> orders;
    for (std::int64_t epoch = 0; epoch < 20; ++epoch) {
      std::vector<int> met(static_cast<std::size_t>(tokens));
      std::vector<std::int64_t> visits;
      for (std::int64_t i = 0; i < order.windows(); ++i) {
        auto const start = order.start(epoch * order.windows() + i);
        visits.push_back(start);
        REQUIRE((start >= 0 && start + block < tokens));
        for (std::int64_t position = 0; position < block; ++position) ++met[static_cast<std::size_t>(start + position)];
      }
      CHECK(*std::max_element(met.begin(), met.end()) == 1);
      CHECK(std::count(met.begin(), met.end(), 0) < 2 * block);
      orders.insert(visits);
    }
    // Starts and phases are drawn: a few epochs may be equal.
    if (order.windows() > 8) CHECK(orders.size() > 5);
  }
}

TEST_CASE("an iteration draws one window from each stratum of the text") {
  std::int64_t const tokens = 8 * 240 + 9, block = 8, batch = 12;
  WindowOrder const order(7, tokens, block, batch);
  REQUIRE(order.windows() == 240);
  for (std::int64_t iteration = 0; iteration < 50; ++iteration) {
    for (std::int64_t i = 0; i < batch; ++i) {
      auto const start = order.start(iteration * batch + i);
      CHECK(start >= i * 20 * block);
      CHECK(start < (i + 1) * 20 * block + tokens - 240 * block);  // the phase
    }
  }
}

TEST_CASE("every start occurs, and no other, down to a text of one block and one token") {
  std::int64_t const block = 8;
  for (std::int64_t const tokens : {9, 10, 15, 16, 17, 23, 24, 25, 100}) {
    CAPTURE(tokens);
    WindowOrder const order(1, tokens, block, 2);
    std::set<std::int64_t> met;
    for (std::int64_t i = 0; i < 4000; ++i) met.insert(order.start(i));
    CHECK(static_cast<std::int64_t>(met.size()) == tokens - block);
    CHECK(*met.begin() == 0);
    CHECK(*met.rbegin() == tokens - block - 1);
  }
  for (std::int64_t i = 0; i < 20; ++i) CHECK(WindowOrder(1, 9, block, 2).start(i) == 0);
}

TEST_CASE(
    "the global batch is the same for every number of ranks and micro-steps, and ranks share no window of an epoch") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 8 * 120 + 5, 300);
  BatchSource source;
  source.dataset = &dataset;
  source.seed = 1337;
  source.block_size = 8;
  std::vector<Share> const splits{{1, 1, 12}, {2, 1, 6}, {1, 2, 6}, {3, 2, 2}, {4, 3, 1}, {2, 6, 1}, {12, 1, 1}};
  WindowOrder const order(1337, dataset.train.size(), 8, 12);
  REQUIRE(order.windows() == 119);  // not a multiple of the batch
  for (std::int64_t iteration = 0; iteration < 25; ++iteration) {
    auto const whole = training(source, splits[0], iteration);
    for (auto const& split : splits) {
      CAPTURE(iteration, split.ranks, split.micro_steps, split.batch_size);
      CHECK(training(source, split, iteration) == whole);
    }
  }
  std::multiset<std::int32_t> drawn;
  for (std::int64_t iteration = 0; iteration < 10; ++iteration)
    for (auto const start : training(source, {4, 1, 3}, iteration)) drawn.insert(start);
  drawn.erase(drawn.find(training(source, splits[0], 9)[11]));  // the first of the next epoch
  CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()).size() == 119);

  auto const first = training(source, splits[0], 0);
  CHECK(training(source, splits[0], 1) != first);
  source.seed = 1338;
  CHECK(training(source, splits[0], 0) != first);
}

TEST_CASE("where windows are no multiple of the batch, its sequences still come from strata of their own") {
  std::int64_t const tokens = 8 * 100 + 9, block = 8, batch = 12;
  WindowOrder const order(7, tokens, block, batch);
  REQUIRE(order.windows() == 100);
  for (std::int64_t first = 0; first + batch <= 100; ++first) {
    std::set<std::int64_t> strata;
    for (std::int64_t i = first; i < first + batch; ++i) strata.insert(i % batch);
    REQUIRE(strata.size() == 12);
    for (std::int64_t i = first; i < first + batch; ++i) {
      auto const stratum = i % batch, begin = stratum * 8 + std::min<std::int64_t>(stratum, 4);
      auto const size = stratum < 4 ? 9 : 8;
      CHECK(order.start(i) >= begin * block);
      CHECK(order.start(i) < (begin + size) * block + block + 1);  // the phase
    }
  }
}

TEST_CASE("random windows: anywhere in the text, the same for every number of ranks and of micro-steps") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 30, 20);
  BatchSource source;
  source.dataset = &dataset;
  source.block_size = 8;
  source.random_windows = true;
  std::set<std::int32_t> met;
  bool repeated = false;
  for (std::int64_t iteration = 0; iteration < 40; ++iteration) {
    auto const whole = training(source, {1, 1, 12}, iteration);
    CHECK(training(source, {3, 2, 2}, iteration) == whole);
    std::set<std::int32_t> const different(whole.begin(), whole.end());
    repeated |= different.size() < whole.size();
    met.insert(whole.begin(), whole.end());
  }
  CHECK(met.size() == 22);  // 30 - 8
  CHECK(repeated);
  auto const first = training(source, {1, 1, 12}, 0);
  source.seed = 1;
  CHECK(training(source, {1, 1, 12}, 0) != first);
}

TEST_CASE("a batch larger than an epoch goes on with the next epoch") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 33, 20);
  BatchSource source;
  source.dataset = &dataset;
  source.block_size = 8;
  WindowOrder const order(0, 33, 8, 10);
  REQUIRE(order.windows() == 3);
  auto const batch = training(source, {2, 1, 5}, 0);
  REQUIRE(batch.size() == 10);
  for (std::size_t i = 0; i < batch.size(); ++i) CHECK(batch[i] == order.start(static_cast<std::int64_t>(i)));
}

TEST_CASE("evaluations draw the same sequences for every number of ranks, anywhere in their split") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 100, 40);
  BatchSource source;
  source.dataset = &dataset;
  source.seed = 3;
  source.block_size = 8;
  auto const drawn = [&](Split split, Share const& ranks, std::int64_t batch) {
    return starts(source, ranks, [&](BatchSource const& mine, std::int64_t, auto& x, auto& y) {
      mine.evaluation(split, batch, x, y);
    });
  };
  std::set<std::int32_t> met;
  for (std::int64_t batch = 0; batch < 60; ++batch) {
    auto const whole = drawn(Split::val, {1, 1, 12}, batch);
    CHECK(drawn(Split::val, {2, 1, 6}, batch) == whole);
    CHECK(drawn(Split::val, {3, 1, 4}, batch) == whole);
    met.insert(whole.begin(), whole.end());
  }
  CHECK(met.size() == 32);       // 40 - 8
  std::set<std::int32_t> epoch;  // 4 windows
  for (std::int64_t batch = 0; batch < 4; ++batch)
    epoch.merge(std::set<std::int32_t>{drawn(Split::val, {1, 1, 1}, batch)[0]});
  CHECK(epoch.size() == 4);
  CHECK(drawn(Split::val, {1, 1, 12}, 0) != drawn(Split::val, {1, 1, 12}, 1));
  CHECK(drawn(Split::train, {1, 1, 12}, 0) != drawn(Split::val, {1, 1, 12}, 0));
}

TEST_CASE("without data the tokens are random, inside the vocabulary, and the same for every split of the batch") {
  BatchSource source;
  source.vocab_size = 7;
  source.block_size = 4;
  std::vector<std::int32_t> x(48), y(48), half_x(24), half_y(24);
  source.batch_size = 12;
  source.training(2, 0, x, y);
  CHECK(std::all_of(x.begin(), x.end(), [](auto token) { return token >= 0 && token < 7; }));
  CHECK(std::set<std::int32_t>(x.begin(), x.end()).size() == 7);
  source.batch_size = 6;
  source.ranks = 2;
  for (source.rank = 0; source.rank < 2; ++source.rank) {
    source.training(2, 0, half_x, half_y);
    CHECK(std::equal(half_x.begin(), half_x.end(), x.begin() + 24 * source.rank));
    CHECK(std::equal(half_y.begin(), half_y.end(), y.begin() + 24 * source.rank));
  }
}
