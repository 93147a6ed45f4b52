// SPDX-License-Identifier: Apache-2.0
// Moving averages of weights in shards: the bits of one kept whole, for every strategy and 1 to 4 ranks; swapping them
// in for evaluation and export; steps that are skipped.
// skip-sanitizers
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/ema.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"

namespace {

using fsdp::testing::has;
using fsdp::testing::what;
using Values = std::vector<float>;
using NarrowMasters = fsdp::Precision<fsdp::bf16, float, fsdp::bf16>;

/// The averages themselves, not rounded; on rank 0.
template <class E>
Values averages_of(E& engine, fsdp::Ema<E>& ema) {
  Values all;
  fsdp::export_shards(
      engine, [&](auto const& unit) { return static_cast<float const*>(ema.state(0, unit.index())); },
      [&](auto const&, auto values) { all.insert(all.end(), values.begin(), values.end()); });
  return all;
}

template <class P>
void check_bits() {
  for (auto const& world : toy::worlds()) {
    toy::on_patches<P>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
      fsdp::AdamW adamw{engine, {.lr = 0.05f}};
      fsdp::Ema ema{engine, 0.75f};
      auto whole = toy::all_parameters(engine);
      for (int step = 0; step < 5; ++step) {
        patches.step({.step = step});
        adamw.step();
        float const decay = step == 3 ? 0.5f : 0.75f;
        step == 3 ? ema.update(0.5f) : ema.update();
        auto const weights = toy::all_parameters(engine);
        for (std::size_t i = 0; i < whole.size(); ++i)
          whole[i] = fsdp::math::mul_add(decay, whole[i], (1.0f - decay) * weights[i]);
      }
      RANK_CHECK((averages_of(engine, ema) == whole));
      RANK_CHECK(ema.steps() == 5);
      RANK_CHECK(engine.account().reserved(fsdp::MemoryTag::optimizer) ==
                 engine.account().live(fsdp::MemoryTag::optimizer));

      // Swapped in: exports and evaluations have the averages, in the masters' type.
      auto const weights = toy::all_parameters(engine);
      RANK_CHECK((engine.rank() != 0 || weights != whole));
      auto const workspace = engine.account().reserved(fsdp::MemoryTag::workspace);
      std::int64_t masters = 0;
      for (std::size_t u = 0; u < engine.shards().size(); ++u) masters += engine.shards()[u].shard_numel();
      {
        auto const on = ema.swap();
        auto expected = whole;
        for (float& value : expected) value = fsdp::widen(fsdp::narrow<typename P::Master>(value));
        RANK_CHECK((toy::all_parameters(engine) == expected));
        constexpr bool narrow = sizeof(typename P::Master) < sizeof(float);
        RANK_CHECK(engine.account().reserved(fsdp::MemoryTag::workspace) - workspace == (narrow ? 2 * masters : 0));
      }
      RANK_CHECK(engine.account().reserved(fsdp::MemoryTag::workspace) == workspace);
      RANK_CHECK((toy::all_parameters(engine) == weights));
      RANK_CHECK((averages_of(engine, ema) == whole));
      ema.reset();
      RANK_CHECK((averages_of(engine, ema) == weights));
      return 0;
    });
  }
}

/// Its forward copies what it reads.
struct Reader {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {6}, fsdp::TensorOptions{.init = fsdp::init::zeros});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& w, Values* seen) const {
    stream.enqueue([w, seen] { seen->assign(w.w.data, w.w.data + 6); });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g) const {
    stream.enqueue([g] { std::fill_n(g.w.data, 6, 1.0f); });
  }
};

}  // namespace

TEST_CASE(
    "an average in shards has the bits of one kept whole; swapped in, the model has it, and the weights come back") {
  SECTION("masters in fp32") { check_bits<fsdp::Fp32>(); }
  SECTION("masters in bf16") { check_bits<NarrowMasters>(); }
  CHECK_RANKS();
}

TEST_CASE("forward passes read the averages while they are swapped in, and the weights after it") {
  for (int const ranks : {1, 3}) {
    fsdp::local::run(ranks, fsdp::host::Device{}, [](toy::LocalHost comm) {
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine{mesh, fsdp::ShardGradOp{}, {.allow_keep_unsharded = true}};
      auto reader = engine.shard(Reader{}, "reader");
      fsdp::Sgd sgd{engine, {.lr = 1.0f}};
      fsdp::Ema ema{engine, 0.5f};
      Values seen;
      auto const evaluate = [&] {
        auto const evaluation = engine.evaluation();
        reader.forward(&seen);
        engine.synchronize();
        return seen[0];
      };
      {
        auto const keeps = engine.keep_unsharded();  // gathered parameters are left from the pass before
        reader.forward(&seen);
        reader.backward();
      }
      sgd.step();
      ema.update();
      RANK_CHECK(evaluate() == -1.0f);
      {
        auto const on = ema.swap();
        RANK_CHECK(evaluate() == -0.5f);
        reader.forward(&seen);  // a forward pass under way is forgotten when the scope ends
      }
      RANK_CHECK(has(what([&] { reader.backward(); }), "reader"));
      engine.discard_gradients();
      RANK_CHECK(evaluate() == -1.0f);
      engine.synchronize();
    });
  }
  CHECK_RANKS();
}

