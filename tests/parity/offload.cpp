// SPDX-License-Identifier: Apache-2.0
// Moments in host memory: the bits of moments on the device, two units' of them on the device, fetched while the unit
// before is updated.
// needs: nlohmann_json xxHash
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint/background_saver.hpp"
#include "fsdp/checkpoint/load.hpp"
#include "fsdp/checkpoint/save.hpp"
#include "fsdp/optim/muon.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::MemoryTag;
using Values = std::vector<float>;
using Engine = fsdp::Engine<toy::LocalHost, fsdp::Fp32>;
using NarrowMasters = fsdp::Precision<fsdp::bf16, float, fsdp::bf16>;

enum class Kind { adamw, narrow, groups, sgd, several };

/// Five steps, two of them clipped and one skipped. @return the weights
template <class P>
Values train(toy::World const& world, Kind kind, bool offload) {
  return toy::on_patches<P>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
    using E = std::remove_reference_t<decltype(engine)>;
    auto const loop = [&](auto const& step) {
      for (int i = 0; i < 6; ++i) {
        patches.step({.step = i}, i == 2 ? 1 : -1);  // an infinity: the step is skipped
        step(fsdp::clip_grad_norm(engine, i < 4 ? 1e9f : 0.5f));
      }
      return toy::all_parameters(engine);
    };
    if (kind == Kind::narrow) {
      fsdp::AdamW<E, fsdp::bf16> adamw(engine, {.stochastic_rounding = true, .offload_moments = offload});
      return loop([&](auto const& norm) { adamw.step(0.02f, norm); });
    }
    if (kind == Kind::sgd) {
      fsdp::Sgd sgd(engine, {.momentum = 0.9f, .nesterov = true, .offload_moments = offload});
      return loop([&](auto const& norm) { sgd.step(0.02f, norm); });
    }
    if (kind == Kind::several) {
      fsdp::Muon muon(engine, fsdp::matching("*.0.*", "*.2.*"), {.offload_moments = offload});
      fsdp::AdamW adamw(engine, muon.rest(), {.offload_moments = offload});
      fsdp::Optimizers both(muon, adamw);
      return loop([&](auto const& norm) { both.step({0.02f, 0.01f}, norm); });
    }
    fsdp::ParamGroups groups;
    if (kind == Kind::groups) groups = {{.tensors = "*.bias", .lr_scale = 2.0f, .beta1 = 0.5f}};
    fsdp::AdamW adamw(engine, {.weight_decay = 0.1f, .offload_moments = offload}, groups);
    return loop([&](auto const& norm) { adamw.step(0.02f, norm); });
  });
}

}  // namespace

TEST_CASE("moments in host memory give the bits of moments on the device") {
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    for (auto const kind : {Kind::adamw, Kind::narrow, Kind::groups, Kind::sgd, Kind::several})
      CHECK((train<fsdp::Fp32>(world, kind, true) == train<fsdp::Fp32>(world, kind, false)));
    CHECK((train<NarrowMasters>(world, Kind::narrow, true) == train<NarrowMasters>(world, Kind::narrow, false)));
  }
}

TEST_CASE("the device has two units' moments, host memory all of them, as planned") {
  for (auto const& world : toy::worlds()) {
    toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [](Engine& engine, auto& patches) {
      auto const& account = engine.account();
      std::int64_t all = 0, largest = 0;
      {
        fsdp::AdamW adamw(engine, {.offload_moments = true});
        for (std::size_t u = 0; u < engine.shards().size(); ++u) {
          all += engine.shards()[u].shard_numel();
          largest = std::max(largest, engine.shards()[u].shard_numel());
        }
        RANK_CHECK(account.reserved(MemoryTag::optimizer) == 2 * 8 * largest);
        RANK_CHECK(account.live(MemoryTag::optimizer) == 2 * 8 * largest);
        RANK_CHECK(account.reserved(MemoryTag::offloaded) == 8 * all);
        auto input = engine.plan_input();
        input.offload_moments = true;
        auto const plan = fsdp::memory_plan(input);
        RANK_CHECK(plan.optimizer == 2 * 8 * largest && plan.host == 8 * all);
        RANK_CHECK(account.reserved_state() == plan.reserved());
        patches.step({.step = 0});
        adamw.step();
        auto moved = std::move(adamw);
        patches.step({.step = 1});
        moved.step();
        RANK_CHECK(account.reserved(MemoryTag::offloaded) == 8 * all);
      }
      RANK_CHECK(account.reserved(MemoryTag::offloaded) == 0 && account.live(MemoryTag::offloaded) == 0);
      RANK_CHECK(account.reserved(MemoryTag::optimizer) == 0 && account.live(MemoryTag::optimizer) == 0);
      return 0;
    });
  }
  CHECK_RANKS();
}

