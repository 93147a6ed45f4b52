// SPDX-License-Identifier: Apache-2.0
// Threads: networks of every form train as plain torch on the whole batch does. Their storages follow the engine.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
// timeout: 900
#include <string>
#include <utility>
#include <vector>

#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using namespace networks;

template <class Precision = fsdp::Fp32>
Result train(Network const& network, int ranks, fsdp::ShardingStrategy const& strategy, Settings const& settings) {
  Result result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    Trainer<Comm, Precision> trainer(std::move(comm), network, strategy, settings);
    auto own = trainer.train();
    if (trainer.engine.rank() == 0) result = std::move(own);
  });
  return result;
}

}  // namespace

TEST_CASE("networks of every form train as plain torch does, with all strategies") {
  for (auto const& network : all())
    for (bool const torch_optimizer : {false, true}) {
      Settings const settings{.torch_optimizer = torch_optimizer};
      auto const expected = train_plain(network, settings);
      for (int const ranks : {1, 2, 3})
        for (auto const& strategy : strategies) {
          INFO(network.name << ", " << ranks << " ranks, " << strategy.name);
          CHECK(fault(difference(expected, train(network, ranks, strategy, settings))) == "");
        }
    }
}

TEST_CASE("what autograd has saved follows the engine's buffers: prefetch, and addresses that no two uses share") {
  for (auto const* const name : {"six layers", "tied gpt", "two outputs"}) {
    auto const network = named(name);
    for (int const prefetch : {0, 1, 2})
      for (bool const traps : {false, true}) {
        Settings const settings{.micro_steps = 2, .options = {.prefetch = prefetch, .trap_stale_pointers = traps}};
        auto const expected = train_plain(network, settings);
        for (auto const& strategy : strategies) {
          INFO(network.name << ", " << strategy.name << ", prefetch " << prefetch << ", traps " << traps);
          CHECK(fault(difference(expected, train(network, 2, strategy, settings))) == "");
        }
      }
  }
}

TEST_CASE("an fp32 module trains in bf16, with gradients that backward writes in fp32 or in bf16") {
  for (auto const* const name : {"gpt", "six layers"}) {
    auto const network = named(name);
    Settings const settings{.torch_optimizer = true};
    auto const expected = train_plain(network, settings, true);
    // On one rank nothing is summed in another order. fp32 holds a bf16 gradient as it is.
    for (auto const& result : {train<fsdp::Bf16>(network, 1, fsdp::FullShard{}, settings),
                               train<fsdp::Bf16Reduce>(network, 1, fsdp::FullShard{}, settings)}) {
      CHECK(result.losses == expected.losses);
      CHECK(difference(expected, result).equal_gradients);
      CHECK(difference(expected, result).parameter == 0.0);
    }
    // On two, each rounds its gradients to 8 bits, and the plain run their sum.
    auto const apart = difference(expected, train<fsdp::Bf16>(network, 2, fsdp::FullShard{}, settings));
    CHECK(apart.same_tensors);
    CHECK(apart.gradient < 0x1p-5);
    CHECK(apart.loss < 0x1p-6);
  }
}

TEST_CASE("one parameter under several names in a module is one tensor, and buffers stay with the module") {
  struct Both : torch::nn::Module {
    Both() {
      one = register_module("one", torch::nn::Linear(width, width));
      register_module("two", one);
      bn = register_module("bn", torch::nn::BatchNorm1d(width));
    }
    Tensor forward(Tensor const& x) { return bn(one(one(x))); }
    torch::nn::Linear one{nullptr};
    torch::nn::BatchNorm1d bn{nullptr};
  };
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh{std::move(comm)};
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine{mesh, fsdp::FullShard{}, {}, compute};
    fsdp::libtorch::Sharder sharder{engine};
    auto both = sharder.shard(std::make_shared<Both>(), "both");
    std::string names;
    for (auto const& tensor : fsdp::tensor_list(engine)) names += tensor.name + " ";
    CHECK(names == "both.one.weight both.one.bias both.bn.weight both.bn.bias ");
    fsdp::Sgd sgd{engine, {.lr = 0.1f}};
    both(torch::randn({rows, width})).pow(2).mean().backward();
    sgd.step();
    CHECK(both->bn->num_batches_tracked.item<std::int64_t>() == 1);
    CHECK(both->bn->running_mean.abs().max().item<float>() > 0.0f);
  });
}
