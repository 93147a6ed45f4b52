// SPDX-License-Identifier: Apache-2.0
// A run that is saved continues on other ranks and strategies, with the library's optimizers and with torch's.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
// timeout: 600
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using namespace networks;
using Test = Trainer<Comm>;
using Engine = Test::Engine;

/// Goes on from the checkpoint in `from`, if there is one, and saves after the last step.
Result train(Network const& network, int ranks, fsdp::ShardingStrategy const& strategy, Settings const& settings,
             std::filesystem::path const& folder) {
  Result result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    Test test(std::move(comm), network, strategy, settings);
    test.make_optimizer();
    auto const with = [&](auto& optimizer) {
      if (settings.first_step > 0)
        RANK_CHECK(fsdp::load_latest(test.engine, optimizer, folder)->step == settings.first_step);
      RANK_CHECK(optimizer.steps() == settings.first_step);
      auto own = test.train();
      fsdp::save(test.engine, optimizer, folder);
      if (test.engine.rank() == 0) result = std::move(own);
    };
    if (test.adamw)
      with(*test.adamw);
    else
      with(*test.torch_adamw);
  });
  CHECK_RANKS();
  return result;
}

/// Steps of one of torch's optimizers on shards. @param resumed  saves half-way, and goes on with new objects
template <class Options>
Result train_with(Options const& options, int ranks, bool resumed) {
  using Optimizer = fsdp::libtorch::ShardOptimizer<Engine, Options>;
  Result result;
  result.losses.resize(6);
  fsdp::testing::TemporaryFolder const folder;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    auto const network = named("six layers");
    std::optional<Test> test;
    test.emplace(std::move(comm), network, fsdp::FullShard{}, Settings{});
    auto less = options;
    less.lr(options.lr() / 2);
    auto optimizer =
        std::make_unique<Optimizer>(test->engine, options, std::vector<typename Optimizer::Group>{{"*.bias", less}});
    for (int step = 0; step < 6; ++step) {
      if (resumed && (step == 1 || step == 4)) {
        fsdp::save(test->engine, *optimizer, folder.path);
        // Other moments, which the load replaces.
        test->backward(9);
        optimizer->step();
        fsdp::load_latest(test->engine, *optimizer, folder.path);
      }
      auto const loss = test->backward(step);
      if (test->engine.rank() == 0) result.losses[static_cast<std::size_t>(step)] = loss;
      optimizer->step();
    }
    auto parameters = test->exported(false);
    if (test->engine.rank() == 0) result.parameters = std::move(parameters);
    optimizer.reset();
  });
  return result;
}
template <class Options>
Result train_plain_with(Options const& options) {
  Result result;
  auto const network = named("six layers");
  auto const layers = build(network);
  std::vector<Tensor> weights, biases;
  for (auto const& layer : layers) weights.push_back(layer->linear->weight), biases.push_back(layer->linear->bias);
  auto less = options;
  less.lr(options.lr() / 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<Options>(options));
  groups.emplace_back(biases, std::make_unique<Options>(less));
  typename fsdp::libtorch::OptimizerArrays<Options>::Optimizer optimizer(groups, options);
  for (int step = 0; step < 6; ++step) {
    optimizer.zero_grad();
    auto const [x, y] = batch(network, step);
    auto z = x;
    for (auto const& layer : layers) z = layer->forward(z);
    auto const loss = mean_square(z, y);
    loss.backward();
    result.losses.push_back(loss.template item<double>());
    optimizer.step();
  }
  for (std::size_t i = 0; i < layers.size(); ++i)
    for (auto const& item : layers[i]->named_parameters())
      result.parameters[std::to_string(i) + "." + item.key()] = item.value().detach();
  return result;
}
template <class Options>
void expect_resumes(Options const& options) {
  INFO(fsdp::libtorch::OptimizerArrays<Options>::name());
  auto const alone = train_with(options, 1, false), plain = train_plain_with(options);
  CHECK(alone.losses == plain.losses);
  for (auto const& [name, parameter] : plain.parameters) CHECK(torch::equal(parameter, alone.parameters.at(name)));
  for (int const ranks : {1, 2}) {
    auto const expected = train_with(options, ranks, false), resumed = train_with(options, ranks, true);
    CHECK(resumed.losses == expected.losses);
    for (auto const& [name, parameter] : expected.parameters)
      CHECK(torch::equal(parameter, resumed.parameters.at(name)));
  }
}

}  // namespace

