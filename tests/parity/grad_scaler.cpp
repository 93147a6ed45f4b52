// SPDX-License-Identifier: Apache-2.0
// GradScaler: overflows planted on one rank, skipped by all; the scale's path is that of PyTorch's scaler.
// skip-sanitizers
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/shard_group.hpp"

namespace {

/// The rules of torch.amp.GradScaler on the host.
struct Model {
  float scale = 65536.0f;
  int tracker = 0;
  int interval = 2000;
  void update(bool found_inf) {
    if (found_inf) {
      scale *= 0.5f, tracker = 0;
    } else if (++tracker == interval) {
      scale *= 2.0f, tracker = 0;
    }
  }
};

bool planted(int step) { return step == 2 || step == 7 || step == 8 || step == 15; }
constexpr int planted_steps = 4, all_steps = 24;

struct Outcome {
  std::vector<float> scales;        ///< after each step
  std::vector<int> good_steps;      ///< likewise
  std::vector<bool> changed;        ///< whether the step changed this rank's parameters
  std::vector<std::string> shards;  ///< bytes of this rank's masters after each step
  std::vector<double> norms;
  std::vector<float> parameters;  ///< full, at the end
  std::int64_t skipped = 0, taken = 0;
};

template <class E>
std::string shard_bytes(E& engine) {
  engine.synchronize();
  std::string bytes;
  for (std::size_t u = 0; u < engine.shards().size(); ++u)
    bytes.append(reinterpret_cast<char const*>(engine.shards()[u].master),
                 static_cast<std::size_t>(engine.shards()[u].shard_numel()) * sizeof(float));
  return bytes;
}

/// Observations of each rank.
/// @param left_out  planted steps are not run at all; the scale is set to what it must become
std::vector<Outcome> train(fsdp::ShardingStrategy const& strategy, int ranks, int shard_group, float clip,
                           bool left_out = false, bool sgd = false) {
  std::vector<Outcome> outcomes(static_cast<std::size_t>(ranks));
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](toy::LocalHost comm) {
    auto const rank = comm.rank();
    auto& mine = outcomes[static_cast<std::size_t>(rank)];
    fsdp::Mesh<toy::LocalHost> mesh(std::move(comm));
    fsdp::Engine<toy::LocalHost, fsdp::Fp16> engine(mesh, fsdp::testing::in_groups_of(shard_group, strategy));
    toy::Patches patches(engine);
    fsdp::GradScaler scaler(engine, {.growth_interval = 3});
    Model model{.interval = 3};
    auto const loop = [&](auto& optimizer) {
      for (int step = 0; step < all_steps; ++step) {
        bool const plant = planted(step);
        model.update(plant);
        if (plant && left_out) {
          scaler.load_state({model.scale, model.tracker});
          continue;
        }
        auto const before = shard_bytes(engine);
        patches.step({.step = step, .scale = scaler.scale(), .size = 1e-3f},
                     plant && rank == ranks / 2 ? step % 3 : -1);
        fsdp::GradNorm<std::remove_reference_t<decltype(engine)>> norm;
        if (clip > 0.0f) {
          norm = fsdp::clip_grad_norm(engine, clip);
          mine.norms.push_back(norm.value());
        }
        scaler.step(optimizer, 0.05f, norm);
        auto const state = scaler.state();
        mine.scales.push_back(state.scale), mine.good_steps.push_back(state.good_steps);
        mine.shards.push_back(shard_bytes(engine));
        mine.changed.push_back(mine.shards.back() != before);
      }
      mine.taken = optimizer.steps();
    };
    if (sgd) {
      fsdp::Sgd optimizer(engine, {.momentum = 0.9f});
      loop(optimizer);
    } else {
      fsdp::AdamW optimizer(engine, {.weight_decay = 0.1f});
      loop(optimizer);
    }
    mine.skipped = scaler.skipped();
    mine.parameters = toy::all_parameters(engine);
  });
  return outcomes;
}

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check(fsdp::ShardingStrategy const& strategy, int ranks, int shard_group, float clip, bool sgd = false) {
  auto const outcomes = train(strategy, ranks, shard_group, clip, false, sgd);
  for (auto const& mine : outcomes) {
    REQUIRE(mine.scales.size() == all_steps);
    Model model{.interval = 3};
    for (int step = 0; step < all_steps; ++step) {
      auto const at = static_cast<std::size_t>(step);
      model.update(planted(step));
      CHECK(mine.scales[at] == model.scale);
      CHECK(mine.good_steps[at] == model.tracker);
      CHECK(mine.changed[at] != planted(step));
      if (clip > 0.0f) CHECK(std::isfinite(mine.norms[at]) != planted(step));
    }
    CHECK(mine.scales == outcomes[0].scales);
    CHECK(mine.skipped == planted_steps);
    CHECK(mine.taken == all_steps - planted_steps);
  }
  // As if the skipped steps had never been: moments and bias corrections did not see them.
  auto const without = train(strategy, ranks, shard_group, clip, true, sgd);
  CHECK(without[0].skipped == 0);
  CHECK(equal_bits(outcomes[0].parameters, without[0].parameters));
}

}  // namespace

