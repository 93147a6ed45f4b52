// SPDX-License-Identifier: Apache-2.0
// An exception out of backward() on all ranks is recovered; on one rank it ends the run, which names it.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
#include <string>
#include <utility>
#include <vector>

#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/libtorch/watched.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using namespace networks;

/// Weights after 4 steps on 2 ranks.
/// @param where  where a pass throws that is begun before step 2; nowhere: no such pass
enum class Where { nowhere, forward, backward };
Result train(Network const& network, fsdp::ShardingStrategy const& strategy, Settings const& settings, Where where) {
  Result result;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    Trainer<Comm> trainer(std::move(comm), network, strategy, settings);
    for (auto& unit : trainer.units)
      if (unit->kind == "throws")
        unit->after = [&](Tensor const& x) {
          if (Watched::in_backward && where == Where::forward) boom();
          return Watched::apply(x);
        };
    std::vector<double> losses;
    std::vector<Named> gradients;
    for (int step = 0; step < 4; ++step) {
      if (step == 2 && where != Where::nowhere) {
        Watched::in_backward = boom;
        std::string said;
        try {
          trainer.backward(7);
        } catch (std::exception const& error) {
          said = error.what();
        }
        Watched::in_backward = nullptr;
        RANK_CHECK(said.find("boom in backward") != said.npos);
        trainer.sharder.discard_gradients();
      }
      losses.push_back(trainer.backward(step));
      gradients.push_back(trainer.exported(true));
      trainer.step();
    }
    auto parameters = trainer.exported(false);
    if (trainer.engine.rank() == 0) result = {losses, gradients, parameters};
  });
  CHECK_RANKS();
  return result;
}

}  // namespace

TEST_CASE("after an exception out of forward or backward on all ranks, training goes on as if the pass had not been") {
  for (std::size_t const unit : {0u, 3u, 5u}) {
    auto const network = with_throwing_unit(unit);
    for (auto const& strategy : strategies)
      for (int const micro_steps : {1, 2}) {
        Settings const settings{.micro_steps = micro_steps};
        auto const expected = train(network, strategy, settings, Where::nowhere);
        for (auto const where : {Where::forward, Where::backward}) {
          INFO("unit " << unit << ", " << strategy.name << ", " << micro_steps << " micro-steps, "
                       << static_cast<int>(where));
          auto const result = train(network, strategy, settings, where);
          CHECK(result.losses == expected.losses);
          auto const apart = difference(expected, result);
          CHECK(apart.same_tensors);
          CHECK(apart.equal_gradients);
          CHECK(apart.parameter == 0.0);
        }
      }
  }
}

TEST_CASE("until gradients are discarded, what would use half a backward pass is refused") {
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    Trainer<Comm> trainer(std::move(comm), with_throwing_unit(2), fsdp::FullShard{}, {});
    trainer.units[2]->after = [](Tensor const& x) { return Watched::apply(x); };
    trainer.make_optimizer();
    Watched::in_backward = boom;
    auto const loss = trainer.loss(0);
    CHECK_THROWS(loss.backward());
    Watched::in_backward = nullptr;
    CHECK_THROWS_AS(trainer.adamw->step(), fsdp::UsageError);
    CHECK_THROWS_AS(trainer.units[0](torch::ones({rows, width}), Tensor()), fsdp::UsageError);
    CHECK_THROWS_AS(trainer.engine.discard_gradients(), fsdp::UsageError);  // a use is open
    trainer.sharder.discard_gradients();
    CHECK(fault(difference(train_plain(trainer.network, {}), trainer.train())) == "");
  });
}

TEST_CASE("an exception out of backward on one rank ends the run with its text, and names the rank to the others") {
  std::vector<std::string> said(3);
  std::string thrown;
  try {
    fsdp::local::run(3, fsdp::host::Device{}, [&](Comm comm) {
      auto const rank = static_cast<std::size_t>(comm.rank());
      Trainer<Comm> trainer(std::move(comm), with_throwing_unit(3), fsdp::FullShard{}, {});
      trainer.units[3]->after = [](Tensor const& x) { return Watched::apply(x); };
      try {
        for (int step = 0; step < 3; ++step) {
          Watched::in_backward = nullptr;
          if (step == 1 && rank == 1) Watched::in_backward = boom;
          trainer.backward(step);
          trainer.step();
        }
      } catch (std::exception const& error) {
        Watched::in_backward = nullptr;
        said[rank] = error.what();
        throw;
      }
    });
  } catch (std::exception const& error) {
    thrown = error.what();
  }
  INFO(thrown << "\n" << said[0] << "\n" << said[1] << "\n" << said[2]);
  CHECK(thrown.find("boom in backward") != thrown.npos);
  CHECK(said[1].find("boom in backward") != said[1].npos);
  for (std::size_t const other : {0u, 2u}) {
    CHECK(said[other].find("rank 1") != said[other].npos);
    CHECK(said[other].find("boom in backward") != said[other].npos);
  }
}
