// SPDX-License-Identifier: Apache-2.0
// Documents as rows: the index beside token files, padding, and batches and weights that do not depend on how ranks and
// micro-steps share them.
// skip-tsan
// links: transformer_data
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/batch_source.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/data/prepare.hpp"
#include "transformer/data/row_index.hpp"
#include "transformer/tokenizer/tokenizer.hpp"

namespace {

using namespace transformer;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

constexpr std::int32_t padding = -1;

/// Tokens are bytes plus 3; 1 begins a text, 2 ends one.
class Bytes : public Tokenizer {
 public:
  std::int64_t size() const override { return 259; }
  std::optional<std::int64_t> end_of_text() const override { return 2; }
  TextTemplate text_template() const override { return {{1}, {}}; }
  void append(std::string_view text, std::vector<std::int64_t>& ids, WordCache&) const override {
    for (char const letter : text) ids.push_back(3 + static_cast<unsigned char>(letter));
  }
  std::string decode(std::span<std::int64_t const> ids) const override {
    std::string text;
    for (auto const id : ids)
      if (checked(id) > 2) text += static_cast<char>(id - 3);
    return text;
  }
  std::size_t last_cut(std::string_view text) const override { return text.size(); }
};

struct Prepared {
  Folder folder;
  PreparedData data;
  std::optional<Dataset> opened;

  Dataset const& dataset() const { return *opened; }
};

/// @param train, val  documents
std::unique_ptr<Prepared> prepared(std::vector<std::string> const& train, std::vector<std::string> const& val,
                                   bool ends_rows = false, int threads = 2, std::size_t piece_bytes = 64,
                                   std::shared_ptr<Tokenizer const> tokenizer = std::make_shared<Bytes>()) {
  auto made = std::make_unique<Prepared>();
  auto const lines = [&](std::string const& name, std::vector<std::string> const& texts) {
    std::string all;
    for (auto const& text : texts) all += "{\"text\": \"" + text + "\"}\n";
    return made->folder.file(name, all);
  };
  PrepareOptions options;
  options.data = lines("train.jsonl", train);
  options.val_data = lines("val.jsonl", val);
  options.val_fraction = 0;
  options.folder = made->folder.path / "data";
  options.tokenizer = std::move(tokenizer);
  options.tokenizer_files = {made->folder.file("tokenizer.model", "a file")};
  options.ends_rows = ends_rows;
  options.threads = threads;
  options.piece_bytes = piece_bytes;
  made->data = prepare_data(options);
  auto const place = (made->folder.path / "data").string();
  made->opened = open_dataset({"", place, place});
  return made;
}

std::vector<std::string> texts(int count, int longest) {
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i)
    all.push_back(std::string(static_cast<std::size_t>(1 + (i * 7 + 3) % longest), static_cast<char>('a' + i % 26)));
  return all;
}

/// @param steps  micro-steps of all ranks
BatchSource source_of(Dataset const& dataset, std::int64_t ranks, std::int64_t steps, std::int64_t batch,
                      std::int64_t block) {
  BatchSource source;
  source.dataset = &dataset;
  source.vocab_size = 259;
  source.seed = 5;
  source.ranks = ranks;
  source.gradient_accumulation_steps = steps;
  source.batch_size = batch;
  source.block_size = block;
  return source;
}

using Row = std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>;

}  // namespace

TEST_CASE("each document is a row: the token that begins texts, its own, padding without targets") {
  auto const made = prepared({"abc", "", "z", "klmnopqrst"}, {"xy"});
  CHECK(made->data.has_rows);
  CHECK(made->data.documents == 4);
  CHECK(made->data.empty == 1);
  CHECK(made->dataset().meta.has_rows);
  auto const source = source_of(made->dataset(), 1, 1, 1, 5);
  std::map<std::int32_t, Row> rows;  // by second token
  for (std::int64_t iteration = 0; iteration < 3; ++iteration) {
    std::vector<std::int32_t> inputs(5), targets(5);
    source.read_training_batch(iteration, 0, inputs, targets);
    rows[targets[0]] = {inputs, targets};
  }
  REQUIRE(rows.size() == 3);
  auto const id = [](char letter) { return 3 + static_cast<std::int32_t>(letter); };
  CHECK(rows[id('a')] == Row{{1, id('a'), id('b'), 0, 0}, {id('a'), id('b'), id('c'), padding, padding}});
  CHECK(rows[id('z')] == Row{{1, 0, 0, 0, 0}, {id('z'), padding, padding, padding, padding}});
  CHECK(rows[id('k')] == Row{{1, id('k'), id('l'), id('m'), id('n')}, {id('k'), id('l'), id('m'), id('n'), id('o')}});
  CHECK(made->dataset().rows(Split::train)->count_cut(5) == 1);
  CHECK(made->dataset().rows(Split::train)->count_cut(10) == 0);
}