TEST_CASE("an overflow on one rank is skipped by all, and the scale follows PyTorch's rules") {
  SECTION("FullShard") { check(fsdp::FullShard{}, 4, 0, 0.0f); }
  SECTION("FullShard, clipping") { check(fsdp::FullShard{}, 4, 0, 1e-3f); }
  SECTION("NoShard") { check(fsdp::NoShard{}, 4, 0, 0.0f); }
  SECTION("NoShard, clipping") { check(fsdp::NoShard{}, 4, 0, 1e-3f); }
  SECTION("HybridShard") { check(fsdp::HybridShard<>{}, 4, 2, 0.0f); }
  SECTION("HybridShard, clipping") { check(fsdp::HybridShard<>{}, 4, 2, 1e-3f); }
  SECTION("ShardGradOp on three ranks, SGD") { check(fsdp::ShardGradOp{}, 3, 0, 1e-3f, true); }
  SECTION("one rank") { check(fsdp::FullShard{}, 1, 0, 1e-3f); }
}

TEST_CASE("with a scale, the norm is that of the unscaled gradients, and the step is that without one") {
  struct Seen {
    std::vector<float> parameters;
    double norm = 0.0, exact = 0.0;
  };
  auto const run = [](bool scaled, fsdp::NormKind kind) {
    // fp32 gradients: a power of two changes no bit of them.
    return toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 3, 0, [&](auto& engine, auto& patches) {
      using E = std::remove_reference_t<decltype(engine)>;
      Seen seen;
      fsdp::AdamW adamw(engine);
      std::optional<fsdp::GradScaler<E>> scaler;
      if (scaled) scaler.emplace(engine);
      for (int step = 0; step < 3; ++step) {
        patches.step({.step = step, .scale = scaled ? scaler->scale() : nullptr});
        auto const norm = fsdp::clip_grad_norm(engine, 0.5f, {.norm = kind});
        seen.norm = norm.value();
        seen.exact = 0.0;
        for (double const g : toy::all_gradients(engine)) {
          double const size = std::fabs(g) / (scaled ? 65536.0 : 1.0);
          if (kind == fsdp::NormKind::inf)
            seen.exact = std::max(seen.exact, size);
          else
            seen.exact += kind == fsdp::NormKind::l1 ? size : size * size;
        }
        if (kind == fsdp::NormKind::l2) seen.exact = std::sqrt(seen.exact);
        if (scaled)
          scaler->step(adamw, 0.1f, norm);
        else
          adamw.step(0.1f, norm);
      }
      seen.parameters = toy::all_parameters(engine);
      return seen;
    });
  };
  for (auto const kind : {fsdp::NormKind::l1, fsdp::NormKind::l2, fsdp::NormKind::inf}) {
    auto const scaled = run(true, kind), plain = run(false, kind);
    CHECK(std::fabs(scaled.norm - scaled.exact) <= 1e-12 * scaled.exact);
    CHECK(scaled.norm == plain.norm);
    CHECK(equal_bits(scaled.parameters, plain.parameters));
  }
}

TEST_CASE("gradients that overflow by themselves bring the scale down until they do not") {
  struct Seen {
    std::vector<float> parameters;
    float scale = 0.0f;
    std::int64_t skipped = 0;
  };
  auto const seen = toy::on_patches<fsdp::Fp16>(fsdp::FullShard{}, 4, 0, [](auto& engine, auto& patches) {
    fsdp::AdamW adamw(engine);
    fsdp::GradScaler scaler(engine);
    for (int step = 0; step < 10; ++step) {
      patches.step({.step = step, .scale = scaler.scale()});
      scaler.step(adamw, 0.01f);
    }
    return Seen{toy::all_parameters(engine), scaler.value(), scaler.skipped()};
  });
  // Gradients of 1 to 1.5, summed over four ranks, pass 65504 at 65536 and at 16384 still, but not at 8192.
  CHECK(seen.skipped >= 2);
  CHECK(seen.skipped <= 4);
  CHECK(seen.scale == 65536.0f / static_cast<float>(1 << seen.skipped));
  for (float const value : seen.parameters) REQUIRE(std::isfinite(value));
}

namespace {
/// Holds the stream until the flag is set.
struct Hold {
  template <class Block>
  void operator()(Block const&, std::int64_t, std::atomic<bool>* go) const {
    while (!go->load()) std::this_thread::yield();
  }
};
}  // namespace