TEST_CASE("an average stays as it is after a step that was skipped") {
  for (int const ranks : {1, 2}) {
    toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, ranks, 0, [](auto& engine, auto& patches) {
      fsdp::AdamW adamw{engine, {.lr = 0.1f}};
      fsdp::GradScaler scaler{engine, {.init_scale = 4.0f}};
      fsdp::Ema ema{engine, 0.5f};
      patches.step({.step = 0, .scale = scaler.scale()});
      scaler.step(adamw, 0.1f);
      auto const first = averages_of(engine, ema);
      patches.step({.step = 1, .scale = scaler.scale()}, 2);  // overflows
      scaler.step(adamw, 0.1f);
      ema.update();
      RANK_CHECK((averages_of(engine, ema) == first));
      patches.step({.step = 2, .scale = scaler.scale()});
      scaler.step(adamw, 0.1f, fsdp::clip_grad_norm(engine, 1.0f));
      ema.update();
      auto const last = averages_of(engine, ema);
      RANK_CHECK((engine.rank() != 0 || last != first));
      return 0;
    });
  }
  CHECK_RANKS();
}

TEST_CASE("an average is refused where it could not be right, and nothing changes") {
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [](auto& engine, auto& patches) {
    RANK_CHECK(has(what([&] { fsdp::Ema(engine, 1.0f); }), "the decay must be in [0, 1), got 1"));
    fsdp::AdamW adamw{engine, {.lr = 0.1f}};
    fsdp::Ema ema{engine};
    RANK_CHECK(has(what([&] { ema.update(-0.5f); }), "the decay must be in [0, 1), got -0.5"));
    patches.step({.step = 0});
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
    patches.step({.step = 1});
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    auto const before = averages_of(engine, ema);
    RANK_CHECK(has(what([&] { ema.update(); }), "clip_grad_norm was called after the last step"));
    RANK_CHECK((averages_of(engine, ema) == before));
    adamw.step(norm);
    ema.update();
    patches.step({.step = 2});
    {
      auto const on = ema.swap();
      auto const swapped = "averages of weights are swapped in; end the scope of Ema::swap first";
      RANK_CHECK(has(what([&] { patches.step({.step = 3}); }), "a backward pass begins, but averages of weights are"));
      RANK_CHECK(has(what([&] { adamw.step(); }), swapped));
      RANK_CHECK(has(what([&] { ema.update(); }), swapped));
      RANK_CHECK(has(what([&] { ema.reset(); }), swapped));
      RANK_CHECK(has(what([&] { auto const again = ema.swap(); }), swapped));
      RANK_CHECK(has(what([&] { fsdp::import_shard(engine, [](auto&&...) {}); }), swapped));
    }
    adamw.step();
    {
      auto const evaluation = engine.evaluation();
      RANK_CHECK(has(what([&] { auto const on = ema.swap(); }), "inside an evaluation"));
      RANK_CHECK(has(what([&] { ema.update(); }), "inside an evaluation"));
    }
    auto const weights = toy::all_parameters(engine);
    auto moved = [&] {  // while it is swapped in
      auto const on = ema.swap();
      return std::move(ema);
    }();
    RANK_CHECK((toy::all_parameters(engine) == weights));
    {
      auto gone = std::make_unique<fsdp::Ema<std::remove_reference_t<decltype(engine)>>>(engine, 0.5f);
      auto const on = gone->swap();
      gone.reset();
    }
    RANK_CHECK((toy::all_parameters(engine) == weights));
    RANK_CHECK(has(what([&] { ema.update(); }), "Ema was used after it was moved from"));
    moved.update();
    return 0;
  });
  CHECK_RANKS();
}

TEST_CASE("ranks that update or swap averages differently get an error") {
  auto const run = [](auto const& differs) {
    return what([&] {
      toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](auto& engine, auto& patches) {
        fsdp::Ema ema{engine, 0.5f};
        differs(ema, engine.rank() == 1);
        patches.step({.step = 0});
        toy::all_parameters(engine);
        return 0;
      });
    });
  };
  CHECK(has(run([](auto& ema, bool other) { ema.update(other ? 0.25f : 0.5f); }), "Ema::update with decay 0.25"));
  CHECK(has(run([](auto& ema, bool other) {
              if (other) auto const on = ema.swap();
            }),
            "Ema::swap"));
  CHECK_RANKS();
}
