// SPDX-License-Identifier: Apache-2.0
// Moments, masters and gradients in host memory, each alone and together: the bits of state on the device, two units'
// state on the device, fetched while the unit before is updated.
//
// full-run: [offload]
// needs: nlohmann_json xxHash
// skip-tsan
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/detail/kernels/elementwise.hpp"
#include "fsdp/ema.hpp"
#include "fsdp/muon.hpp"
#include "fsdp/offload.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::MemoryTag;
using fsdp::testing::has;
using fsdp::testing::what;
using Values = std::vector<float>;
using Engine = fsdp::Engine<toy::LocalHost, fsdp::Fp32>;
using NarrowMasters = fsdp::Precision<fsdp::bf16, float, fsdp::bf16>;

enum class Kind { adamw, narrow, groups, sgd, several };

struct Setting {
  fsdp::OffloadOptions offload{};
  Kind kind = Kind::adamw;
  int micro_steps = 1;
  bool hooks = false;  // double each reduced gradient
  fsdp::EngineOptions engine{};
};

template <class E>
void keep_on_host(E& engine, fsdp::OffloadOptions const& options) {
  if (options.moments || options.masters || options.gradients) fsdp::offload(engine, options);
}

/// Five steps, two of them clipped and one skipped. @return the weights, and the gradients of the last step
template <class P>
Values train(toy::World const& world, Setting const& setting) {
  auto const run = [&](auto& engine, auto& patches) {
    using E = std::remove_reference_t<decltype(engine)>;
    keep_on_host(engine, setting.offload);
    auto const shards = engine.shards();
    for (std::size_t u = 0; setting.hooks && u < shards.size(); ++u)
      shards.on_reduced(shards[u], [&engine](auto& stream, std::span<float> gradients) {
        fsdp::kernels::add(engine.device(), stream, gradients.data(), gradients.data(),
                           static_cast<std::int64_t>(gradients.size()));
      });
    auto const loop = [&](auto const& step) {
      for (int i = 0; i < 6; ++i) {
        for (int micro = 0; micro < setting.micro_steps; ++micro) {
          bool const waits = setting.engine.allow_no_sync && micro + 1 < setting.micro_steps;
          auto const scope = engine.no_sync(waits);
          patches.step({.step = 10 * i + micro}, i == 2 ? 1 : -1);  // an infinity: the step is skipped
        }
        step(fsdp::clip_grad_norm(engine, i < 4 ? 1e9f : 0.5f));
      }
      auto values = toy::all_parameters(engine);
      patches.step({.step = 100});
      for (auto const value : toy::all_gradients(engine)) values.push_back(value);
      return values;
    };
    if (setting.kind == Kind::narrow) {
      fsdp::AdamW<E, fsdp::bf16> adamw(engine, {.stochastic_rounding = true});
      return loop([&](auto const& norm) { adamw.step(0.02f, norm); });
    }
    if (setting.kind == Kind::sgd) {
      fsdp::Sgd sgd(engine, {.momentum = 0.9f, .nesterov = true});
      return loop([&](auto const& norm) { sgd.step(0.02f, norm); });
    }
    if (setting.kind == Kind::several) {
      fsdp::Muon muon(engine, fsdp::matching("*.0.*", "*.2.*"));
      fsdp::AdamW adamw(engine, muon.rest());
      fsdp::Optimizers both(muon, adamw);
      return loop([&](auto const& norm) { both.step({0.02f, 0.01f}, norm); });
    }
    fsdp::ParamGroups groups;
    if (setting.kind == Kind::groups) groups = {{.tensors = "*.bias", .lr_scale = 2.0f, .beta1 = 0.5f}};
    fsdp::AdamW adamw(engine, {.weight_decay = 0.1f}, groups);
    return loop([&](auto const& norm) { adamw.step(0.02f, norm); });
  };
  return toy::on_patches<P>(world.strategy, world.ranks, world.group, run, setting.engine);
}