TEST_CASE("documents that have nothing to predict are no rows") {
  /// Without a token that begins texts.
  class Plain : public Bytes {
   public:
    TextTemplate text_template() const override { return {}; }
  };
  CHECK(prepared({"", "a", "bc"}, {"xy"}, false)->data.empty == 1);
  CHECK(prepared({"", "a", "bc"}, {"xy"}, true)->data.empty == 1);
  CHECK(prepared({"", "a", "bc"}, {"xy"}, false, 2, 64, std::make_shared<Plain>())->data.empty == 2);
  CHECK(prepared({"", "a", "bc"}, {"xy"}, true, 2, 64, std::make_shared<Plain>())->data.empty == 1);
}

TEST_CASE("rows end with the end-of-text token if asked") {
  auto const made = prepared({"ab", "c"}, {"x"}, true);
  auto const& tokens = made->dataset().train.file(0);
  std::vector<std::int64_t> all;
  for (std::int64_t i = 0; i < tokens.size(); ++i) all.push_back(tokens.at(i));
  CHECK(all == std::vector<std::int64_t>{1, 3 + 'a', 3 + 'b', 2, 1, 3 + 'c', 2});
  CHECK(made->dataset().rows(Split::train)->sizes()[0] == 2);
}

TEST_CASE("the tokenizer's template stands around each row, and ends it once") {
  /// Two tokens before a text, and the end-of-text token behind it.
  class Framed : public Bytes {
   public:
    TextTemplate text_template() const override { return {{1, 0}, {2}}; }
  };
  for (bool const ends_rows : {false, true}) {
    auto const made = prepared({"ab", "", "c"}, {"x"}, ends_rows, 2, 64, std::make_shared<Framed>());
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < made->dataset().train.file(0).size(); ++i)
      all.push_back(made->dataset().train.file(0).at(i));
    CHECK(all == std::vector<std::int64_t>{1, 0, 3 + 'a', 3 + 'b', 2, 1, 0, 3 + 'c', 2});
  }
}

TEST_CASE("markers in documents are tokens, whatever the pieces") {
  for (std::size_t const piece : {5u, 64u}) {
    auto const made = prepared({"a<|endoftext|>b", "<|endoftext|", "c<|endoftext|>"}, {"x"}, false, 2, piece);
    std::vector<std::int64_t> all;
    for (std::int64_t i = 0; i < made->dataset().train.file(0).size(); ++i)
      all.push_back(made->dataset().train.file(0).at(i));
    std::vector<std::int64_t> expected{1, 3 + 'a', 2, 3 + 'b', 1};
    for (char const letter : std::string("<|endoftext|")) expected.push_back(3 + letter);
    expected.insert(expected.end(), {1, 3 + 'c', 2});
    CHECK(all == expected);
  }
}

TEST_CASE("rows do not depend on threads and pieces") {
  auto const documents = texts(300, 90);
  auto const one = prepared(documents, {"v"}, false, 1, 1 << 20);
  for (std::size_t const piece : {7u, 100u, 5000u}) {
    auto const other = prepared(documents, {"v"}, false, 3, piece);
    CHECK(
        std::ranges::equal(one->dataset().rows(Split::train)->bytes(0), other->dataset().rows(Split::train)->bytes(0)));
    CHECK(std::ranges::equal(one->dataset().train.file(0).tokens(), other->dataset().train.file(0).tokens()));
  }
}