TEST_CASE("saved on 2 ranks with FullShard, a run continues on 3 with ShardGradOp, with the losses of plain torch") {
  for (auto const* const name : {"gpt", "tied gpt"})
    for (bool const torch_optimizer : {false, true}) {
      fsdp::testing::TemporaryFolder const folder;
      auto const network = named(name);
      Settings settings{.steps = 8, .torch_optimizer = torch_optimizer};
      auto const expected = train_plain(network, settings);
      settings.steps = 4;
      auto const first = train(network, 2, fsdp::FullShard{}, settings, folder.path);
      settings.first_step = 4;
      auto const second = train(network, 3, fsdp::ShardGradOp{}, settings, folder.path);
      for (std::size_t step = 0; step < 8; ++step) {
        INFO(name << ", step " << step << ", torch's optimizer " << torch_optimizer);
        auto const loss = step < 4 ? first.losses[step] : second.losses[step - 4];
        CHECK(std::abs(loss - expected.losses[step]) <= loss_tolerance);
      }
      // On as many ranks, bit by bit.
      fsdp::testing::TemporaryFolder const again, whole;
      settings.first_step = 0;
      train(network, 2, fsdp::FullShard{}, settings, again.path);
      settings.first_step = 4;
      auto const resumed = train(network, 2, fsdp::FullShard{}, settings, again.path);
      settings.first_step = 0;
      settings.steps = 8;
      auto const uninterrupted = train(network, 2, fsdp::FullShard{}, settings, whole.path);
      for (std::size_t step = 4; step < 8; ++step) CHECK(resumed.losses[step - 4] == uninterrupted.losses[step]);
      for (auto const& [tensor, values] : uninterrupted.parameters)
        CHECK(torch::equal(values, resumed.parameters.at(tensor)));
    }
}

TEST_CASE("each of torch's element-wise optimizers is on one rank what it is alone, and checkpoints keep its state") {
  namespace optim = torch::optim;
  expect_resumes(optim::AdamWOptions(1e-2).weight_decay(0.1));
  expect_resumes(optim::AdamWOptions(1e-2).amsgrad(true));
  expect_resumes(optim::AdamOptions(1e-2).betas({0.8, 0.99}));
  expect_resumes(optim::SGDOptions(1e-1));
  expect_resumes(optim::SGDOptions(1e-1).momentum(0.9).dampening(0.1));
  expect_resumes(optim::RMSpropOptions(1e-2));
  expect_resumes(optim::RMSpropOptions(1e-2).momentum(0.9).centered(true));
  expect_resumes(optim::RMSpropOptions(1e-2).centered(true));
  expect_resumes(optim::AdagradOptions(1e-2).initial_accumulator_value(0.1));
}

