// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several optimizers and of averages of weights: on other ranks, with other strategies, in the
// background; what is missing in them is told.
// skip-tsan
// needs: nlohmann_json xxHash
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/ema.hpp"
#include "fsdp/muon.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;
using Values = std::vector<float>;
using Engine = fsdp::Engine<toy::LocalHost, fsdp::Fp32>;

/// Muon, AdamW with two groups, and averages.
struct Trainer {
  Engine& engine;
  fsdp::Muon<Engine> muon{engine, fsdp::matching("*.weight")};
  fsdp::AdamW<Engine> adamw{
      engine, muon.rest(), {.lr = 0.02f}, {{.tensors = "*.1.bias", .lr_scale = 2.0f, .beta1 = 0.5f}}};
  fsdp::Optimizers<fsdp::Muon<Engine>, fsdp::AdamW<Engine>> both{muon, adamw};
  fsdp::Ema<Engine> ema{engine, 0.75f};
  fsdp::TrainingState<fsdp::Optimizers<fsdp::Muon<Engine>, fsdp::AdamW<Engine>>, fsdp::Ema<Engine>> state{both, ema};

  template <class Patches>
  void train(Patches& patches, int first, int last) {
    for (int step = first; step < last; ++step) {
      patches.step({.step = step, .alike = true});
      both.step(fsdp::clip_grad_norm(engine, 1.0f));
      ema.update();
    }
  }
};

/// Weights and averages; on rank 0.
std::pair<Values, Values> results(Trainer& trainer) {
  auto weights = toy::all_parameters(trainer.engine);
  auto const on = trainer.ema.swap();
  return {std::move(weights), toy::all_parameters(trainer.engine)};
}
template <class Body>
auto run(toy::World const& world, Body const& body) {
  return toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [&](Engine& engine, auto& patches) {
    Trainer trainer{engine};
    return body(trainer, patches);
  });
}
std::string manifest_in(std::filesystem::path const& checkpoint) {
  std::ifstream file(checkpoint / "checkpoint.json");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TEST_CASE("a run of several optimizers and averages goes on with the same bits on other ranks and strategies") {
  auto const whole = run(toy::worlds()[0], [](Trainer& trainer, auto& patches) {
    trainer.train(patches, 0, 6);
    return results(trainer);
  });
  auto const worlds = toy::worlds();
  for (std::size_t from = 0; from < worlds.size(); from += 3) {
    Folder const folder;
    run(worlds[from], [&](Trainer& trainer, auto& patches) {
      trainer.train(patches, 0, 3);
      fsdp::save(trainer.engine, trainer.state, folder.path);
      return 0;
    });
    CHECK(has(manifest_in(folder.path / "step-3"), "\"version\": 2"));
    for (auto const& to : worlds) {
      auto const now = run(to, [&](Trainer& trainer, auto& patches) {
        trainer.train(patches, 7, 9);  // a state of its own, which is replaced
        fsdp::load_latest(trainer.engine, trainer.state, folder.path);
        RANK_CHECK(trainer.muon.steps() == 3 && trainer.adamw.steps() == 3 && trainer.ema.steps() == 3);
        trainer.train(patches, 3, 6);
        return results(trainer);
      });
      INFO(worlds[from].strategy.name << " on " << worlds[from].ranks << " to " << to.strategy.name << " on "
                                      << to.ranks);
      CHECK((now == whole));
    }
  }
  CHECK_RANKS();
}

TEST_CASE("several optimizers are saved in the background as they were at the call") {
  Folder const folder;
  auto const whole = run(toy::worlds()[0], [](Trainer& trainer, auto& patches) {
    trainer.train(patches, 0, 4);
    return results(trainer);
  });
  run({fsdp::FullShard{}, 3, 0}, [&](Trainer& trainer, auto& patches) {
    fsdp::BackgroundSaver saver(trainer.engine);
    trainer.train(patches, 0, 2);
    saver.save(trainer.state, folder.path);
    trainer.train(patches, 2, 5);
    saver.wait();
    return 0;
  });
  auto const now = run({fsdp::NoShard{}, 2, 0}, [&](Trainer& trainer, auto& patches) {
    fsdp::load_latest(trainer.engine, trainer.state, folder.path);
    trainer.train(patches, 2, 4);
    return results(trainer);
  });
  CHECK((now == whole));
}

TEST_CASE("a checkpoint of one optimizer that owns everything has format 1, with its arrays' own names") {
  Folder const folder;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](Engine& engine, auto& patches) {
    fsdp::AdamW adamw{engine, {}, {{.tensors = "*.bias", .lr_scale = 2.0f}}};
    patches.step({.step = 0});
    adamw.step();
    fsdp::save(engine, adamw, folder.path);
    return 0;
  });
  auto const manifest = manifest_in(folder.path / "step-1");
  CHECK(has(manifest, "\"version\": 1"));
  CHECK(has(manifest, "\"name\": \"exp_avg\""));
  CHECK_FALSE(has(manifest, "\"optimizers\""));
}