/// The state that can be offloaded under a policy, each alone and all together.
std::vector<fsdp::OffloadOptions> choices(bool with_masters) {
  std::vector<fsdp::OffloadOptions> all{{.moments = true}, {.gradients = true}, {.moments = true, .gradients = true}};
  if (with_masters)
    for (auto const& more : {fsdp::OffloadOptions{.masters = true},
                             {.moments = true, .masters = true},
                             {.moments = true, .masters = true, .gradients = true}})
      all.push_back(more);
  return all;
}
std::string text(fsdp::OffloadOptions const& options) {
  return std::string(options.moments ? "moments " : "") + (options.masters ? "masters " : "") +
         (options.gradients ? "gradients" : "");
}

/// Checks that offloading any part of the state keeps the bits.
/// @param turn  everything at once, and one of the other choices, which take turns; none: all choices
template <class P>
void check(toy::World const& world, Setting setting, std::optional<std::size_t> turn) {
  if (!fsdp::testing::next_cell()) return;
  auto const plain = train<P>(world, setting);
  auto all = choices(!std::is_same_v<typename P::Master, typename P::Param>);
  if (turn) all = {all[*turn % (all.size() - 1)], all.back()};
  if (fsdp::testing::sanitized) all.erase(all.begin(), all.end() - 1);  // everything at once has all buffers
  for (auto const& options : all) {
    INFO(text(options));
    setting.offload = options;
    CHECK((train<P>(world, setting) == plain));
  }
}

void check_kinds(bool all) {
  std::size_t worlds = 0;
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    auto turn = all ? std::nullopt : std::optional(worlds++);
    for (auto const kind : {Kind::adamw, Kind::groups, Kind::sgd, Kind::several}) {
      INFO("kind " << static_cast<int>(kind));
      check<fsdp::Fp32>(world, {.kind = kind}, turn);
      check<fsdp::Bf16>(world, {.kind = kind}, turn);
      if (turn) ++*turn;
    }
    check<fsdp::Bf16Reduce>(world, {}, turn);
    check<fsdp::Fp32>(world, {.kind = Kind::narrow}, turn);
    check<NarrowMasters>(world, {.kind = Kind::narrow}, turn);
  }
}

void check_sums(bool all) {
  std::size_t worlds = 0;
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    auto const turn = all ? std::nullopt : std::optional(worlds++);
    check<fsdp::Bf16>(world, {.hooks = true}, turn);
    check<fsdp::Bf16>(world, {.engine = {.reduce_dtype = fsdp::DType::bf16}}, turn);
    // Where no other rank shares a unit, offloaded gradients are summed in another order.
    if (world.ranks == 1 || !world.strategy.shards || world.group == 1) continue;
    check<fsdp::Bf16>(world, {.micro_steps = 3}, turn);
    check<fsdp::Bf16Reduce>(world, {.micro_steps = 3, .hooks = true}, turn);
    check<fsdp::Bf16>(world, {.micro_steps = 3, .engine = {.allow_no_sync = true}}, turn);
    check<fsdp::Bf16>(world, {.engine = {.prefetch = 0, .allow_no_replica_sync = world.strategy.grouped}}, turn);
  }
}

}  // namespace

TEST_CASE("state in host memory gives the bits of state on the device") { check_kinds(false); }

TEST_CASE("sums over micro-steps, rounded reductions and functions of the caller see the same gradients") {
  check_sums(false);
}

TEST_CASE("state in host memory gives the bits of state on the device, for every choice of what is offloaded",
          "[.][offload]") {
  check_kinds(true);
  check_sums(true);
}