TEST_CASE(
    "torch's optimizers skip a step whose norm is not finite, work with GradScaler and schedules, and by groups") {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    Test test(std::move(comm), named("six layers"), fsdp::FullShard{}, {});
    auto& engine = test.engine;
    fsdp::libtorch::ShardOptimizer adamw{engine, adamw_options()};
    torch::optim::StepLR schedule{adamw.optimizer(), 1, 0.5};
    schedule.step();
    schedule.step();  // the first one is the rate that the schedule began with
    RANK_CHECK(adamw.optimizer().param_groups()[0].options().get_lr() == rate / 2);
    auto const before = test.exported(false);
    (test.loss(0) * std::numeric_limits<float>::infinity()).backward();
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    adamw.step(norm);
    RANK_CHECK(norm.skipped() == 1 && adamw.steps() == 0);
    auto const after = test.exported(false);
    for (auto const& [name, values] : before) RANK_CHECK(torch::equal(values, after.at(name)));
    {
      fsdp::GradScaler scaler{engine, {.init_scale = 1024.0f, .growth_interval = 1}};
      (test.loss(0) * 1024.0f).backward();
      scaler.step(adamw, static_cast<float>(rate));
      RANK_CHECK(adamw.steps() == 1 && scaler.value() == 2048.0f);
      (test.loss(0) * std::numeric_limits<float>::infinity()).backward();
      scaler.step(adamw, static_cast<float>(rate));
      RANK_CHECK(adamw.steps() == 1 && scaler.value() == 1024.0f);
    }
    using Optimizer = fsdp::libtorch::ShardOptimizer<Engine, torch::optim::AdamWOptions>;
    std::string text;
    try {
      Optimizer{engine, adamw_options(), {{"*.baias", adamw_options()}}};
    } catch (std::exception const& error) {
      text = error.what();
    }
    RANK_CHECK(text.find("the pattern '*.baias' matches no tensor that trains") != text.npos);
  });
  CHECK_RANKS();
  std::string text;
  try {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      Test test(std::move(comm), named("six layers"), fsdp::FullShard{}, {});
      auto options = adamw_options();
      if (test.engine.rank() == 1) options.eps(1e-3);
      fsdp::libtorch::ShardOptimizer adamw{test.engine, options};
    });
  } catch (std::exception const& error) {
    text = error.what();
  }
  CHECK(text.find("ranks disagree") != text.npos);
}

TEST_CASE("buffers are saved with rank 0's values, and refused where they do not fit") {
  Network network = named("six layers");
  network.kinds[2] = "norm";
  fsdp::testing::TemporaryFolder const folder;
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    Test test(std::move(comm), network, fsdp::FullShard{}, {});
    test.make_optimizer();
    test.backward(0);
    test.step();
    auto const& norm = test.units[2]->batch_norm;
    auto const mean = norm->running_mean.clone();
    auto const saved = fsdp::libtorch::buffers(test.sharder);
    RANK_CHECK(saved.size() == 3);
    auto const place = fsdp::save(test.engine, *test.adamw, folder.path, {{"buffers", saved}});
    test.backward(1);
    test.step();
    RANK_CHECK(!torch::equal(mean, norm->running_mean));
    auto const loaded = fsdp::load(test.engine, *test.adamw, place);
    fsdp::libtorch::load_buffers(test.sharder, loaded.extra.at("buffers"));
    // Rows differ by rank, so means do; all get rank 0's.
    RANK_CHECK(torch::equal(mean, norm->running_mean) == (test.engine.rank() == 0));
    RANK_CHECK(norm->num_batches_tracked.item<std::int64_t>() == 1);

    auto const refused = [&](fsdp::checkpoint::Json const& json) {
      try {
        fsdp::libtorch::load_buffers(test.sharder, json);
      } catch (fsdp::ConfigError const& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    auto json = saved;
    json.erase("2.bn.running_var");
    RANK_CHECK(refused(json).find("no buffer '2.bn.running_var'") != std::string::npos);
    json = saved;
    json["2.bn.num_batches_tracked"]["type"] = "Float";
    RANK_CHECK(refused(json).find("'2.bn.num_batches_tracked': expected type Long") != std::string::npos);
    json = saved;
    json["2.bn.running_mean"]["bytes"] = "00";
    RANK_CHECK(refused(json).find("'2.bn.running_mean': expected type Float") != std::string::npos);
    RANK_CHECK(refused(nullptr).find("no buffer") != std::string::npos);
  });
  CHECK_RANKS();
}
