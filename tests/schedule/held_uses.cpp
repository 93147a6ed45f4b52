// SPDX-License-Identifier: Apache-2.0
// A use that begins in one function and ends in another does what a scope does; abandoned, what a scope does that an
// exception leaves. Declared uses begin their gradients' sums themselves, and get the caller's initial values.
// skip-tsan
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/paths.hpp"
#include "fsdp/scopes.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Held = fsdp::HeldUse<Engine>;
using fsdp::Pass;

static_assert(!std::is_copy_constructible_v<Held> && std::is_nothrow_destructible_v<Held>);
static_assert(noexcept(std::declval<Held&>().abandon()));

constexpr std::int64_t width = 37, depth = 3;

float initial(std::string const& tensor, std::int64_t i) {
  return 0.01f * static_cast<float>(i) + static_cast<float>(tensor[0] - '0');
}

/// Units of a tensor of `width`, whose loss is the mean over ranks of (w - 3 - rank)^2 / 2.
struct Model {
  fsdp::Mesh<Comm> mesh;
  fsdp::host::Stream compute = fsdp::host::Stream::inline_stream("compute");
  Engine engine;
  std::vector<fsdp::UnitId> units;
  std::vector<fsdp::UseId> uses;
  bool begins_sums;
  Held held{engine};

  Model(Comm comm, fsdp::ShardingStrategy strategy, bool sets, fsdp::EngineOptions options = {}, int frozen = 0)
      : mesh(std::move(comm)), engine(mesh, strategy, options, compute), begins_sums(sets) {
    for (int i = 0; i < depth; ++i) {
      auto const name = std::to_string(i);
      std::vector<fsdp::TensorId> places;
      std::vector<fsdp::DeclaredTensor> tensors;
      tensors.push_back({name + ".w", {width}, {.init = fsdp::init::given(7)}, false, sets});
      auto& unit = units.emplace_back();
      uses.push_back(
          engine.declare_use(fsdp::UnitOptions{.frozen = i < frozen}, name, std::move(tensors), places, unit));
      engine.shards().set_initial_values(engine.shards()[unit],
                                         [](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
                                           for (auto& value : out) value = initial(tensor.name, first++);
                                         });
    }
  }
  template <class Use>
  void write_gradients(Use& use) {
    auto const* const w = use.parameters();
    auto* const g = use.gradients();
    bool const begins = begins_sums && use.unit().begin_write(0);
    for (std::int64_t i = 0; i < width; ++i) {
      float const gradient = w[i] - 3.0f - static_cast<float>(engine.rank());
      g[i] = begins ? gradient : g[i] + gradient;
    }
  }
  void forward(bool scopes = false) {
    for (auto const use : uses) {
      if (scopes) {
        auto const scope = engine.forward_scope(use);
        continue;
      }
      held.begin(Pass::forward, use);
      held.end();
    }
  }
  void backward(bool scopes = false) {
    for (auto i = uses.size(); i-- > 0;) {
      if (scopes) {
        auto const scope = engine.backward_scope(uses[i]);
        write_gradients(scope);
        continue;
      }
      held.begin(Pass::backward, uses[i]);
      if (held) write_gradients(held);
      held.end();
    }
  }
  std::vector<float> weights() {
    std::vector<float> all;
    fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
      all.insert(all.end(), values.begin(), values.end());
    });
    return all;
  }
};

std::vector<float> trained(fsdp::ShardingStrategy const& strategy, int ranks, bool scopes, bool sets) {
  std::vector<float> result;
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    Model model(std::move(comm), strategy, sets, {.allow_no_sync = true});
    fsdp::Sgd sgd{model.engine, {.lr = 0.1f}};
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        auto const wait = model.engine.no_sync(micro == 0 && step == 1);
        model.forward(scopes);
        model.backward(scopes);
      }
      sgd.step();
    }
    for (auto const& unit : model.engine.program().units) RANK_CHECK(unit.sets_gradients == sets);
    auto weights = model.weights();
    if (model.engine.rank() == 0) result = std::move(weights);
  });
  return result;
}