TEST_CASE("clipping, unscaling, stepping and adapting the scale do not wait for device work") {
  std::atomic<bool> go{false};
  std::atomic<int> enqueued{0};
  std::vector<float> scales(2);
  fsdp::local::run(2, fsdp::host::Device{}, [&](toy::LocalHost comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    fsdp::Mesh<toy::LocalHost> mesh(std::move(comm));
    fsdp::Engine<toy::LocalHost, fsdp::Fp16> engine(mesh, fsdp::FullShard{});
    toy::Patches patches(engine);
    fsdp::AdamW adamw(engine);
    fsdp::GradScaler scaler(engine, {.growth_interval = 1});
    engine.device().launch(engine.compute(), std::int64_t{1}, Hold{}, &go);
    patches.step({.scale = scaler.scale(), .size = 1e-3f});
    scaler.step(adamw, 0.1f, fsdp::clip_grad_norm(engine, 1.0f));
    if (++enqueued == 2) go.store(true);  // a call that waited would never let this come
    scales[rank] = scaler.value();
  });
  CHECK(scales == std::vector<float>{131072.0f, 131072.0f});
}

TEST_CASE("state goes out and comes back") {
  auto const right = toy::on_patches<fsdp::Fp16>(fsdp::FullShard{}, 2, 0, [](auto& engine, auto& patches) {
    fsdp::AdamW adamw(engine);
    fsdp::LossScale saved;
    bool same = true;
    {
      fsdp::GradScaler scaler(engine, {.init_scale = 1024.0f, .growth_interval = 4});
      for (int step = 0; step < 6; ++step) {
        patches.step({.step = step, .scale = scaler.scale(), .size = 1e-3f});
        scaler.step(adamw, 0.01f);
      }
      saved = scaler.state();
      same = saved.scale == 2048.0f && saved.good_steps == 2;
    }
    patches.step({.size = 1e-3f});
    adamw.step(0.01f);  // the scaler is gone: gradients are what they are
    fsdp::GradScaler scaler(engine, {.growth_interval = 4});
    same = same && scaler.value() == 65536.0f;
    scaler.load_state(saved);
    for (int step = 0; step < 2; ++step) {
      patches.step({.step = step, .scale = scaler.scale(), .size = 1e-3f});
      scaler.step(adamw, 0.01f);
    }
    return same && scaler.value() == 4096.0f && scaler.state().good_steps == 0;
  });
  CHECK(right);
}

TEST_CASE("misuse of the scaler is an error with words") {
  auto const texts = toy::on_patches<fsdp::Fp16>(fsdp::FullShard{}, 1, 0, [](auto& engine, auto& patches) {
    using Scaler = fsdp::GradScaler<std::remove_reference_t<decltype(engine)>>;
    std::vector<std::string> caught;
    auto const expect = [&](auto action) {
      try {
        action();
        caught.emplace_back("nothing");
      } catch (fsdp::UsageError const& error) {
        caught.emplace_back(error.what());
      }
    };
    expect([&] { Scaler(engine, {.growth_factor = 1.0f}); });
    expect([&] { Scaler(engine, {.backoff_factor = 1.0f}); });
    expect([&] { Scaler(engine, {.growth_interval = 0}); });
    expect([&] { Scaler(engine, {.init_scale = INFINITY}); });
    fsdp::AdamW adamw(engine);
    Scaler scaler(engine);
    expect([&] { Scaler second(engine); });
    expect([&] { scaler.step(adamw, 0.1f); });
    patches.step({.scale = scaler.scale(), .size = 1e-3f});
    expect([&] { adamw.step(0.1f); });
    expect([&] { scaler.load_state({0.0f, 0}); });
    scaler.step(adamw, 0.1f);
    return caught;
  });
  std::vector<std::string> const expected{"growth_factor 1 must be above 1",
                                          "backoff_factor 1 must be in (0, 1)",
                                          "growth interval must be positive",
                                          "scale inf must be finite",
                                          "already has a GradScaler",
                                          "has no reduced gradients",
                                          "call GradScaler::step",
                                          "scale 0 must be finite"};
  REQUIRE(texts.size() == expected.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    INFO(texts[i]);
    CHECK(texts[i].find(expected[i]) != std::string::npos);
  }
}

TEST_CASE("ranks whose scalers differ all hear of it") {
  std::vector<std::string> texts(2);
  fsdp::local::run(2, fsdp::host::Device{}, [&](toy::LocalHost comm) {
    auto const rank = comm.rank();
    fsdp::Mesh<toy::LocalHost> mesh(std::move(comm));
    fsdp::Engine<toy::LocalHost, fsdp::Fp16> engine(mesh, fsdp::FullShard{});
    toy::Patches patches(engine);
    auto& text = texts[static_cast<std::size_t>(rank)];
    try {
      fsdp::GradScaler scaler(engine, {.growth_interval = 10 + rank});
    } catch (fsdp::ConfigError const& error) {
      text += error.what();
    }
    fsdp::GradScaler scaler(engine);
    try {
      scaler.load_state({rank == 0 ? 2.0f : 4.0f, 0});
    } catch (fsdp::ConfigError const& error) {
      text += error.what();
    }
  });
  for (auto const& text : texts) {
    CHECK(text.find("interval 10") != std::string::npos);
    CHECK(text.find("scale 4") != std::string::npos);
  }
}
