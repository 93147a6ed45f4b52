// SPDX-License-Identifier: Apache-2.0
// Calls and settings that cannot be honoured are refused at once and by name, and change nothing.
// skip-tsan
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Layers = std::vector<fsdp::ShardedModule<Ramp<>, Engine>>;
constexpr float infinity = std::numeric_limits<float>::infinity();

std::string message_of(std::function<void()> const& act) {
  try {
    act();
  } catch (fsdp::Error const& error) {
    return error.what();
  }
  return {};
}

/// Runs `body` on an engine with two layers; the message of what it throws.
std::string on_engine(int ranks, std::function<void(Engine&, Layers&)> const& body) {
  return message_of([&] {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      auto layers = engine.shard(std::vector<Ramp<>>(2), "layer");
      body(engine, layers);
      engine.synchronize();
    });
  });
}

void pass(Layers& layers, float by) {
  for (auto& layer : layers) layer.forward();
  for (auto i = layers.size(); i-- > 0;) layers[i].backward(by);
}

/// The first weight after `body`, which takes no other than one-rank engines.
float weight_after(std::function<void(Engine&, Layers&)> const& body) {
  float weight = 0.0f;
  auto const message = on_engine(1, [&](Engine& engine, Layers& layers) {
    body(engine, layers);
    weight = fsdp::testing::all_weights(engine).at(0);
  });
  INFO(message);
  CHECK(message.empty());
  return weight;
}

bool contains(std::string const& text, std::string const& part) {
  INFO(text);
  INFO("lacks: " << part);
  return text.find(part) != std::string::npos;
}

/// One tensor of a name and options of the test's choice.
struct Named {
  std::string name;
  fsdp::TensorOptions options;
  std::int64_t elements = 4;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor(name, p.w, {elements}, options);
  }
  template <class P>
  void forward(fsdp::host::Stream&, Params<P const> const&) const {}
};

}  // namespace

TEST_CASE("a refused optimizer step changes nothing: the next one is the first") {
  for (bool const refused : {false, true}) {
    float const weight = weight_after([&](Engine& engine, Layers& layers) {
      fsdp::AdamW adamw(engine, {.lr = 0.01f, .weight_decay = 0.0f});
      if (refused) {
        CHECK(contains(message_of([&] { adamw.step(); }),
                       "an optimizer step begins, but unit 'layer.0' has no reduced gradients"));
        CHECK(contains(message_of([&] { adamw.step(-1.0f); }), "learning rate"));
      }
      pass(layers, 1.0f);
      auto const norm = fsdp::clip_grad_norm(engine, 0.5f);
      if (refused) CHECK(contains(message_of([&] { adamw.step(infinity, norm); }), "learning rate"));
      adamw.step(norm);
      CHECK(adamw.steps() == 1);
    });
    CHECK(weight == Approx(-0.01f));
  }
}

TEST_CASE("the clip factor: a later call goes on from an earlier one, and another backward makes it void") {
  auto const clipped_by = [](std::vector<float> const& limits) {
    return weight_after([&](Engine& engine, Layers& layers) {
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      pass(layers, 1.0f);
      fsdp::GradNorm<Engine> norm;
      for (float const limit : limits) norm = fsdp::clip_grad_norm(engine, limit);
      sgd.step(norm);
    });
  };
  float const once = clipped_by({0.01f});
  CHECK(once == Approx(-0.01 / std::sqrt(2.0 * 55.0)).epsilon(1e-4));
  CHECK(clipped_by({0.01f, infinity}) == once);
  CHECK(clipped_by({infinity, 0.01f}) == once);
  CHECK(clipped_by({0.01f, 0.02f}) == once);
  CHECK(clipped_by({0.02f, 0.01f}) == Approx(once).epsilon(1e-4));

  // The norm that a later call reports is of what the step will take.
  double reported = 0.0;
  weight_after([&](Engine& engine, Layers& layers) {
    pass(layers, 1.0f);
    static_cast<void>(fsdp::clip_grad_norm(engine, 0.01f));
    reported = fsdp::clip_grad_norm(engine, infinity).value();
  });
  CHECK(reported == Approx(0.01).epsilon(1e-3));

  // Gradients of a backward pass that was not measured are neither clipped by an old factor nor left unclipped.
  float const weight = weight_after([&](Engine& engine, Layers& layers) {
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    pass(layers, 1.0f);
    static_cast<void>(fsdp::clip_grad_norm(engine, infinity));  // this one only measures
    pass(layers, 1.0f);
    sgd.step();
    pass(layers, 1.0f);
    auto const norm = fsdp::clip_grad_norm(engine, 0.01f);
    pass(layers, 1.0f);
    CHECK(contains(message_of([&] { sgd.step(norm); }), "clip_grad_norm was called before the last backward pass"));
    CHECK(contains(message_of([&] { sgd.step(); }), "clip_grad_norm was called before the last backward pass"));
    engine.discard_gradients();
    pass(layers, 1.0f);
    sgd.step();
  });
  CHECK(weight == -3.0f);
}