TEST_CASE("the rows of an iteration and their weight do not depend on how ranks and micro-steps share them") {
  auto const made = prepared(texts(37, 23), texts(9, 23));
  std::int64_t const block = 16;
  bool const random = GENERATE(false, true);
  for (std::int64_t const iteration : {0, 1, 4, 11}) {
    std::vector<Row> expected;
    double expected_weight = 0;
    for (auto const& [ranks, steps, batch] : {std::array{1, 1, 8},
                                              {1, 2, 4},
                                              {2, 2, 4},
                                              {2, 4, 2},
                                              {4, 4, 2},
                                              {1, 8, 1},
                                              {3, 4, 2},
                                              {3, 8, 1},
                                              {5, 8, 1},
                                              {3, 2, 4},
                                              {2, 1, 8}}) {
      INFO("iteration " << iteration << ", ranks " << ranks << ", micro-steps of all of them " << steps);
      std::vector<Row> rows;
      double loss = 0;  // of a model whose loss at each target is the target's id
      std::int64_t sum = 0, targets_seen = 0;
      auto const turns = source_of(made->dataset(), ranks, steps, batch, block).micro_steps();
      for (std::int64_t micro = 0; micro < turns; ++micro) {
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          auto source = source_of(made->dataset(), ranks, steps, batch, block);
          source.rank = rank;
          source.random_windows = random;
          std::vector<std::int32_t> inputs(static_cast<std::size_t>(batch * block)), targets(inputs.size());
          source.read_training_batch(iteration, micro, inputs, targets);
          double mean = 0;
          for (auto const target : targets) {
            if (target == padding) continue;
            mean += target;
            sum += target, ++targets_seen;
          }
          mean /= static_cast<double>(batch * block);
          loss += source.training_weight(iteration) * mean / static_cast<double>(ranks);
          if (!source.has_sequences(micro)) {
            CHECK(mean == 0);
            continue;
          }
          for (std::int64_t i = 0; i < batch; ++i)
            rows.emplace_back(std::vector(inputs.begin() + i * block, inputs.begin() + (i + 1) * block),
                              std::vector(targets.begin() + i * block, targets.begin() + (i + 1) * block));
        }
      }
      auto const exact = static_cast<double>(sum) / static_cast<double>(targets_seen);
      CHECK(std::abs(loss - exact) <= 1e-13 * exact);
      if (expected.empty()) expected = rows, expected_weight = loss;
      CHECK(rows == expected);
      CHECK(std::abs(loss - expected_weight) <= 1e-13 * expected_weight);
    }
  }
}

TEST_CASE("an epoch meets each row once, over all files") {
  auto const made = prepared(texts(23, 9), texts(2, 5));
  auto const source = source_of(made->dataset(), 1, 1, 1, 64);
  std::map<std::vector<std::int32_t>, int> seen;
  for (std::int64_t iteration = 0; iteration < 46; ++iteration) {
    std::vector<std::int32_t> inputs(64), targets(64);
    source.read_training_batch(iteration, 0, inputs, targets);
    ++seen[targets];
  }
  CHECK(seen.size() == 23);
  for (auto const& [row, count] : seen) CHECK(count == 2);
}

TEST_CASE("the loss of an evaluation is the mean over its targets") {
  auto const made = prepared(texts(5, 9), texts(13, 21));
  for (std::int64_t const ranks : {1, 2}) {
    std::int64_t const batches = 3, batch = 2, block = 8;
    double loss = 0;
    std::int64_t sum = 0, targets_seen = 0;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      auto source = source_of(made->dataset(), ranks, 1, batch, block);
      source.rank = rank;
      auto const weight = source.evaluation_weight(Split::val, 6, batches);
      for (std::int64_t k = 0; k < batches; ++k) {
        std::vector<std::int32_t> inputs(static_cast<std::size_t>(batch * block)), targets(inputs.size());
        source.read_evaluation_batch(Split::val, 6 + k, inputs, targets);
        double mean = 0;
        for (auto const target : targets)
          if (target != padding) mean += target, sum += target, ++targets_seen;
        loss += weight * mean / static_cast<double>(batch * block) / static_cast<double>(batches * ranks);
      }
    }
    auto const exact = static_cast<double>(sum) / static_cast<double>(targets_seen);
    CHECK(std::abs(loss - exact) <= 1e-13 * exact);
  }
}

TEST_CASE("files of rows that do not fit are refused by name") {
  auto const made = prepared({"abc", "de"}, {"xy"});
  auto const place = made->folder.path / "data";
  auto const open = [&] {
    return what([&] { static_cast<void>(open_dataset({"", place.string(), place.string()})); });
  };
  auto const rows = place / "train.rows";
  std::ifstream file(rows, std::ios::binary);
  std::string const good{std::istreambuf_iterator<char>(file), {}};
  REQUIRE(good.size() == 16);
  auto const write = [&](std::string const& bytes) { std::ofstream(rows, std::ios::binary) << bytes; };
  CHECK_NOTHROW(open_dataset({"", place.string(), place.string()}));
  write(good.substr(0, 15));
  CHECK(has(open(), "train.rows': expected rows of 8 bytes, the last of which ends at token 7, got 15 bytes"));
  write(good.substr(0, 8));
  CHECK(has(open(), "got one that ends at 4"));
  write("");
  CHECK(has(open(), "got 0 bytes"));
  std::filesystem::remove(rows);
  CHECK(has(open(), "is missing, the file of rows of"));
  // Ends that go back are found when the row is read.
  write(std::string(1, '\x06') + good.substr(1));
  auto const dataset = open_dataset({"", place.string(), place.string()});
  CHECK(has(what([&] { static_cast<void>(dataset.rows(Split::train)->at(0, 1)); }),
            "row 1 has tokens 6 to 7 of 7: expected two or more"));
}
