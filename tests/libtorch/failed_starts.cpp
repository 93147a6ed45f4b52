// SPDX-License-Identifier: Apache-2.0
// Registrations of torch modules that fail and are tried again: in each attempt a later allocation fails, until none is
// left. A failed attempt leaves engine, Sharder and module as they were, and at last the run is that of one that has
// never failed.
// ranks: 1
// needs: LibTorch
// skip-tsan
// skip-asan
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/libtorch.hpp"
#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/support/allocations.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"

namespace failed_starts {
namespace {

using at::Tensor;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using fsdp::testing::allocations_until_failure;

constexpr std::int64_t width = 3;

/// Of one type, of which a part is frozen.
struct PartImpl : torch::nn::Module {
  PartImpl() {
    register_parameter("bias", bias).mutable_grad() = torch::full({width}, 5.0);
    register_parameter("weight", weight, false);
  }
  Tensor forward(Tensor const& x) { return torch::matmul(x, weight) + bias; }
  Tensor bias = torch::full({width}, 2.0), weight = torch::eye(width);
  Tensor calls = register_buffer("calls", torch::zeros({1}));
};

/// Its last parameter is no leaf, so it cannot get a gradient: a registration throws when it comes to it.
struct BrokenImpl : PartImpl {
  BrokenImpl() { register_parameter("last", last); }
  Tensor last = torch::full({width}, 3.0).requires_grad_() * 1.0;
};

std::string bits(Tensor const& tensor) { return {static_cast<char const*>(tensor.data_ptr()), tensor.nbytes()}; }
/// All that a registration changes in a module.
std::string state_of(PartImpl const& module) {
  return bits(module.weight) + bits(module.bias) + bits(module.bias.mutable_grad());
}
template <class E>
std::string state_of(E& engine, fsdp::libtorch::Sharder<E> const& sharder) {
  auto text = engine.shards().core().declared.text();
  for (auto const& [name, module] : sharder.modules()) text += name + "\n";
  return text;
}

struct Outcome {
  std::vector<float> weights;
  std::string program;
  long attempts = 0;
};

/// Makes a call until it returns, in which a later allocation fails each time. @return the attempts
long attempt(bool fails, std::function<void()> const& act, std::function<std::string()> const& state) {
  if (!fails) return act(), 1;
  auto const before = state();
  for (long at = 0;; ++at) {
    bool threw = true;
    allocations_until_failure = at;
    try {
      act();
      threw = false;
    } catch (std::bad_alloc const&) {
    } catch (fsdp::ResourceError const&) {
    }
    bool const failed = allocations_until_failure < 0;
    allocations_until_failure = -1;
    if (!threw) {
      RANK_CHECK(!failed);  // nothing swallows an exception
      return at + 1;
    }
    RANK_CHECK(state() == before);
  }
}

/// Two steps on one rank.
Outcome started(bool fails) {
  Outcome outcome;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    fsdp::libtorch::Sharder sharder{engine};
    using Unit = fsdp::libtorch::Sharded<PartImpl>;
    std::vector<Unit> units;
    units.reserve(3);
    for (auto const* const name : {"first", "second"}) {
      auto const module = std::make_shared<PartImpl>();
      outcome.attempts += attempt(
          fails, [&] { units.push_back(sharder.shard(module, name)); },
          [&] { return state_of(engine, sharder) + state_of(*module); });
    }
    outcome.attempts += attempt(
        fails, [&] { units.push_back(sharder.share(units[0], units[0].ptr(), "again")); },
        [&] { return state_of(engine, sharder); });
    RANK_CHECK(units[2].number() == 2 && units[2].use().index == 2);
    fsdp::Sgd sgd{engine, {.lr = 0.5f}};
    for (int step = 0; step < 2; ++step) {
      auto x = torch::ones({2, width});
      for (auto const& unit : units) x = unit(x);
      x.pow(2).sum().backward();
      sgd.step();
    }
    outcome.program = fsdp::to_text(engine.program());
    fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      outcome.weights.insert(outcome.weights.end(), values.begin(), values.end());
    });
  });
  return outcome;
}

}  // namespace

TEST_CASE("a registration in which an allocation fails changes neither engine nor module, and goes on") {
  started(false);  // torch's own tables are there then
  auto const expected = started(false), outcome = started(true);
  CHECK(outcome.attempts > expected.attempts + 100);
  CHECK(outcome.weights == expected.weights);
  CHECK(outcome.program == expected.program);
  CHECK_RANKS();
}

TEST_CASE("a module of which torch refuses one parameter stays a module of torch, and its name is free") {
  fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    fsdp::Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    fsdp::libtorch::Sharder sharder{engine};
    auto const broken = std::make_shared<BrokenImpl>();
    auto const before = state_of(engine, sharder) + state_of(*broken);
    auto const text = fsdp::testing::what<std::exception>([&] { sharder.shard(broken, "part"); });
    RANK_CHECK(fsdp::testing::has(text, "leaf"));
    RANK_CHECK(state_of(engine, sharder) + state_of(*broken) == before);
    broken->forward(torch::ones({1, width})).sum().backward();
    RANK_CHECK(torch::equal(broken->bias.grad(), torch::full({width}, 6.0)));

    auto const unit = sharder.shard(std::make_shared<PartImpl>(), "part");
    auto const y = unit(torch::ones({1, width}));
    RANK_CHECK(torch::equal(y, torch::full({1, width}, 3.0)));
    y.sum().backward();
  });
  CHECK_RANKS();
}

}  // namespace failed_starts
