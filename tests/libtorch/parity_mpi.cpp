// SPDX-License-Identifier: Apache-2.0
// Processes: torch modules that an engine shards train as plain torch on the whole batch does; on one rank, with
// torch's optimizer, bit by bit.
// ranks: 1 2 3 4
// needs: LibTorch
// skip-tsan
// skip-asan
// timeout: 900
#include <string>
#include <utility>
#include <vector>

#include "fsdp/mpi.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/libtorch/watched.hpp"
#include "tests/mpi_main.hpp"

namespace {

using Comm = fsdp::mpi::Communicator;
using namespace networks;

Result train(Network const& network, fsdp::ShardingStrategy const& strategy, Settings const& settings) {
  return Trainer<Comm>(Comm{test_environment()}, network, strategy, settings).train();
}
std::vector<fsdp::ShardingStrategy> strategies_of(int ranks) {
  std::vector<fsdp::ShardingStrategy> all(std::begin(strategies), std::end(strategies));
  if (ranks % 2 == 0) {
    all.push_back(fsdp::HybridShard<fsdp::FullShard>{.group = 2});
    all.push_back(fsdp::HybridShard<fsdp::ShardGradOp>{.group = ranks / 2});
  }
  return all;
}
bool is_first() { return test_environment().rank() == 0; }

}  // namespace

TEST_CASE(
    "a GPT in processes trains as plain torch does, with all strategies, clipping, and evaluation between steps") {
  for (auto const& network : {named("gpt"), named("tied gpt")})
    for (bool const torch_optimizer : {false, true})
      for (double const clip : {0.0, 0.5}) {
        Settings const settings{.steps = 6,
                                .clip = clip,
                                .torch_optimizer = torch_optimizer,
                                .evaluates = clip > 0,
                                .options = {.prefetch = 1}};
        auto const expected = train_plain(network, settings);
        for (auto const& strategy : strategies_of(test_environment().size())) {
          auto const result = train(network, strategy, settings);
          INFO(network.name << ", " << strategy.name << ", clip " << clip << ", torch's optimizer " << torch_optimizer);
          if (is_first()) CHECK(fault(difference(expected, result)) == "");
        }
      }
}

TEST_CASE("micro-steps under no_sync in processes, and prefetch") {
  for (auto const& network : {named("gpt"), named("tied gpt"), named("six layers")})
    for (int const prefetch : {0, 1, 2}) {
      Settings const settings{.steps = 3, .micro_steps = 3, .clip = 1.0, .options = {.prefetch = prefetch}};
      auto const expected = train_plain(network, settings);
      for (auto const& strategy : strategies) {
        auto const result = train(network, strategy, settings);
        INFO(network.name << ", " << strategy.name << ", prefetch " << prefetch);
        if (is_first()) CHECK(fault(difference(expected, result)) == "");
      }
    }
}

TEST_CASE("one rank with torch's AdamW is bitwise equal to plain torch over 20 steps") {
  if (test_environment().size() > 1) return;
  for (auto const& network : {named("gpt"), named("tied gpt"), named("convolution, lstm, sparse embedding")}) {
    Settings const settings{.steps = 20, .torch_optimizer = true};
    auto const expected = train_plain(network, settings);
    for (auto const& strategy : strategies) {
      auto const result = train(network, strategy, settings);
      INFO(network.name << ", " << strategy.name);
      CHECK(result.losses == expected.losses);
      auto const apart = difference(expected, result);
      CHECK(apart.same_tensors);
      CHECK(apart.equal_gradients);
      CHECK(apart.parameter == 0.0);
    }
  }
}

TEST_CASE("an exception out of backward in one process ends the training of all, and names its rank") {
  int const ranks = test_environment().size(), throws = ranks - 1;
  if (ranks == 1) return;
  std::string said;
  try {
    Trainer<Comm> trainer(Comm{test_environment()}, with_throwing_unit(3), fsdp::FullShard{}, {});
    trainer.units[3]->after = [](Tensor const& x) { return Watched::apply(x); };
    for (int step = 0; step < 3; ++step) {
      if (step == 1 && test_environment().rank() == throws) Watched::in_backward = boom;
      trainer.backward(step);
      trainer.step();
    }
  } catch (std::exception const& error) {
    said = error.what();
  }
  Watched::in_backward = nullptr;
  INFO(said);
  if (test_environment().rank() == throws)
    CHECK(said.find("boom in backward") != said.npos);
  else
    CHECK(said.find("rank " + std::to_string(throws)) != said.npos);
}
