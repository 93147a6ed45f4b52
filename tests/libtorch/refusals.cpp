// SPDX-License-Identifier: Apache-2.0
// Code that would give wrong gradients, or read parameters that are not gathered, is refused by name; training can
// continue.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using namespace networks;
using Test = Trainer<Comm>;

std::string text_of(std::function<void()> const& act) {
  try {
    act();
  } catch (std::exception const& error) {
    return error.what();
  }
  return {};
}
bool contains(std::string const& text, std::string const& part) {
  INFO(text);
  INFO("lacks: " << part);
  return text.find(part) != std::string::npos;
}
Network six() { return named("six layers"); }

/// On one rank, with an engine of the six layers.
void with_trainer(std::function<void(Test&)> const& act, Network const& network = six(),
                  Settings const& settings = {}) {
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    Test test(std::move(comm), network, fsdp::FullShard{}, settings);
    act(test);
  });
}
std::vector<Tensor> parameters_of(Test& test) {
  std::vector<Tensor> all;
  for (auto const& unit : test.units)
    for (auto const& parameter : unit->parameters()) all.push_back(parameter);
  return all;
}
/// After what was refused, it trains as one that nothing was refused.
void expect_goes_on(Test& test) {
  test.sharder.discard_gradients();
  auto const expected = train_plain(test.network, test.settings);
  CHECK(fault(difference(expected, test.train())) == "");
}

}  // namespace

TEST_CASE("a parameter that is accessed outside its unit's forward and backward is refused by name") {
  with_trainer([](Test& test) {
    auto const x = torch::ones({rows, width});
    auto const expect_refused = [&] {
      auto const weight = test.units[2]->linear->weight;
      std::vector<std::function<void()>> const accesses{[&] { static_cast<void>(weight.sum().item<float>()); },
                                                        [&] { static_cast<void>(torch::matmul(x, weight)); },
                                                        [&] { static_cast<void>(test.units[2]->forward(x)); },
                                                        [&] { static_cast<void>(weight.clone()); },
                                                        [&] {
                                                          static_cast<void>(torch::cat({weight, weight}));
                                                        },
                                                        [&] {
                                                          torch::NoGradGuard const no_grad;
                                                          weight.normal_();
                                                        }};
      for (auto const& access : accesses) CHECK(contains(text_of(access), "unit '2': its parameters are sharded"));
    };
    expect_refused();  // before the first forward
    test.make_optimizer();
    test.backward(0);
    expect_refused();
    test.step();
    expect_refused();
    // Calls that need no values work.
    CHECK(test.units[2]->linear->weight.sizes() == at::IntArrayRef({width, width}));
    CHECK(test.units[2]->parameters().size() == 2);
  });
}

TEST_CASE("a unit that returns a view of its parameter is refused, and the pass is forgotten") {
  Network network = six();
  network.kinds[1] = "view";
  with_trainer(
      [](Test& test) {
        CHECK(contains(text_of([&] { test.loss(0); }), "unit '1' returns a view of its parameter"));
        test.units[0](torch::ones({rows, width}), Tensor());  // the next pass begins
      },
      network);
}

TEST_CASE("a parameter that is written in forward or backward is refused by name") {
  Network network = six();
  network.kinds[3] = "throws";
  with_trainer(
      [](Test& test) {
        auto& unit = test.units[3];
        unit->after = [&](Tensor x) {
          torch::NoGradGuard const no_grad;
          unit->linear->bias.clamp_(-0.1, 0.1);
          return x;
        };
        CHECK(contains(text_of([&] { test.loss(0); }), "unit '3': parameter '3.linear.bias' was written"));
        unit->after = [&](Tensor x) {
          x.register_hook([&](Tensor const&) {
            torch::NoGradGuard const no_grad;
            unit->linear->bias.mul_(2.0);
          });
          return x * 1.0;
        };
        auto const text = text_of([&] { test.loss(0).backward(); });
        CHECK(contains(text, "unit '3': parameter '3.linear.bias' was written"));
        test.sharder.discard_gradients();
        unit->after = [](Tensor x) { return x; };
        test.train();
      },
      network);
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh{std::move(comm)};
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine{mesh, fsdp::NoShard{}, {}, compute};
    fsdp::libtorch::Sharder sharder{engine};
    auto const table = sharder.shard(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).max_norm(0.01)), "table");
    CHECK(contains(text_of([&] { table(torch::zeros({2}, torch::kLong)); }), "parameter 'table.weight' was written"));
  });
}

TEST_CASE("torch::save of a sharded module throws") {
  with_trainer([](Test& test) {
    test.backward(0);
    std::ostringstream out;
    CHECK(text_of([&] { torch::save(test.units[2].ptr(), out); }) != "");
    CHECK(text_of([&] { static_cast<void>(torch::pickle_save(test.units[2]->linear->weight)); }) != "");
    test.step();
  });
}

