// SPDX-License-Identifier: Apache-2.0
// Which sequences are trained on: permutations, epochs, and batches that do not depend on who computes them.
// skip-tsan
// links: transformer_data
#include "transformer/data/batch_source.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/dataset.hpp"

namespace {

using namespace transformer;
using Folder = fsdp::testing::TemporaryFolder;

/// uint16 tokens that count from `first` on.
std::string counting(int first, int count) {
  std::string text;
  for (int i = first; i < first + count; ++i) text += {static_cast<char>(i & 0xff), static_cast<char>(i >> 8)};
  return text;
}

/// A data set whose token at i is i, so that a sequence tells where it begins. At most 65,535 tokens a split.
Dataset counting_dataset(Folder const& folder, int train, int val) {
  return {Meta{}, TokenShards({folder.file("train.bin", counting(0, train))}, 2),
          TokenShards({folder.file("val.bin", counting(0, val))}, 2)};
}

/// The order of the windows of one file.
struct OneFile {
  std::array<std::int64_t, 1> tokens;
  std::uint64_t seed;
  std::int64_t block, batch;

  OneFile(std::uint64_t a_seed, std::int64_t all_tokens, std::int64_t block_size, std::int64_t a_batch)
      : tokens{all_tokens}, seed(a_seed), block(block_size), batch(a_batch) {}
  WindowOrder order() const { return {seed, tokens, block, batch}; }
  std::int64_t windows() const { return order().windows(); }
  std::int64_t start(std::int64_t number) const { return order().at(number).start; }
};

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
      source.gradient_accumulation_steps = split.micro_steps * split.ranks;
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
    mine.read_training_batch(iteration, micro, x, y);
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
    OneFile const order(1337, tokens, block, batch);
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
  OneFile const order(7, tokens, block, batch);
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
    OneFile const order(1, tokens, block, 2);
    std::set<std::int64_t> met;
    for (std::int64_t i = 0; i < 4000; ++i) met.insert(order.start(i));
    CHECK(static_cast<std::int64_t>(met.size()) == tokens - block);
    CHECK(*met.begin() == 0);
    CHECK(*met.rbegin() == tokens - block - 1);
  }
  for (std::int64_t i = 0; i < 20; ++i) CHECK(OneFile(1, 9, block, 2).start(i) == 0);
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
  OneFile const order(1337, dataset.train.size(), 8, 12);
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

TEST_CASE(
    "ranks that do not divide an iteration's batches share the same batches; the micro-steps left over have no "
    "targets") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 8 * 120 + 5, 300);
  for (bool const with_data : {true, false}) {
    for (std::int64_t const steps : {1, 2, 4, 5, 7, 12}) {
      BatchSource source;
      source.dataset = with_data ? &dataset : nullptr;
      source.seed = 1337;
      source.block_size = 8;
      source.batch_size = 3;
      source.gradient_accumulation_steps = steps;
      using Batch = std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>;
      std::vector<Batch> expected;  // by one rank
      for (std::int64_t const ranks : {1, 2, 3, 4, 5, 8}) {
        CAPTURE(with_data, steps, ranks);
        source.ranks = ranks;
        CHECK(source.global_batch() == 3 * steps);
        CHECK(source.micro_steps() == (steps % ranks == 0 ? steps / ranks : steps / ranks + 1));
        std::vector<Batch> batches;
        double weight = 0, shares = 0;
        std::int64_t spare = 0;
        for (std::int64_t micro = 0; micro < source.micro_steps(); ++micro) {
          for (source.rank = 0; source.rank < ranks; ++source.rank) {
            Batch batch{std::vector<std::int32_t>(24), std::vector<std::int32_t>(24)};
            source.read_training_batch(3, micro, batch.first, batch.second);
            if (source.has_sequences(micro)) {
              CHECK(source.first_of(micro) == 3 * static_cast<std::int64_t>(batches.size()));
              weight += source.training_weight(3) / static_cast<double>(ranks);
              batches.push_back(batch);
              continue;
            }
            ++spare;
            CHECK(micro + 1 == source.micro_steps());
            CHECK(std::count(batch.second.begin(), batch.second.end(), -1) == 24);
            CHECK(std::any_of(batches.begin(), batches.end(), [&](auto const& b) { return b.first == batch.first; }));
          }
        }
        for (source.rank = 0; source.rank < ranks; ++source.rank) shares += source.share() / static_cast<double>(ranks);
        if (ranks == 1) expected = batches;
        CHECK(batches == expected);
        CHECK(spare == source.micro_steps() * ranks - steps);
        // A sum of at most 12 terms, each rounded a few times.
        CHECK(std::abs(weight - 1) < 1e-14);
        CHECK(std::abs(shares - 1) < 1e-14);
        // Where all ranks have as many, weights are those of a mean, to the bit.
        source.rank = 0;
        if (spare == 0) CHECK(source.training_weight(3) == 1.0 / static_cast<double>(source.micro_steps()));
        if (spare == 0) CHECK(source.share() == 1.0);
      }
    }
  }
}