TEST_CASE("parts of a checkpoint can be loaded; what it lacks is told, and nothing changes") {
  Folder const folder, plain;
  run({fsdp::FullShard{}, 2, 0}, [&](Trainer& trainer, auto& patches) {
    trainer.train(patches, 0, 2);
    fsdp::save(trainer.engine, trainer.state, folder.path);
    fsdp::save(trainer.engine, trainer.both, plain.path);
    return 0;
  });
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](Engine& engine, auto&) {
    auto const before = toy::all_parameters(engine);
    auto const refusal = [&](auto& state, Folder const& from) {
      auto text = what([&] { fsdp::load(engine, state, from.path / "step-2"); });
      RANK_CHECK((toy::all_parameters(engine) == before));
      return text;
    };
    fsdp::Ema ema{engine};
    RANK_CHECK(has(refusal(ema, plain),
                   "has the state of optimizer 'Muon' (Muon.momentum_buffer), 'AdamW' (AdamW.exp_avg, "
                   "AdamW.exp_avg_sq); this optimizer is 'Ema' (average)"));
    fsdp::AdamW all{engine};
    RANK_CHECK(
        has(refusal(all, plain), "has no state of optimizer 'AdamW' for tensor 'patches.0.weight', which another"));
    fsdp::Sgd sgd{engine, {.momentum = 0.5f}};
    RANK_CHECK(has(refusal(sgd, folder), "this optimizer is 'Sgd' (momentum_buffer)"));
    fsdp::AdamW first{engine, fsdp::matching("*.0.bias")}, second{engine, fsdp::matching("*.1.bias")};
    fsdp::TrainingState two{first, second};
    RANK_CHECK(has(refusal(two, plain), "this optimizer is 'AdamW' (AdamW2.exp_avg, AdamW2.exp_avg_sq)"));

    fsdp::AdamW biases{engine, fsdp::matching("*.bias")};
    fsdp::Muon muon{engine, biases.rest()};
    fsdp::Optimizers swapped{biases, muon};  // in another order than they were saved in
    fsdp::load(engine, swapped, plain.path / "step-2");
    RANK_CHECK(biases.steps() == 2 && muon.steps() == 2);
    fsdp::load(engine, biases, folder.path / "step-2");  // without Muon and the averages
    fsdp::load(engine, folder.path / "step-2");
    auto const after = toy::all_parameters(engine);
    RANK_CHECK((engine.rank() != 0 || after != before));
    return 0;
  });
  CHECK_RANKS();
}

TEST_CASE("averages of one checkpoint have names of their own") {
  Folder const folder;
  toy::on_patches<fsdp::Fp32>(fsdp::FullShard{}, 2, 0, [&](Engine& engine, auto& patches) {
    fsdp::AdamW adamw{engine, {.lr = 0.1f}};
    fsdp::Ema fast{engine, 0.5f, "fast"}, slow{engine, 0.9f, "slow"}, first{engine}, second{engine};
    fsdp::TrainingState alike{adamw, first, second};
    RANK_CHECK(
        has(what([&] { fsdp::save(engine, alike, folder.path); }), "two parts of the run's state are called 'Ema'"));
    fsdp::TrainingState state{adamw, fast, slow};
    patches.step({.step = 0});
    adamw.step();
    fast.update();
    slow.update();
    fsdp::save(engine, state, folder.path);
    auto const values = [&](auto& ema) {
      auto const on = ema.swap();
      return toy::all_parameters(engine);
    };
    auto const of_slow = values(slow);
    fsdp::Ema again{engine, 0.9f, "slow"};
    fsdp::TrainingState fewer{again, adamw};  // in another order
    fsdp::load_latest(engine, fewer, folder.path);
    RANK_CHECK((values(again) == of_slow));
    RANK_CHECK(has(what([&] { fsdp::load_latest(engine, first, folder.path); }), "this optimizer is 'Ema'"));
    return 0;
  });
  CHECK_RANKS();
}

TEST_CASE("two optimizers of a kind, one of them with moments in bf16, keep their own arrays") {
  Folder const folder;
  auto const train = [](auto& engine, auto& patches, auto& both, int first, int last) {
    for (int step = first; step < last; ++step) {
      patches.step({.step = step, .alike = true});
      both.step({0.01f, 0.02f});
    }
    return toy::all_parameters(engine);
  };
  auto const on = [&](toy::World const& world, auto const& body) {
    return toy::on_patches<fsdp::Fp32>(world.strategy, world.ranks, world.group, [&](Engine& engine, auto& patches) {
      fsdp::AdamW<Engine, fsdp::bf16> narrow{engine, fsdp::matching("*.weight")};
      fsdp::AdamW wide{engine, narrow.rest()};
      fsdp::Optimizers both{narrow, wide};
      return body(engine, patches, both);
    });
  };
  auto const whole =
      on(toy::worlds()[0], [&](auto& engine, auto& patches, auto& both) { return train(engine, patches, both, 0, 5); });
  on({fsdp::FullShard{}, 3, 0}, [&](auto& engine, auto& patches, auto& both) {
    train(engine, patches, both, 0, 3);
    fsdp::save(engine, both, folder.path);
    return 0;
  });
  auto const now = on({fsdp::HybridShard<>{}, 4, 2}, [&](auto& engine, auto& patches, auto& both) {
    fsdp::load_latest(engine, both, folder.path);
    return train(engine, patches, both, 3, 5);
  });
  CHECK((now == whole));
  CHECK(has(manifest_in(folder.path / "step-3"), "\"AdamW2.exp_avg\""));
}