TEST_CASE("the device has two units' state, host memory all of it, as planned") {
  auto const on = [](auto policy, toy::World const& world, fsdp::OffloadOptions const& options) {
    using P = decltype(policy);
    toy::on_patches<P>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
      auto const& account = engine.account();
      fsdp::offload(engine, options);
      std::int64_t all = 0, largest = 0;
      {
        fsdp::AdamW adamw(engine);
        for (std::size_t u = 0; u < engine.shards().size(); ++u) {
          all += engine.shards()[u].shard_numel();
          largest = std::max(largest, engine.shards()[u].shard_numel());
        }
        auto const host = (options.moments ? 8 : 0) + (options.masters ? 4 : 0) + (options.gradients ? 4 : 0);
        std::int64_t const masters = sizeof(typename P::Master), parameters = sizeof(typename P::Param);
        std::pair<MemoryTag, std::int64_t> const expected[]{
            {MemoryTag::optimizer, options.moments ? 2 * 8 * largest : 8 * all},
            {MemoryTag::parameters, options.masters ? parameters * all + 2 * 4 * largest : masters * all},
            {MemoryTag::gradients, options.gradients ? 2 * 4 * largest : 4 * all},
            {MemoryTag::offloaded, host * all}};
        for (auto const& [tag, bytes] : expected)
          RANK_CHECK(account.reserved(tag) == bytes && account.live(tag) == bytes);
        auto const plan = fsdp::memory_plan(engine.plan_input());
        RANK_CHECK(plan.host == host * all);
        RANK_CHECK(plan.optimizer == expected[0].second && plan.parameters == expected[1].second &&
                   plan.gradients == expected[2].second);
        RANK_CHECK(account.reserved_state() == plan.reserved());
        patches.step({.step = 0});
        adamw.step();
        auto moved = std::move(adamw);
        patches.step({.step = 1});
        moved.step();
        RANK_CHECK(account.reserved(MemoryTag::offloaded) == host * all);
        RANK_CHECK(engine.shards().late_events() == 0);
      }
      RANK_CHECK(account.reserved(MemoryTag::optimizer) == 0 && account.live(MemoryTag::optimizer) == 0);
      return 0;
    });
  };
  for (auto const& world : toy::worlds()) {
    for (auto const& options : choices(false)) on(fsdp::Fp32{}, world, options);
    for (auto const& options : choices(true)) on(fsdp::Bf16{}, world, options);
  }
  CHECK_RANKS();
}