TEST_CASE("where windows are no multiple of the batch, its sequences still come from strata of their own") {
  std::int64_t const tokens = 8 * 100 + 9, block = 8, batch = 12;
  OneFile const order(7, tokens, block, batch);
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

// Shards count on where the one before has ended, but for a gap: a sequence that crossed would show it.
TEST_CASE("an epoch of several shards meets each of their windows once, and no sequence crosses from one to the next") {
  Folder const folder;
  std::vector<int> const sizes{100, 9, 333, 17, 64};
  int const block = 8;
  std::vector<std::filesystem::path> paths;
  std::map<int, std::size_t> shard_of;  // by token
  int token = 0, windows = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    paths.push_back(folder.file("x_train_" + std::to_string(i) + ".bin", counting(token, sizes[i])));
    for (int k = 0; k < sizes[i]; ++k) shard_of[token + k] = i;
    token += sizes[i] + 1000;
    windows += std::max(1, (sizes[i] - block) / block);
  }
  Dataset const dataset{Meta{}, TokenShards(paths, 2), TokenShards({folder.file("val.bin", counting(0, 40))}, 2)};
  REQUIRE(dataset.train.size() == 523);
  BatchSource source;
  source.dataset = &dataset;
  source.seed = 5;
  source.block_size = block;
  std::int64_t const batch = 6;
  std::set<std::vector<std::int32_t>> orders;
  for (std::int64_t epoch = 0; epoch < 12; ++epoch) {
    std::set<std::int32_t> met;
    std::vector<std::int32_t> visits;
    std::map<std::size_t, int> of_shard;
    for (std::int64_t number = epoch * windows; number < (epoch + 1) * windows; ++number) {
      auto const whole = training(source, {1, 1, batch}, number / batch);  // REQUIREs that tokens count
      auto const start = whole[static_cast<std::size_t>(number % batch)];
      REQUIRE(shard_of.contains(start));
      visits.push_back(start);
      ++of_shard[shard_of[start]];
      for (int k = 0; k < block; ++k) met.insert(start + k);
      if (number % batch == 0) {
        CHECK(training(source, {3, 2, 1}, number / batch) == whole);
        CHECK(training(source, {2, 1, 3}, number / batch) == whole);
      }
    }
    CHECK(met.size() == static_cast<std::size_t>(windows * block));  // none twice
    for (std::size_t i = 0; i < sizes.size(); ++i) CHECK(of_shard[i] == std::max(1, (sizes[i] - block) / block));
    orders.insert(visits);
  }
  CHECK(orders.size() == 12);

  source.random_windows = true;
  std::set<std::int32_t> starts_met;
  for (std::int64_t iteration = 0; iteration < 1500; ++iteration)
    for (auto const start : training(source, {1, 1, 6}, iteration)) starts_met.insert(start);
  CHECK(starts_met.size() == 523 - sizes.size() * block);  // every place of every shard
}

TEST_CASE("one shard has the order of a single file, to the sequence") {
  std::array<std::int64_t, 1> const tokens{8 * 240 + 9};
  WindowOrder const order(7, tokens, 8, 12);
  std::vector<std::int64_t> first;
  for (std::int64_t i = 0; i < 4; ++i) first.push_back(order.at(i).start);
  CHECK(first == std::vector<std::int64_t>{135, 263, 423, 487});
  CHECK(order.at(240 * 3 + 7).start == 1143);  // an epoch of its own
}

TEST_CASE("a token that has appeared outside the vocabulary since the files were checked is named, not trained on") {
  Folder const folder;
  auto const dataset = counting_dataset(folder, 100, 40);
  BatchSource source;
  source.dataset = &dataset;
  source.block_size = 8;
  source.vocab_size = 100;
  std::vector<std::int32_t> x(8), y(8);
  for (std::int64_t i = 0; i < 24; ++i) source.read_training_batch(i, 0, x, y);
  source.vocab_size = 95;  // as if 95 to 99 had been written since
  auto const whats = [&](Split split) {
    return fsdp::testing::what([&] {
      for (std::int64_t i = 0; i < 24; ++i) {
        if (split == Split::val)
          source.read_evaluation_batch(split, i, x, y);
        else
          source.read_training_batch(i, 0, x, y);
        CHECK(std::all_of(y.begin(), y.end(), [](auto token) { return token < 95; }));
      }
    });
  };
  CHECK(
      fsdp::testing::has(whats(Split::train), "/train.bin' has token 95 at position 95, outside the vocabulary of 95"));
  source.vocab_size = 30;
  CHECK(fsdp::testing::has(whats(Split::val), "/val.bin' has token 3"));
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
  OneFile const order(0, 33, 8, 10);
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
      mine.read_evaluation_batch(split, batch, x, y);
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
  source.read_training_batch(2, 0, x, y);
  CHECK(std::all_of(x.begin(), x.end(), [](auto token) { return token >= 0 && token < 7; }));
  CHECK(std::set<std::int32_t>(x.begin(), x.end()).size() == 7);
  source.batch_size = 6;
  source.ranks = source.gradient_accumulation_steps = 2;
  for (source.rank = 0; source.rank < 2; ++source.rank) {
    source.read_training_batch(2, 0, half_x, half_y);
    CHECK(std::equal(half_x.begin(), half_x.end(), x.begin() + 24 * source.rank));
    CHECK(std::equal(half_y.begin(), half_y.end(), y.begin() + 24 * source.rank));
  }
}