TEST_CASE("a step takes the norm that was measured last, of its own gradients, once") {
  float const weight = weight_after([&](Engine& engine, Layers& layers) {
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    pass(layers, 1.0f);
    auto const first = fsdp::clip_grad_norm(engine, 1e6f);
    CHECK(contains(message_of([&] { sgd.step(); }), "without the norm that clip_grad_norm returned"));
    auto const second = fsdp::clip_grad_norm(engine, 1e6f);
    CHECK(
        contains(message_of([&] { sgd.step(first); }), "an outdated norm: clip_grad_norm has been called again since"));
    CHECK(
        contains(message_of([&] { static_cast<void>(first.value()); }), "because clip_grad_norm has measured another"));
    sgd.step(second);
    CHECK(second.value() > 0.0);  // still there
    pass(layers, 1.0f);
    CHECK(contains(message_of([&] { sgd.step(second); }), "an outdated norm: a step has used it already"));
    auto const third = fsdp::clip_grad_norm(engine, 1e6f);
    engine.discard_gradients();
    pass(layers, 1.0f);
    CHECK(contains(message_of([&] { sgd.step(third); }), "or its gradients were discarded"));
    sgd.step();
    pass(layers, 1.0f);
    auto const measured = fsdp::clip_grad_norm(engine, infinity);
    CHECK(measured.value() > 0.0);
    sgd.step();  // nothing was to be limited
    CHECK(contains(message_of([&] { static_cast<void>(fsdp::GradNorm<Engine>{}.value()); }),
                   "expected a norm from clip_grad_norm, got an empty one"));
  });
  CHECK(weight == -3.0f);
  CHECK(contains(on_engine(1,
                           [](Engine& engine, Layers& layers) {
                             pass(layers, 1.0f);
                             auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
                             fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
                               fsdp::Mesh mesh(std::move(comm));
                               Engine other(mesh, fsdp::FullShard{});
                               auto layer = other.shard(Ramp<>{}, "layer");
                               fsdp::Sgd sgd(other, {.lr = 1.0f});
                               layer.forward();
                               layer.backward(1.0f);
                               sgd.step(norm);
                             });
                           }),
                 "the norm belongs to another engine's gradients"));
}