TEST_CASE("the optimizer inside a ShardOptimizer steps only with it") {
  with_trainer(
      [](Test& test) {
        test.make_optimizer();
        auto& adamw = *test.torch_adamw;
        test.loss(0).backward();
        CHECK(contains(text_of([&] { adamw.optimizer().step(); }), "call ShardOptimizer::step"));
        adamw.step();
        CHECK(contains(text_of([&] { adamw.optimizer().step(); }), "call ShardOptimizer::step"));
      },
      six(), {.torch_optimizer = true});
}

TEST_CASE("a unit inside another's forward is refused") {
  Network network = six();
  network.kinds[1] = "throws";
  with_trainer(
      [](Test& test) {
        test.units[1]->after = [&](Tensor x) { return test.units[2](x, Tensor()); };
        CHECK(
            contains(text_of([&] { test.loss(0); }), "'2' is called inside the forward of '1', and units do not nest"));
        test.units[1]->after = [](Tensor x) { return x; };
        expect_goes_on(test);
      },
      network);
}

TEST_CASE("a layer that is called twice, left out or out of order is refused where no path says so") {
  with_trainer([](Test& test) {
    auto const x = torch::ones({rows, width});
    auto const y = test.units[0](x, Tensor());
    CHECK(contains(text_of([&] { test.units[0](y, Tensor()); }), "expected forward of '1', got forward of '0'"));
    CHECK(contains(text_of([&] { test.units[0](y, Tensor()); }),
                   "a second call of a unit is registered with Sharder::share"));
    CHECK(contains(text_of([&] { test.units[2](y, Tensor()); }), "expected forward of '1', got forward of '2'"));
    // Half a forward pass has no backward.
    auto const z = test.units[1](y, Tensor());
    CHECK(contains(text_of([&] { z.sum().backward(); }), "expected forward of '2' next"));
    expect_goes_on(test);
  });
}

TEST_CASE("create_graph, a second backward and the graph of an earlier pass are refused") {
  with_trainer([](Test& test) {
    CHECK(contains(text_of([&] { test.loss(0).backward({}, {}, true); }), "backward() of unit '5' with create_graph"));
    expect_goes_on(test);
  });
  with_trainer([](Test& test) {
    auto const loss = test.loss(0);
    loss.backward({}, true);
    CHECK(contains(text_of([&] { loss.backward(); }), "backward() comes to unit '5' a second time"));
    expect_goes_on(test);
  });
  with_trainer([](Test& test) {
    auto const earlier = test.loss(0), loss = test.loss(1);
    CHECK(contains(text_of([&] { (earlier + loss).backward(); }), "the graph of an earlier forward pass"));
    CHECK(contains(text_of([&] {
                     test.units[0](torch::ones({rows, width}), Tensor());
                   }),
                   "forward of '0' begins, but a backward() has ended with an exception"));
    expect_goes_on(test);
  });
  with_trainer([](Test& test) {
    auto const loss = test.loss(0);
    loss.backward({}, true);
    test.step();
    CHECK(contains(text_of([&] { loss.backward(); }), "a second time"));
  });
  with_trainer([](Test& test) {
    auto const loss = test.loss(0);
    {
      torch::NoGradGuard const no_grad;
      test.loss(1);
    }
    CHECK(contains(text_of([&] { loss.backward(); }), "the graph of an earlier forward pass"));
    expect_goes_on(test);
  });
}

TEST_CASE("optimizers and functions of torch on the modules' parameters are refused by name, not ignored") {
  with_trainer([](Test& test) {
    auto const parameters = parameters_of(test);
    test.make_optimizer();
    torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.1));
    torch::optim::AdamW adamw(parameters, torch::optim::AdamWOptions(0.1));
    test.loss(0).backward();
    constexpr char const* refused = "unit '0': its gradients are sharded";
    auto const text = text_of([&] { sgd.step(); });
    CHECK((text.find("unit '0': its parameters are sharded") != text.npos || text.find(refused) != text.npos));
    auto const second = text_of([&] { adamw.step(); });
    CHECK((second.find("unit '0': its parameters are sharded") != second.npos || second.find(refused) != second.npos));
    CHECK(contains(text_of([&] { torch::nn::utils::clip_grad_norm_(parameters, 1.0); }), refused));
    CHECK(contains(text_of([&] { test.units[0]->zero_grad(false); }), refused));
    CHECK(contains(text_of([&] { static_cast<void>(parameters[0].grad().sum().item<float>()); }), refused));
    // zero_grad is harmless where it accesses no gradient: grad() is undefined until the next backward.
    auto const zero = [&](auto& optimizer) {
      if constexpr (requires { optimizer.zero_grad(true); })
        optimizer.zero_grad(true);
      else
        CHECK(contains(text_of([&] { optimizer.zero_grad(); }), refused));
    };
    zero(sgd);
    expect_goes_on(test);
    // And in the next step again.
    test.loss(0).backward();
    CHECK(text_of([&] { sgd.step(); }) != "");
  });
}