/// On one rank. @return what `body` throws; "" if nothing
std::string message_of(std::function<void(Model&)> const& body, fsdp::EngineOptions options = {}, int frozen = 0) {
  std::string message;
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    Model model(std::move(comm), fsdp::FullShard{}, true, options, frozen);
    try {
      body(model);
    } catch (std::exception const& error) {
      message = error.what();
    }
  });
  return message;
}
bool contains(std::string const& text, std::string const& part) {
  INFO(text);
  INFO("lacks: " << part);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("held uses train as scopes do, and sums that the use begins are those that the engine zeroes") {
  for (int const ranks : {1, 2, 3})
    for (fsdp::ShardingStrategy const strategy :
         {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
          fsdp::ShardingStrategy(fsdp::NoShard{})}) {
      INFO(ranks << " ranks, " << strategy.name);
      auto const expected = trained(strategy, ranks, true, false);
      REQUIRE(expected.size() == width * depth);
      for (bool const sets : {false, true}) CHECK(trained(strategy, ranks, false, sets) == expected);
    }
  CHECK_RANKS();
}

TEST_CASE("initial values of the caller fill what each rank keeps, which is known before sealing") {
  for (int const ranks : {1, 2, 3}) {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
      Model model(std::move(comm), fsdp::FullShard{}, true);
      auto const shards = model.engine.shards();
      auto const before = shards.shard_segments(shards[model.units[1]]);
      auto const weights = model.weights();
      if (model.engine.rank() == 0)
        for (std::int64_t i = 0; i < width * depth; ++i)
          RANK_CHECK(weights[static_cast<std::size_t>(i)] == initial(std::to_string(i / width), i % width));
      auto const& unit = shards[model.units[1]];
      auto const after = unit.layout().segments(unit.shard());
      RANK_CHECK(before.size() == after.size());
      for (std::size_t i = 0; i < before.size(); ++i)
        RANK_CHECK(before[i].first == after[i].first && before[i].count == after[i].count);
    });
    CHECK_RANKS();
  }
}

TEST_CASE("ranks whose initial values have other hashes are refused, as are given values that nobody gives") {
  std::string message;
  try {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh{std::move(comm)};
      Engine engine{mesh, fsdp::FullShard{}};
      std::vector<fsdp::TensorId> places;
      fsdp::UnitId unit;
      auto const hash = static_cast<std::uint64_t>(engine.rank());
      engine.declare_use(fsdp::UnitOptions{}, "a", {{"a.w", {4}, {.init = fsdp::init::given(hash)}}}, places, unit);
      engine.seal();
    });
  } catch (fsdp::ConfigError const& error) {
    message = error.what();
  }
  CHECK(contains(message, "tensor 'a.w' (4) at 0, decay true, init given values of hash 000000000000000"));
  CHECK(contains(message_of([](Model& model) {
                   auto const shards = model.engine.shards();
                   shards[model.units[0]].initial = {};
                   model.engine.seal();
                 }),
                 "tensor '0.w' has init given, but Shards::set_initial_values gives no values"));
  CHECK(contains(message_of([](Model& model) {
                   model.engine.seal();
                   auto const shards = model.engine.shards();
                   shards.set_initial_values(shards[model.units[0]], [](auto&&...) {});
                 }),
                 "unit '0' was given initial values too late"));
}

TEST_CASE("a forward use that is abandoned ends the pass: the next one begins anew") {
  CHECK(message_of([](Model& model) {
          model.forward();
          model.held.begin(Pass::forward, model.uses[0]);
          model.held.abandon();
          CHECK_FALSE(model.held.has_begun());
          CHECK_FALSE(model.held);
          model.held.abandon();  // nothing
          model.forward();
          model.held.begin(Pass::forward, model.uses[0]);
          model.held.end();
          model.held.begin(Pass::forward, model.uses[1]);
          model.held.abandon();
          model.held.begin(Pass::forward, model.uses[0]);
          model.held.end();
        }) == "");
}

TEST_CASE("a backward use that is abandoned leaves half a pass, as an exception through a scope does") {
  auto const half = [](Model& model, bool held) {
    model.forward();
    if (held) {
      model.held.begin(Pass::backward, model.uses[2]);
      model.held.abandon();
    } else {
      try {
        auto const scope = model.engine.backward_scope(model.uses[2]);
        throw std::domain_error("boom");
      } catch (std::domain_error const&) {
      }
    }
  };
  auto const refused = message_of([&](Model& model) { half(model, false), model.forward(); });
  CHECK(contains(refused, "discard_gradients"));
  CHECK(message_of([&](Model& model) { half(model, true), model.forward(); }) == refused);

  std::array<std::vector<float>, 2> weights;
  for (int const interrupted : {0, 1}) {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      Model model(std::move(comm), fsdp::FullShard{}, true);
      fsdp::Sgd sgd{model.engine, {.lr = 0.1f}};
      for (int step = 0; step < 3; ++step) {
        if (interrupted == 1 && step == 1) {
          half(model, true);
          model.engine.discard_gradients();
        }
        model.forward();
        model.backward();
        sgd.step();
      }
      auto all = model.weights();
      if (model.engine.rank() == 0) weights[static_cast<std::size_t>(interrupted)] = std::move(all);
    });
  }
  CHECK(weights[0] == weights[1]);
}

TEST_CASE("the end of a held use abandons it if the holder ends first") {
  CHECK(message_of([](Model& model) {
          {
            Held other{model.engine};
            other.begin(Pass::forward, model.uses[0]);
          }
          model.forward();
        }) == "");
}

TEST_CASE("a held use below everything that trains has no parameters") {
  CHECK(message_of(
            [](Model& model) {
              fsdp::Sgd sgd{model.engine, {.lr = 0.1f}};
              model.forward();
              model.held.begin(Pass::backward, model.uses[2]);
              CHECK(model.held);
              model.held.end();
              model.held.begin(Pass::backward, model.uses[1]);
              CHECK_FALSE(model.held);
              CHECK(model.held.has_begun());
              model.held.end();
            },
            {}, 2) == "");
}