TEST_CASE("a tensor's full name belongs to one unit, and says one thing") {
  auto const two = [](Named first, Named second, bool share) {
    return on_engine(1, [&](Engine& engine, Layers&) {
      auto const one = engine.add_unit("one");
      auto const other = share ? one : engine.add_unit("other");
      engine.shard(first, "tied", one);
      engine.shard(second, "tied", other);
    });
  };
  CHECK(two({"w", {}}, {"w", {}}, true).empty());
  CHECK(contains(two({"w", {}}, {"w", {}}, false), "units 'one' and 'other' both have a tensor 'tied.w'"));
  CHECK(contains(two({"w", {}}, {"w", {.decay = false}}, true),
                 "'tied.w' declare it both with and without weight decay"));
  CHECK(contains(two({"w", {}}, {"w", {.init = fsdp::init::ones}}, true),
                 "'tied.w' declare it with init normal(0, 0.02) and with init constant(1)"));
  CHECK(contains(two({"w", {}}, {"w", {}, 5}, true), "declare it with shape (4) and with shape (5)"));
  CHECK(contains(two({"w", {}, -1}, {"w", {}}, true), "extents must not be negative, got (-1)"));
  CHECK(two({"w", {}}, {"empty", {}, 0}, true).empty());
  CHECK(contains(message_of([&] {
                   fsdp::local::run(1, fsdp::host::Device{}, [](Comm comm) {
                     fsdp::Mesh mesh(std::move(comm));
                     Engine engine(mesh, fsdp::FullShard{});
                     engine.shard(Named{"w", {}, 0}, "empty");
                     engine.seal();
                   });
                 }),
                 "no module of the engine has parameters"));
}

namespace {

/// Names, once it is registered, what the test wants: another tensor, more of them, other extents.
struct Changing {
  std::shared_ptr<int> change = std::make_shared<int>(0);
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> v, w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    if (*change == 1) tensor("other", p.v, {4});
    if (*change != 1 && *change != 2) tensor("v", p.v, {*change == 3 ? 5 : 4});
    tensor("w", p.w, {4});
    if (*change == 4) tensor("more", p.w, {4});
  }
  template <class P>
  void forward(fsdp::host::Stream&, Params<P const> const&) const {}
};

}  // namespace

TEST_CASE("a module names the same tensors each time") {
  auto const changed = [](int change) {
    return on_engine(1, [&](Engine& engine, Layers& layers) {
      auto module = engine.shard(Changing{}, "it");
      for (auto& layer : layers) layer.forward();
      *module.module().change = change;
      module.forward();
    });
  };
  CHECK(changed(0).empty());
  CHECK(contains(changed(1), "names 'other' (4); at registration it named 'it.v'"));
  CHECK(contains(changed(2), "names 'w' (4); at registration it named 'it.v'"));
  CHECK(contains(changed(3), "names 'v' (5); at registration it named 'it.v'"));
  CHECK(contains(changed(4), "names 'more' (4); at registration it named no further tensor"));
}

TEST_CASE("an engine without modules has no gradients") {
  auto const message = message_of([&] {
    fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{});
      static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f));
    });
  });
  CHECK(contains(message, "the engine has no modules"));
}

TEST_CASE("without replicas nothing waits for them, in a world of one too") {
  CHECK(on_engine(1, [](Engine& engine, Layers& layers) {
          fsdp::Sgd sgd(engine, {.lr = 1.0f});
          auto const scope = engine.no_replica_sync();
          pass(layers, 1.0f);
          sgd.step();
        }).empty());
}

TEST_CASE("ranks that have stepped or discarded otherwise neither step, export nor average together") {
  auto const after = [](auto const& act) {
    return on_engine(2, [&](Engine& engine, Layers& layers) {
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      pass(layers, 1.0f);
      sgd.step(0.5f);
      pass(layers, 1.0f);
      if (engine.rank() == 0) engine.discard_gradients();
      act(engine);
    });
  };
  CHECK(contains(after([](Engine& engine) { fsdp::export_full(engine, [](auto&&...) {}); }),
                 "rank 0 has \"exports after discard_gradients"));
  CHECK(contains(after([](Engine& engine) { static_cast<void>(engine.mean_over_ranks({1.0})); }),
                 "averages 1 values after discard_gradients"));
  auto const stepped = on_engine(2, [](Engine& engine, Layers& layers) {
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    pass(layers, 1.0f);
    sgd.step(engine.rank() == 0 ? 0.5f : 0.25f);
  });
  CHECK(contains(stepped, "ranks disagree about collective"));
  CHECK(contains(stepped, "learning rate differs: "));
  CHECK(contains(stepped, "unit 'all units' (optimizer) after step with learning rate 0.5"));
}