TEST_CASE("gradients that would be lost are refused") {
  with_trainer([](Test& test) {
    auto const parameters = parameters_of(test);
    auto const loss = test.loss(0);
    CHECK(contains(text_of([&] { torch::autograd::grad({loss}, {parameters[0]}); }), "for chosen inputs"));
    expect_goes_on(test);
  });
  with_trainer([](Test& test) {
    auto const parameters = parameters_of(test);
    auto const loss = test.loss(0);
    CHECK(contains(text_of([&] { loss.backward({}, {}, false, std::vector<Tensor>{parameters[0]}); }),
                   "for chosen inputs"));
    expect_goes_on(test);
  });
  Network network = six();
  network.kinds[3] = "throws";
  with_trainer(
      [](Test& test) {
        // Frees the weight of the graph, and sets a gradient by hand.
        auto const bias = test.units[3]->linear->bias;
        test.units[3]->after = [&](Tensor x) {
          x = x.detach().requires_grad_();
          x.register_hook([bias](Tensor const&) { bias.mutable_grad() = torch::ones({width}); });
          return x * 1.0;
        };
        CHECK(contains(text_of([&] { test.loss(0).backward(); }),
                       "unit '3': the program has set the gradient of parameter '3.linear.bias'"));
      },
      network);
  with_trainer([](Test& test) {
    test.units[1]->linear->bias.requires_grad_(false);
    CHECK(contains(text_of([&] { test.loss(0); }),
                   "unit '1': requires_grad of parameter '1.linear.bias' has changed: it is false"));
  });
  with_trainer(
      [](Test& test) {
        auto const x = torch::ones({rows, width}).requires_grad_();
        auto y = x;
        for (auto const& unit : test.units) y = unit(y, Tensor());
        CHECK(contains(text_of([&] { y.sum().backward(); }), "unit '1' is frozen, as are all units before it"));
      },
      named("frozen first"));
}

TEST_CASE("what a Sharder cannot shard is refused") {
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine threaded{mesh, fsdp::FullShard{}};
    CHECK(contains(text_of([&] { fsdp::libtorch::Sharder sharder{threaded}; }), "compute stream is a worker thread"));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine{mesh, fsdp::FullShard{}, {}, compute};
    fsdp::libtorch::Sharder sharder{engine};
    torch::nn::Linear wide(2, 2);
    wide->to(at::kDouble);
    CHECK(contains(text_of([&] { sharder.shard(std::shared_ptr<LayerImpl>(), "no"); }), "'no': the module is nullptr"));
    CHECK(
        contains(text_of([&] { sharder.shard(wide, "wide"); }), "parameter 'wide.weight' has elements of type Double"));
    auto const first = sharder.shard(std::make_shared<LayerImpl>("linear"), "first");
    CHECK(contains(text_of([&] { sharder.shard(first.ptr(), "second"); }),
                   "parameter 'second.linear.weight' belongs to unit 'first' already"));
    CHECK(contains(text_of([&] { sharder.share(first, std::make_shared<LayerImpl>("linear"), "second"); }),
                   "'second' is a further use of unit 'first', and its module has a parameter 'linear.weight'"));
    auto const again = sharder.share(first, first.ptr(), "again");
    auto const x = torch::ones({rows, width});
    again(first(x, Tensor()), Tensor()).sum().backward();
    CHECK(contains(text_of([&] { sharder.shard(std::make_shared<LayerImpl>("linear"), "late"); }), "too late"));
  });
}

TEST_CASE("ranks that build a module with other values are refused by the tensor's name") {
  auto const text = text_of([] {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh{std::move(comm)};
      auto compute = fsdp::host::Stream::inline_stream("compute");
      fsdp::Engine engine{mesh, fsdp::FullShard{}, {}, compute};
      fsdp::libtorch::Sharder sharder{engine};
      auto const layer = std::make_shared<LayerImpl>("linear");
      torch::NoGradGuard const no_grad;
      layer->linear->weight.fill_(1.0f);
      layer->linear->bias.fill_(static_cast<float>(engine.rank()));
      sharder.shard(layer, "layer");
      engine.seal();
    });
  });
  CHECK(contains(text, "ranks disagree"));
  CHECK(contains(text, "tensor 'layer.linear.bias'"));
}

TEST_CASE("a backward after its Sharder has ended is refused") {
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh{std::move(comm)};
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine{mesh, fsdp::FullShard{}, {}, compute};
    Tensor loss;
    {
      fsdp::libtorch::Sharder sharder{engine};
      auto const unit = sharder.shard(std::make_shared<LayerImpl>("linear"), "layer");
      loss = unit(torch::ones({rows, width}), Tensor()).sum();
    }
    CHECK(contains(text_of([&] { loss.backward(); }), "after their Sharder has ended"));
  });
}