TEST_CASE("held uses follow paths") {
  CHECK(message_of([](Model& model) {
          auto const path = model.engine.add_path("short", {model.uses[0], model.uses[2], model.uses[0]});
          auto const follow = model.engine.follow(path);
          for (int const i : {0, 2, 0}) {
            model.held.begin(Pass::forward, model.uses[static_cast<std::size_t>(i)]);
            model.held.end();
          }
          for (int const i : {0, 2, 0}) {
            model.held.begin(Pass::backward, model.uses[static_cast<std::size_t>(i)]);
            model.write_gradients(model.held);
            model.held.end();
          }
        }) == "");
}

TEST_CASE("misuse of a held use is refused by name") {
  CHECK(contains(message_of([](Model& model) { model.held.end(); }), "HeldUse::end: no use has begun"));
  CHECK(contains(message_of([](Model& model) {
                   model.held.begin(Pass::forward, model.uses[0]);
                   model.held.begin(Pass::forward, model.uses[1]);
                 }),
                 "HeldUse::begin: the last use has not ended"));
  CHECK(contains(message_of([](Model& model) { model.held.begin(Pass::forward, {99, nullptr}); }), "99"));
  CHECK(contains(message_of([](Model& model) {
                   model.held.begin(Pass::forward, {0, &model});
                 }),
                 "a use id belongs to another engine"));
  // A begin that was refused has begun nothing.
  CHECK(message_of([](Model& model) {
          CHECK_THROWS_AS(model.held.begin(Pass::forward, model.uses[1]), fsdp::OrderError);
          CHECK_FALSE(model.held.has_begun());
          model.forward();
        }) == "");
}

TEST_CASE("the end of a held use throws what a task threw, and ends the pass") {
  std::string message;
  bool begun = true;
  try {
    fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh{std::move(comm)};
      Engine engine{mesh, fsdp::FullShard{}};
      std::vector<fsdp::TensorId> places;
      fsdp::UnitId unit;
      auto const use = engine.declare_use(fsdp::UnitOptions{}, "a", {{"a.w", {4}}}, places, unit);
      Held held{engine};
      engine.start_trace(100);  // the end of a use is stamped on compute
      held.begin(Pass::forward, use);
      engine.compute().enqueue([] { throw std::domain_error("boom"); });
      while (engine.compute().failure() == nullptr) {
      }
      try {
        held.end();
      } catch (std::exception const& error) {
        message = error.what();
        begun = static_cast<bool>(held);
        throw;
      }
    });
  } catch (std::exception const&) {
  }
  CHECK(message == "boom");
  CHECK_FALSE(begun);
}

TEST_CASE("a held use whose end throws has ended, and so has its pass") {
  std::array<std::vector<float>, 2> weights;
  for (int const fails : {0, 1}) {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      Model model(std::move(comm), fsdp::FullShard{}, true);
      bool throws = fails == 1;
      model.engine.shards().on_reduced(model.units[1], [&](auto&, std::span<float>) {
        if (std::exchange(throws, false)) throw std::domain_error("boom");
      });
      fsdp::Sgd sgd{model.engine, {.lr = 0.1f}};
      if (fails == 1) {
        model.forward();
        try {
          model.backward();
          RANK_CHECK(false);
        } catch (std::domain_error const&) {
        }
        RANK_CHECK(!model.held.has_begun() && !model.held);
        model.held.abandon();  // nothing
        model.engine.discard_gradients();
        // In an evaluation that ends first, the end of a forward use throws.
        std::optional<Engine::Evaluation> evaluation{model.engine.evaluation()};
        model.held.begin(Pass::forward, model.uses[0]);
        evaluation.reset();
        auto const refused = fsdp::testing::refusal([&] { model.held.end(); });
        RANK_CHECK(fsdp::testing::has(refused, "forward of '0' ends, but an evaluation ended inside it"));
        RANK_CHECK(!model.held.has_begun() && !model.held);
      }
      model.forward();
      model.backward();
      sgd.step();
      auto all = model.weights();
      if (model.engine.rank() == 0) weights[static_cast<std::size_t>(fails)] = std::move(all);
    });
  }
  CHECK_RANKS();
  CHECK(weights[0] == weights[1]);
}

TEST_CASE("a held use stays open where its end is refused because another thread is inside a call") {
  CHECK(message_of([](Model& model) {
          model.held.begin(Pass::forward, model.uses[0]);
          std::string refused;
          {
            auto const turn = model.engine.shards().enter("a test");
            std::thread([&] { refused = fsdp::testing::refusal([&] { model.held.end(); }); }).join();
          }
          CHECK(contains(refused, "another thread is inside a call"));
          CHECK(model.held.has_begun());
          CHECK(model.held);
          model.held.end();
          CHECK_FALSE(model.held.has_begun());
        }) == "");
}