TEST_CASE("what ranks compare, they compare in every bit, and name") {
  auto const clipped = [](float most) {
    return on_engine(2, [&](Engine& engine, Layers& layers) {
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      pass(layers, 1.0f);
      sgd.step(fsdp::clip_grad_norm(engine, engine.rank() == 0 ? 0.3f : most));
    });
  };
  CHECK(clipped(0.3f).empty());
  CHECK(contains(clipped(0.3000004f), "max_norm differs: "));
  CHECK(contains(clipped(0.3000004f), "0.3000004 on rank 1"));
  auto const counted = [](std::int64_t steps) {
    return on_engine(2, [&](Engine& engine, Layers& layers) {
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      sgd.set_steps(engine.rank() == 0 ? std::int64_t{1} << 24 : steps);
      layers[0].forward();
    });
  };
  CHECK(counted(std::int64_t{1} << 24).empty());
  CHECK(contains(counted((std::int64_t{1} << 24) + 1), "number of steps differs: "));
  CHECK(contains(counted((std::int64_t{1} << 24) + 1), "16777217 on rank 1"));
}

TEST_CASE("ranks compare the strategy of each unit, by its answers") {
  auto const sealed = [](fsdp::ShardingStrategy const& first, fsdp::ShardingStrategy const& second) {
    return message_of([&] {
      fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
        fsdp::Mesh mesh(std::move(comm));
        Engine engine(mesh, fsdp::FullShard{});
        auto const a = engine.shard(Ramp<>{}, "a");
        auto const b = engine.shard(Ramp<>{}, "b", engine.rank() == 0 ? first : second);
        engine.seal();
      });
    });
  };
  auto stays = fsdp::ShardingStrategy(fsdp::FullShard{});
  stays.reshards_after_forward = false;  // under the same name
  CHECK(sealed(fsdp::FullShard{}, fsdp::FullShard{}).empty());
  CHECK(contains(sealed(fsdp::FullShard{}, fsdp::NoShard{}), "rank 0 has \"unit 'b' is full_shard"));
  CHECK(contains(sealed(fsdp::FullShard{}, stays), "unit 'b' is full_shard, which shards and stays after forward"));
}

TEST_CASE("ranks compare what initial parameters and optimizers depend on") {
  CHECK(contains(on_engine(2,
                           [](Engine& engine, Layers&) {
                             auto const init = engine.rank() == 0 ? fsdp::init::ones : fsdp::init::normal(0.5f);
                             engine.shard(Named{"w", {.init = init}}, "x");
                             engine.seal();
                           }),
                 "init constant(1)\", rank 1 has \"unit 'x': tensor 'x.w' (4) at 0, decay true, init normal(0, 0.5)"));
  CHECK(contains(
      on_engine(2,
                [](Engine& engine, Layers&) {
                  engine.shard(Named{"w", {.init = fsdp::init::ones, .tag = engine.rank()}}, "x");
                  engine.seal();
                }),
      "init constant(1)\", rank 1 has \"unit 'x': tensor 'x.w' (4) at 0, decay true, init constant(1), tag 1"));
  CHECK(contains(
      on_engine(2, [](Engine& engine,
                      Layers&) { fsdp::AdamW adamw(engine, {.beta2 = engine.rank() == 0 ? 0.999f : 0.99f}); }),
      "ranks disagree: beta2 differs: 0.999 on rank 0, 0.99 on rank 1; rank 0 has \"AdamW: lr 0.001, beta1 0.9"));
  CHECK(
      contains(on_engine(2, [](Engine& engine,
                               Layers&) { fsdp::Sgd sgd(engine, {.weight_decay = engine.rank() == 0 ? 0.0f : 0.1f}); }),
               "ranks disagree: weight decay differs: 0 on rank 0, 0.1 on rank 1; rank 0 has \"Sgd: lr 0.01"));
}