TEST_CASE("the next unit's moments are fetched before a unit is updated, and stored after it") {
  std::vector<std::string> order;
  std::int64_t bytes = 0;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](Engine& engine, auto& patches) {
    fsdp::AdamW adamw(engine, {.offload_moments = true});
    patches.step({.step = 0});
    engine.start_trace(100);
    adamw.step();
    for (auto const& span : engine.stop_trace()) {
      if (engine.rank() != 0) continue;
      order.push_back(span.what + " " + span.unit.substr(8));
      if (span.kind == fsdp::StreamKind::copy) bytes += span.bytes;
      RANK_CHECK((span.kind == fsdp::StreamKind::copy) == (span.what != "optimizer"));
    }
    std::int64_t all = 0;
    for (std::size_t u = 0; u < 3; ++u) all += engine.shards()[u].shard_numel();
    if (engine.rank() == 0) RANK_CHECK(bytes == 2 * 8 * all);  // each moves both ways
    return 0;
  });
  CHECK(order == std::vector<std::string>{"fetch 0", "optimizer 0", "fetch 1", "store 0", "optimizer 1", "fetch 2",
                                          "store 1", "optimizer 2", "store 2"});
  CHECK_RANKS();
}

namespace {
/// A unit of one element: most ranks have none of it.
struct Small {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {1});
  }
  void forward(fsdp::host::Stream&, Params<float const> const&) const {}
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, float by) const {
    stream.enqueue([g, by] { *g.w.data += by; });
  }
};
}  // namespace

TEST_CASE("units of which a rank has no tensor's elements, and frozen ones, are passed over") {
  auto const run = [](bool offload) {
    Values result;
    fsdp::local::run(4, fsdp::host::Device{}, [&](toy::LocalHost comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine(mesh, fsdp::FullShard{});
      auto small = engine.shard(std::vector<Small>(3), "small");
      auto frozen = engine.shard(Small{}, "frozen", {.frozen = true});
      auto more = engine.shard(std::vector<Small>(2), "more");
      fsdp::Sgd sgd(engine, fsdp::matching("small.1.*", "more.0.*"), {.momentum = 0.5f, .offload_moments = offload});
      fsdp::AdamW adamw(engine, sgd.rest(), {.offload_moments = offload});
      fsdp::Optimizers both(sgd, adamw);
      for (int step = 0; step < 4; ++step) {
        for (auto& each : small) each.forward();
        frozen.forward();
        for (auto& each : more) each.forward();
        for (std::size_t i = 2; i-- > 0;) more[i].backward(1.0f + static_cast<float>(step));
        frozen.backward(1.0f);
        for (std::size_t i = 3; i-- > 0;) small[i].backward(static_cast<float>(i));
        both.step({0.1f, 0.1f});
      }
      auto values = toy::all_parameters(engine);
      if (first) result = std::move(values);
    });
    return result;
  };
  auto const with = run(true), without = run(false);
  CHECK(with == without);
  CHECK(with.size() == 6);
}

TEST_CASE("checkpoints of offloaded moments are those of moments on the device, in the background too") {
  fsdp::testing::TemporaryFolder const folder;
  auto const on = [&](int ranks, bool offload, auto const& body) {
    return toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, ranks, 0, [&](Engine& engine, auto& patches) {
      fsdp::AdamW adamw(engine, {.offload_moments = offload});
      auto const train = [&](int first, int last) {
        for (int step = first; step < last; ++step) {
          patches.step({.step = step, .alike = true});
          adamw.step(0.02f);
        }
        return toy::all_parameters(engine);
      };
      return body(engine, adamw, train);
    });
  };
  auto const whole = on(1, false, [](auto&, auto&, auto const& train) { return train(0, 6); });
  for (bool const offload : {false, true}) {
    on(3, offload, [&](auto& engine, auto& adamw, auto const& train) {
      fsdp::BackgroundSaver saver(engine);
      train(0, 3);
      saver.save(adamw, folder.path);
      train(3, 5);  // stores go on while the copy is written
      saver.wait();
      return 0;
    });
    for (bool const other : {false, true}) {
      auto const now = on(2, other, [&](auto& engine, auto& adamw, auto const& train) {
        train(7, 8);
        fsdp::load_latest(engine, adamw, folder.path);
        return train(3, 6);
      });
      CHECK((now == whole));
    }
  }
}