TEST_CASE("the next unit's moments are fetched before a unit is updated, and stored after it") {
  std::vector<std::string> order;
  std::int64_t bytes = 0;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](Engine& engine, auto& patches) {
    fsdp::offload(engine, {.moments = true});
    fsdp::AdamW adamw(engine);
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
  CHECK(order == std::vector<std::string>{"fetch 0", "fetch 1", "optimizer 0", "store 0", "fetch 2", "optimizer 1",
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
  template <class T>
  void forward(fsdp::host::Stream&, Params<T> const&) const {}
  template <class T>
  void backward(fsdp::host::Stream& stream, Params<T> const&, Params<float> const& g, float by) const {
    stream.enqueue([g, by] { *g.w.data += by; });
  }
};
}  // namespace

TEST_CASE("units of which a rank has no tensor's elements, and frozen ones, are passed over") {
  auto const run = [](bool offloads) {
    Values result;
    fsdp::local::run(4, fsdp::host::Device{}, [&](toy::LocalHost comm) {
      bool const first = comm.rank() == 0;
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16{});
      auto small = engine.shard(std::vector<Small>(3), "small");
      auto frozen = engine.shard(Small{}, "frozen", {.frozen = true});
      auto more = engine.shard(std::vector<Small>(2), "more");
      if (offloads) fsdp::offload(engine, {.moments = true, .masters = true, .gradients = true});
      fsdp::Sgd sgd(engine, fsdp::matching("small.1.*", "more.0.*"), {.momentum = 0.5f});
      fsdp::AdamW adamw(engine, sgd.rest());
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

TEST_CASE("checkpoints of offloaded state are those of state on the device, in the background too") {
  fsdp::testing::TemporaryFolder const folder;
  auto const on = [&](int ranks, bool offloads, auto const& body) {
    return toy::on_patches<fsdp::Bf16>(fsdp::FullShard{}, ranks, 0, [&](auto& engine, auto& patches) {
      if (offloads) fsdp::offload(engine, {.moments = true, .masters = true, .gradients = true});
      fsdp::AdamW adamw(engine);
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
  for (bool const offloads : {false, true}) {
    on(3, offloads, [&](auto& engine, auto& adamw, auto const& train) {
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

TEST_CASE("a loss scaler skips the same steps, and finds the same scale") {
  for (auto const& world : toy::worlds()) {
    INFO(world.strategy.name << " on " << world.ranks << " ranks");
    auto const run = [&](fsdp::OffloadOptions const& options) {
      return toy::on_patches<fsdp::Fp16>(world.strategy, world.ranks, world.group, [&](auto& engine, auto& patches) {
        keep_on_host(engine, options);
        fsdp::AdamW adamw(engine);
        fsdp::GradScaler scaler(engine);
        for (int step = 0; step < 8; ++step) {  // the first ones overflow at the initial scale
          patches.step({.step = step, .scale = scaler.scale()}, step == 6 ? 0 : -1);
          scaler.step(adamw, 0.01f, fsdp::clip_grad_norm(engine, 0.5f));
        }
        auto values = toy::all_parameters(engine);
        values.push_back(scaler.value());
        values.push_back(static_cast<float>(scaler.skipped()));
        return values;
      });
    };
    auto const plain = run({});
    CHECK((plain.back() >= 2.0f && plain.back() < 8.0f));
    for (auto const& options : choices(true)) {
      INFO(text(options));
      CHECK((run(options) == plain));
    }
  }
}

TEST_CASE("averages of offloaded masters are those of masters on the device") {
  auto const run = [](bool offloads) {
    return toy::on_patches<fsdp::Bf16>(fsdp::FullShard{}, 3, 0, [&](auto& engine, auto& patches) {
      if (offloads) fsdp::offload(engine, {.moments = true, .masters = true, .gradients = true});
      fsdp::Sgd sgd(engine);
      fsdp::Ema ema(engine, 0.5f);
      Values values;
      auto const look = [&] {
        for (auto const value : toy::all_parameters(engine)) values.push_back(value);
      };
      for (int step = 0; step < 4; ++step) {
        patches.step({.step = step});
        sgd.step(0.1f);
        ema.update();
        if (step % 2 != 0) continue;
        auto const swapped = ema.swap();
        look();
      }
      look();
      RANK_CHECK(engine.shards().late_events() == 0);
      return values;
    });
  };
  CHECK((run(true) == run(false)));
  CHECK_RANKS();
}

TEST_CASE("what cannot be offloaded is refused by name, and changes nothing") {
  fsdp::local::run(1, fsdp::host::Device{}, [](toy::LocalHost comm) {
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine fp32(mesh, fsdp::FullShard{});
    auto const why = [](auto& engine, fsdp::OffloadOptions const& options) {
      return what([&] { fsdp::offload(engine, options); });
    };
    CHECK(has(why(fp32, {.parameters = true}), "parameters stay on the device"));
    CHECK(has(why(fp32, {.moments = true, .masters = true}), "masters are the parameters here, of type fp32"));
    CHECK(has(why(fp32, {}), "the options name nothing"));
    fsdp::offload(fp32, {.moments = true});
    CHECK(has(why(fp32, {.gradients = true}), "offload was called twice"));
    fsdp::Engine sealed(mesh, fsdp::FullShard{}, fsdp::Bf16{});
    auto small = sealed.shard(Small{}, "small");
    sealed.seal();
    CHECK(has(why(sealed, {.masters = true}), "state was offloaded too late; call offload before"));
    CHECK(sealed.account().reserved(MemoryTag::offloaded) == 0);
  });
  std::vector<std::string> texts(2);
  fsdp::local::run(2, fsdp::host::Device{}, [&](toy::LocalHost comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    fsdp::Mesh mesh(std::move(comm));
    fsdp::Engine engine(mesh, fsdp::FullShard{}, fsdp::Bf16{});
    auto small = engine.shard(Small{}, "small");
    fsdp::offload(engine, {.moments = true, .masters = rank == 1});
    texts[rank] = what([&] { engine.seal(); });
  });
  for (auto const& text : texts) CHECK(has(text, "offloaded: moments true, masters"));
}