TEST_CASE("options are refused where they are given") {
  auto const adamw = [](fsdp::AdamWOptions options) {
    return on_engine(1, [&](Engine& engine, Layers&) { fsdp::AdamW refused(engine, options); });
  };
  CHECK(contains(adamw({.lr = -1.0f}), "AdamW: the learning rate must be finite and not negative, got -1"));
  CHECK(contains(adamw({.lr = infinity}), "learning rate"));
  CHECK(contains(adamw({.eps = infinity}), "eps inf"));
  CHECK(contains(adamw({.weight_decay = std::numeric_limits<float>::quiet_NaN()}), "weight decay nan"));
  CHECK(contains(on_engine(1, [](Engine& engine, Layers&) { fsdp::Sgd refused(engine, {.lr = -1.0f}); }),
                 "Sgd: the learning rate must be finite and not negative, got -1"));

  auto const engine_with = [](fsdp::ShardingStrategy const& strategy, auto precision, fsdp::EngineOptions options,
                              auto const& act) {
    return message_of([&] {
      fsdp::local::run(2, fsdp::host::Device{}, [&](Comm comm) {
        fsdp::Mesh mesh(std::move(comm));
        fsdp::Engine engine(mesh, strategy, precision, options);
        act(engine);
      });
    });
  };
  auto const nothing = [](auto&) {};
  CHECK(contains(engine_with(fsdp::FullShard{}, fsdp::Fp32{}, {.passes_ahead = 0}, nothing),
                 "passes_ahead must be at least 1, got 0"));
  // NoShard: what waits for replicas waits for everything, and the option that is asked for is one that it takes.
  for (bool const at_once : {true, false}) {  // when it is set, or at the latest when the engine is sealed
    auto const waits = [=](auto& engine) {
      auto const early = engine.no_replica_sync(!at_once);
      auto const layer = engine.shard(Ramp<>{}, "layer");
      auto const late = engine.no_replica_sync(at_once);
      if (!at_once) engine.seal();
    };
    CHECK(contains(engine_with(fsdp::NoShard{}, fsdp::Fp16{}, {}, waits),
                   "gradients can stay unreduced over replicas only with EngineOptions::allow_no_sync"));
    CHECK(engine_with(fsdp::NoShard{}, fsdp::Fp16{}, {.allow_no_sync = true}, waits).empty());
  }
}

TEST_CASE("the two hybrid strategies have names of their own, which ranks compare") {
  CHECK(fsdp::HybridShard<>::name == "hybrid_shard(full_shard)");
  CHECK(fsdp::HybridShard<fsdp::ShardGradOp>::name == "hybrid_shard(shard_grad_op)");
}

TEST_CASE("evaluations nest: the outer one goes on") {
  auto const message = on_engine(1, [](Engine& engine, Layers& layers) {
    auto const outer = engine.evaluation();
    {
      auto const inner = engine.evaluation();
      for (auto& layer : layers) layer.forward();
    }
    for (auto& layer : layers) layer.forward();
    layers[1].backward(1.0f);
  });
  CHECK(contains(message, "backward of 'layer.1' was called inside an evaluation"));
}

TEST_CASE("there are no gradients to export before a backward pass, after a discard, or while some wait") {
  auto const exported = [](Engine& engine) {
    return message_of([&] { fsdp::export_gradients(engine, [](auto&&...) {}); });
  };
  on_engine(1, [&](Engine& engine, Layers& layers) {
    engine.seal();
    CHECK(contains(exported(engine), "unit 'layer.0' has no reduced gradients"));
    pass(layers, 1.0f);
    CHECK(exported(engine).empty());
    engine.discard_gradients();
    CHECK(contains(exported(engine), "unit 'layer.0' has no reduced gradients"));
  });
}

TEST_CASE("discarding begins half a forward pass anew, and leaves a whole one") {
  for (std::size_t const modules : {1u, 2u}) {
    float const weight = weight_after([&](Engine& engine, Layers& layers) {
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      for (std::size_t i = 0; i < modules; ++i) layers[i].forward();
      engine.discard_gradients();
      if (modules == 1) layers[0].forward();
      if (modules == 1) layers[1].forward([&](auto&) { engine.discard_gradients(); });  // inside a use: it goes on
      for (auto i = layers.size(); i-- > 0;) layers[i].backward(1.0f);
      sgd.step();
    });
    CHECK(weight == -1.0f);
  }
}

