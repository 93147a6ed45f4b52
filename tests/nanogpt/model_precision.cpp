// SPDX-License-Identifier: Apache-2.0
// The model in bf16 with fp32 reduction and fp32 master weights, on the host's plain products: what a GPU runs, checked
// without one.
// full-run: [curves]
// skip-sanitizers
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fsdp/host.hpp"
#include "tests/catch.hpp"
#include "tests/nanogpt/training.hpp"
#include "transformer/math/gemm_host.hpp"

namespace {

using model_test::TrainingRun;
fsdp::host::Device const host;

template <class P>
model_test::Outcome train(fsdp::ShardingStrategy const& strategy, TrainingRun const& run) {
  return model_test::train<P>(strategy, host, run);
}

}  // namespace

TEST_CASE("bf16 trains as fp32 does", "[nanogpt][model][precision]") {
  TrainingRun run;
  run.steps = 30;
  run.lr = 1e-3f;
  run.interrupt = true;
  auto const narrow = train<fsdp::Bf16>(fsdp::FullShard{}, run), wide = train<fsdp::Fp32>(fsdp::FullShard{}, run);
  // One rounding of 2^-9 hits every value that bf16 keeps; logits of about 1 go through about ten of them. A loss is a
  // mean over 32 rows of them, so it moves by less than one: 2^-8 leaves room for what 30 small steps make of it.
  model_test::check_alike(narrow, wide, 0x1p-8, 10 * 0x1p-9f);
  CHECK(model_test::loss_difference(narrow, wide) > 0x1p-20);  // it is another precision
}

TEST_CASE("masters keep more than bf16 holds", "[nanogpt][model][precision]") {
  TrainingRun run;
  run.steps = 2;
  auto const weights = train<fsdp::Bf16>(fsdp::FullShard{}, run).weights;
  std::size_t finer = 0;
  for (auto const weight : weights)
    if (static_cast<float>(fsdp::bf16(weight)) != weight) ++finer;
  CHECK(finer > weights.size() * 9 / 10);
}

TEST_CASE("strategies train the model bit by bit alike in bf16", "[nanogpt][model][precision]") {
  TrainingRun run;
  run.steps = 4;
  run.interrupt = true;
  for (int const ranks : {2, 4}) {
    CAPTURE(ranks);
    run.ranks = ranks;
    auto const expected = train<fsdp::Bf16>(fsdp::NoShard{}, run);
    CHECK(train<fsdp::Bf16>(fsdp::FullShard{}, run) == expected);
    CHECK(train<fsdp::Bf16>(fsdp::ShardGradOp{}, run) == expected);
    run.shard_group = 2;
    CHECK(train<fsdp::Bf16>(fsdp::HybridShard<>{}, run) == expected);
    run.shard_group = 0;
  }
}

TEST_CASE("a discarded loss does not enter the next", "[nanogpt][model]") {
  fsdp::local::run(1, host, [](fsdp::local::Communicator<fsdp::host::Device> comm) {
    using Engine = fsdp::Engine<fsdp::local::Communicator<fsdp::host::Device>, fsdp::Bf16>;
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::FullShard{});
    nanogpt::Gpt<Engine> model(engine, {1, 1, 16, 8, 11, 0.0f, false}, 1, 8);
    std::vector<std::int32_t> const tokens(8, 3);
    auto const pass = [&] { model.forward_backward(tokens.data(), tokens.data()); };
    pass();
    double const once = model.read_loss();
    pass();
    model.discard_loss();
    pass();
    CHECK(model.read_loss() == once);
    CHECK(once > 0);
  });
}

TEST_CASE("bf16's losses follow fp32's over 500 steps of real text", "[.][curves]") {
  char const* const data = std::getenv("FSDP_TEST_DATA");
  if (data == nullptr) {
    WARN("skipped: FSDP_TEST_DATA is not set");
    return;
  }
  std::ifstream file(std::string(data) + "/tinyshakespeare.txt", std::ios::binary);
  std::string const text{std::istreambuf_iterator<char>(file), {}};
  std::map<char, std::int32_t> ids;
  for (char const symbol : text) ids.try_emplace(symbol, 0);
  for (std::int32_t next = 0; auto& [symbol, id] : ids) id = next++;
  REQUIRE(ids.size() == 65);

  TrainingRun run;
  run.steps = 500;
  run.lr = 1e-3f;
  run.batch = 12;
  run.config = {2, 2, 64, 32, 65, 0.0f, false};
  for (char const symbol : text) run.text.push_back(ids.at(symbol));
  auto const wide = train<fsdp::Fp32>(fsdp::FullShard{}, run).losses,
             narrow = train<fsdp::Bf16>(fsdp::FullShard{}, run).losses;
  REQUIRE(wide.size() == 500);
  REQUIRE(narrow.size() == 500);
  std::printf("  steps    fp32    bf16  relative\n");
  for (std::size_t first = 0; first < 500; first += 50) {
    double a = 0, b = 0;
    for (auto i = first; i < first + 50; ++i) a += wide[i] / 50, b += narrow[i] / 50;
    std::printf("%3zu-%3zu  %.4f  %.4f  %+.1e\n", first, first + 49, a, b, b / a - 1);
    CHECK(std::abs(b / a - 1) < 0x1p-8);  // as above; a mistake (a sum in bf16, a mask) moves it by percents
  }
  CHECK(wide.front() > 4.0);  // ln 65 = 4.17
  CHECK(narrow.back() < 2.7);
}