TEST_CASE("what was moved from, or never was, is refused by name") {
  auto const message = on_engine(1, [](Engine& engine, Layers& layers) {
    auto moved = std::move(layers[0]);
    CHECK(contains(message_of([&] { layers[0].forward(); }), "a sharded module was used after it was moved from"));
    CHECK(contains(message_of([&] { engine.shard(Ramp<>{}, "x", fsdp::UnitId{7}); }), "the engine has no such unit"));
    fsdp::AdoptedUnit<Engine>::Tensor nowhere{"fc.w", nullptr, nullptr, {4}};
    CHECK(contains(
        message_of([&] { fsdp::AdoptedUnit<Engine> unit(engine, "fc", {nowhere}, {.kernels_are_enqueued = true}); }),
        "adopted tensor 'fc.w'"));
  });
  INFO(message);
  CHECK(message.empty());
  CHECK(contains(on_engine(1,
                           [](Engine& engine, Layers&) {
                             engine.shard(Named{"w", {}, std::int64_t{1} << 60}, "x");
                           }),
                 "has too many elements"));
}

TEST_CASE("a scaler steps the optimizers of its own engine") {
  auto const message = on_engine(1, [](Engine& engine, Layers& layers) {
    fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine other(mesh, fsdp::FullShard{});
      auto layer = other.shard(Ramp<>{}, "layer");
      fsdp::Sgd sgd(other, {.lr = 1.0f});
      fsdp::GradScaler scaler(engine);
      pass(layers, 1.0f);
      layer.forward();
      layer.backward(1.0f);
      scaler.step(sgd, 1.0f);
    });
  });
  CHECK(contains(message, "the optimizer belongs to another engine"));
}

TEST_CASE("a scope that is open is named as such") {
  CHECK(contains(on_engine(1,
                           [](Engine& engine, Layers&) {
                             auto const open = engine.forward_scope(fsdp::UseId{0});
                             auto const next = engine.forward_scope(fsdp::UseId{1});
                           }),
                 "forward of 'layer.1' begins, but forward of 'layer.0' has not ended"));
  // Calls that would end the pass are refused inside a use, which goes on.
  auto const message = on_engine(1, [](Engine& engine, Layers& layers) {
    fsdp::Sgd sgd(engine, {.lr = 1.0f});
    pass(layers, 1.0f);
    std::vector<std::string> refused;
    layers[0].forward([&](auto&) {
      refused.push_back(message_of([&] { static_cast<void>(engine.evaluation()); }));
      refused.push_back(message_of([&] { sgd.step(); }));
      refused.push_back(message_of([&] { fsdp::import_shard(engine, [](auto&&...) {}); }));
    });
    layers[1].forward();
    for (auto const& text : refused) CHECK(contains(text, "but forward of 'layer.0' has not ended"));
    CHECK(refused.size() == 3);
  });
  CHECK(message.empty());
}

TEST_CASE("an adopted unit on a worker's stream is refused, unless its kernels are enqueued") {
  float *w = nullptr, *g = nullptr, *w2 = nullptr, *g2 = nullptr;
  auto const adopt = [&](Engine& engine, fsdp::AdoptedOptions options) {
    return message_of([&] { fsdp::AdoptedUnit unit{engine, "fc", {{"fc.w", &w, &g, {4}}}, options}; });
  };
  on_engine(1, [&](Engine& engine, Layers&) {
    CHECK(contains(adopt(engine, {}), "adopted unit 'fc': the engine's compute stream is a worker thread"));
    CHECK(adopt(engine, {.kernels_are_enqueued = true}).empty());
    auto const twice = [&] {
      fsdp::AdoptedUnit unit{engine, "two", {{"w", &w, &g, {4}}, {"w", &w2, &g2, {4}}}, {true}};
    };
    CHECK(contains(message_of(twice), "a module names its tensor 'w' twice"));
    auto const same = [&] {
      fsdp::AdoptedUnit unit{engine, "p", {{"v", &w, &g, {4}}, {"u", &w, nullptr, {4}}}, {true}};
    };
    CHECK(contains(message_of(same), "adopted tensors 'u' and 'v' have the same pointer"));
    auto const in_place = [&] { fsdp::AdoptedUnit unit{engine, "q", {{"x", &w, &w, {4}}}, {true}}; };
    CHECK(contains(message_of(in_place), "adopted tensor 'x': weight and gradient are the same pointer"));
    for (std::int64_t const slice : {std::int64_t{-1}, std::int64_t{1} << 60}) {
      auto const beyond = [&] {
        fsdp::AdoptedUnit unit{engine, slice < 0 ? "r" : "s", {{"y", &w, &g, {4}, {}, slice}}, {true}};
      };
      CHECK(contains(message_of(beyond), "adopted tensor 'y': expected AdoptedTensor::slice from 0 to"));
    }
  });
  fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = fsdp::host::Stream::inline_stream("compute");
    Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    CHECK(adopt(engine, {}).empty());
  });
}

TEST_CASE("a further use of an adopted unit: what is refused") {
  on_engine(1, [&](Engine& engine, Layers& layers) {
    float *w = nullptr, *g = nullptr;
    using Unit = fsdp::AdoptedUnit<Engine>;
    Unit first(engine, "fc", {{"fc.w", &w, &g, {4}}}, {.kernels_are_enqueued = true});
    auto const again = [&](std::vector<Unit::Tensor> tensors, fsdp::AdoptedOptions options) {
      return message_of([&] { Unit unit(engine, first.unit(), "head", std::move(tensors), options); });
    };
    CHECK(contains(again({{"fc.w", &w, &g, {5}}}, {true}), "declare it with shape (4) and with shape (5)"));
    CHECK(contains(again({{"fc.w", &w, &g, {4}, {.tag = 7}}}, {true}), "with tag 0 and with tag 7"));
    CHECK(contains(again({{"fc.w", &w, &g, {4}}}, {true, fsdp::NoShard{}}), "is a further use of a unit"));
    CHECK(contains(again({{"fc.w", &w, &g, {4}}}, {.kernels_are_enqueued = true, .frozen = true}),
                   "is a further use of a unit"));
    CHECK(contains(message_of([&] { Unit unit(engine, fsdp::UnitId{99}, "head", {}, {true}); }), "no such unit"));
    CHECK(again({{"fc.w", &w, &g, {4}}}, {true}).empty());
    static_cast<void>(layers);
    engine.seal();
    CHECK(contains(again({{"fc.w", &w, &g, {4}}}, {true}), "module 'head' was added too late"));
  });
}

TEST_CASE("the host stays within passes_ahead passes of compute") {
  for (int const ahead : {1, 3}) {
    std::atomic<int> done{0};
    int furthest = 0;
    fsdp::local::run(1, fsdp::host::Device{}, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, fsdp::FullShard{}, {.passes_ahead = ahead});
      auto layer = engine.shard(Ramp<>{}, "layer");
      fsdp::Sgd sgd(engine, {.lr = 1.0f});
      auto const slow = [&](fsdp::host::Stream& stream) {
        stream.enqueue([&] {
          std::this_thread::sleep_for(std::chrono::microseconds(300));
          done.fetch_add(1);
        });
      };
      int begun = 0;
      auto const count = [&] { furthest = std::max(furthest, ++begun - done.load()); };
      for (int step = 0; step < 30; ++step) {
        layer.forward(slow);
        count();
        layer.backward(1.0f, slow);
        count();
        sgd.step();
        auto const evaluation = engine.evaluation();
        layer.forward(slow);
        count();
      }
    });
    CHECK(furthest <= ahead + 1);  // the one that has just begun
    CHECK(furthest > 1);           // it does run ahead
  }
}
