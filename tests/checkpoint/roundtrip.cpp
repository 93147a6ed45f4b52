// SPDX-License-Identifier: Apache-2.0
// Checkpoints load on other ranks, with any strategy and precision: values have equal bits, and so do the next steps.
// skip-sanitizers
// full-run: [worlds]
// needs: nlohmann_json xxHash
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "tests/catch.hpp"
#include "tests/checkpoint/support.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/ramp.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

namespace fs = std::filesystem;
using namespace fsdp::testing;
using Folder = TemporaryFolder;

/// Trials of a world: every policy that it can have, and a mixture of them.
std::vector<Trial> trials(int ranks) {
  std::vector<Trial> list;
  auto const shape = shape_for_any_world();
  for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                               fsdp::ShardingStrategy(fsdp::NoShard{})})
    list.push_back({ranks, strategy, shape});
  if (ranks % 2 == 0) list.push_back({ranks, fsdp::HybridShard<>{.group = ranks / 2}, shape});
  auto mixed = shape;
  mixed.root = fsdp::NoShard{};
  mixed.strategies = {std::nullopt, fsdp::ShardGradOp{}};
  list.push_back({ranks, fsdp::FullShard{}, mixed});
  return list;
}

/// Saves after three steps. @return the state then, and after five more
template <class P>
std::pair<State, State> save_and_go_on(Trial const& trial, fs::path const& folder) {
  std::pair<State, State> states;
  run<P>(trial, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    train(network, adamw, 0, 3);
    auto const place = fsdp::save(engine, adamw, folder, {{"iteration", 3}, {"of", trial.ranks}});
    if (engine.rank() == 0) CHECK(place == folder / "step-3");
    auto saved = state_of(engine, adamw);
    train(network, adamw, 3, 8);
    auto after = state_of(engine, adamw);
    if (engine.rank() == 0) states = {std::move(saved), std::move(after)};
  });
  return states;
}

/// Begins otherwise, loads. @return the state then, and after `more_steps`
template <class P>
std::pair<State, State> load_and_go_on(Trial const& trial, fs::path const& folder, int saved_by, int more_steps = 5) {
  std::pair<State, State> states;
  run<P>(trial, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    train(network, adamw, 100, 101);
    network.forward(7);  // and what it has gathered is of other parameters
    auto const loaded = fsdp::load_latest(engine, adamw, folder);
    if (engine.rank() == 0) {
      REQUIRE(loaded);
      CHECK(loaded->step == 3);
      CHECK(loaded->world_size == saved_by);
      CHECK(loaded->extra["of"] == saved_by);
    }
    auto at_once = state_of(engine, adamw);
    train(network, adamw, 3, 3 + more_steps);
    auto after = state_of(engine, adamw);
    if (engine.rank() == 0) states = {std::move(at_once), std::move(after)};
  });
  return states;
}

}  // namespace

namespace {

/// All worlds of up to five ranks.
std::vector<Trial> worlds() {
  std::vector<Trial> list;
  for (int ranks = 1; ranks <= 5; ++ranks)
    for (auto const& trial : trials(ranks)) list.push_back(trial);
  return list;
}
/// Each world saves, it loads, and so do others. @param all  all others do; else some, so that every pair of values of
/// two axes occurs: the ranks and the policy that save, and those that load
void check_worlds(bool all) {
  auto const list = worlds();
  for (std::size_t a = 0; a < list.size(); ++a) {
    auto const& saving = list[a];
    Folder const folder;
    auto const [saved, gone_on] = save_and_go_on<fsdp::Fp32>(saving, folder.path);
    for (std::size_t b = 0; b < list.size(); ++b) {
      if (!all && a % 7 != b % 7) continue;
      auto const& loading = list[b];
      INFO(saving.strategy.name << " on " << saving.ranks << " to " << loading.strategy.name << " on "
                                << loading.ranks);
      bool const same = saving.ranks == loading.ranks && saving.strategy.name == loading.strategy.name;
      auto const [loaded, after] = load_and_go_on<fsdp::Fp32>(loading, folder.path, saving.ranks, same ? 5 : 0);
      CHECK(loaded == saved);
      if (same) CHECK(after == gone_on);
    }
  }
}

}  // namespace

TEST_CASE("any world's checkpoint is any other world's, bit by bit") { check_worlds(false); }

TEST_CASE("any world's checkpoint is any other world's, for all pairs of worlds", "[.][worlds]") { check_worlds(true); }

TEST_CASE("a checkpoint of fp32 is one of bf16 with fp32 masters, and the other way round") {
  for (auto const ranks : {1, 2, 3}) {
    for (auto const& trial : trials(ranks)) {
      Folder const wide, narrow;
      auto const [of_wide, wide_on] = save_and_go_on<fsdp::Fp32>(trial, wide.path);
      auto const [of_narrow, narrow_on] = save_and_go_on<fsdp::Bf16>(trial, narrow.path);
      CHECK(load_and_go_on<fsdp::Bf16>(trial, narrow.path, ranks) == std::pair(of_narrow, narrow_on));
      CHECK(load_and_go_on<fsdp::Bf16>(trial, wide.path, ranks).first == of_wide);
      CHECK(load_and_go_on<fsdp::Fp32>(trial, narrow.path, ranks).first == of_narrow);
    }
  }
}

TEST_CASE("masters and moments in bf16 stay as they are, and widen to fp32") {
  using Narrow = fsdp::Precision<fsdp::bf16, float, fsdp::bf16>;
  auto const make = [](auto& engine) {
    using E = std::remove_reference_t<decltype(engine)>;
    return std::make_unique<fsdp::AdamW<E, fsdp::bf16>>(
        engine, fsdp::AdamWOptions{.lr = 1e-2f, .stochastic_rounding = true, .seed = 5});
  };
  Folder const folder;
  Trial const trial{2, fsdp::FullShard{}, shape_for_any_world()};
  State saved, gone_on, loaded, after, widened;
  run<Narrow>(trial, make, [&](auto& engine, auto& network, auto& adamw) {
    train(network, adamw, 0, 3);
    fsdp::save(engine, adamw, folder.path);
    auto state = state_of(engine, adamw);
    train(network, adamw, 3, 6);
    auto later = state_of(engine, adamw);
    if (engine.rank() == 0) saved = std::move(state), gone_on = std::move(later);
  });
  run<Narrow>(trial, make, [&](auto& engine, auto& network, auto& adamw) {
    fsdp::load_latest(engine, adamw, folder.path);
    auto state = state_of(engine, adamw);
    train(network, adamw, 3, 6);
    auto later = state_of(engine, adamw);
    if (engine.rank() == 0) loaded = std::move(state), after = std::move(later);
  });
  CHECK(loaded == saved);
  CHECK(after == gone_on);  // the seed of rounding follows from the step
  run<fsdp::Fp32>({3, fsdp::NoShard{}, trial.shape}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    fsdp::load_latest(engine, adamw, folder.path);
    auto state = state_of(engine, adamw);
    if (engine.rank() == 0) widened = std::move(state);
  });
  CHECK(widened == saved);
}

TEST_CASE("Sgd with momentum and without; the parameters alone; another optimizer is refused") {
  auto const sgd = [](float momentum) {
    return [momentum](auto& engine) {
      using E = std::remove_reference_t<decltype(engine)>;
      return std::make_unique<fsdp::Sgd<E>>(engine, fsdp::SgdOptions{.lr = 0.1f, .momentum = momentum});
    };
  };
  Trial const trial{2, fsdp::FullShard{}, shape_for_any_world()};
  for (auto const momentum : {0.0f, 0.9f}) {
    Folder const folder;
    State saved, loaded;
    run<fsdp::Fp32>(trial, sgd(momentum), [&](auto& engine, auto& network, auto& optimizer) {
      train(network, optimizer, 0, 2);
      fsdp::save(engine, optimizer, folder.path);
      auto state = state_of(engine, optimizer);
      if (engine.rank() == 0) saved = std::move(state);
    });
    run<fsdp::Fp32>(trial, sgd(momentum), [&](auto& engine, auto&, auto& optimizer) {
      fsdp::load_latest(engine, optimizer, folder.path);
      auto state = state_of(engine, optimizer);
      if (engine.rank() == 0) loaded = std::move(state);
    });
    CHECK(loaded == saved);
    run<fsdp::Fp32>(trial, make_adamw, [&](auto& engine, auto&, auto& adamw) {
      auto const before = state_of(engine, adamw);
      auto const text = what([&] { fsdp::load_latest(engine, adamw, folder.path); });
      auto const after = state_of(engine, adamw);
      fsdp::load(engine, folder.path / "step-2");  // the parameters alone
      auto const state = state_of(engine, adamw);
      if (engine.rank() != 0) return;
      CHECK(has(text, "has the state of optimizer 'Sgd'"));
      CHECK(has(text, "this optimizer is 'AdamW' (exp_avg, exp_avg_sq)"));
      CHECK(after == before);
      CHECK(state.arrays.at("parameters of ends.table") == saved.arrays.at("parameters of ends.table"));
    });
  }
}

TEST_CASE("in the background: the copy is that of the call, whatever is trained meanwhile") {
  for (auto const ranks : {1, 3}) {
    Folder const folder;
    std::vector<State> saved, loaded;
    Trial const trial{ranks, fsdp::FullShard{}, shape_for_any_world()};
    run<fsdp::Fp32>(trial, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
      fsdp::BackgroundSaver saver(engine);
      bool const nothing = saver.wait().empty();
      for (int i = 0; i < 4; ++i) {
        train(network, adamw, i, i + 1);
        saver.save(adamw, folder.path, {{"i", i}}, {.keep_last = 0});
        auto state = state_of(engine, adamw);
        if (engine.rank() == 0) saved.push_back(std::move(state));
      }
      auto const last = saver.wait();
      auto const again = saver.wait();
      if (engine.rank() != 0) return;
      CHECK(nothing);
      CHECK(last == folder.path / "step-4");
      CHECK(again.empty());
      CHECK(engine.account().reserved(fsdp::MemoryTag::snapshot) > 0);
    });
    run<fsdp::Fp32>(trial, make_adamw, [&](auto& engine, auto&, auto& adamw) {
      for (int i = 0; i < 4; ++i) {
        auto const name = "step-" + std::to_string(i + 1);
        auto const extra = fsdp::load(engine, adamw, folder.path / name).extra;
        auto state = state_of(engine, adamw);
        if (engine.rank() != 0) continue;
        CHECK(extra["i"] == i);
        loaded.push_back(std::move(state));
      }
    });
    CHECK(loaded == saved);
  }
}

TEST_CASE("pointers, names and what is kept") {
  Folder const folder;
  auto const names = [&] {
    std::vector<std::string> list;
    for (auto const& entry : fs::directory_iterator(folder.path))
      if (entry.path().filename() != ".lock") list.push_back(entry.path().filename().string());
    std::sort(list.begin(), list.end());
    return list;
  };
  using Names = std::vector<std::string>;
  run<fsdp::Fp32>({1, fsdp::NoShard{}, {}}, make_adamw, [&](auto& engine, auto&, auto& adamw) {
    CHECK_FALSE(fsdp::load_latest(engine, adamw, folder.path));
    CHECK_FALSE(fsdp::load_latest(engine, adamw, folder.path / "not" / "there"));
    fsdp::save(engine, adamw, folder.path, {}, {.step = 9, .pointers = {"latest", "best"}});
    CHECK(names() == Names{"best", "latest", "step-9"});
    fsdp::save(engine, adamw, folder.path, {}, {.step = 10});
    fsdp::save(engine, adamw, folder.path, {}, {.step = 11});
    fsdp::save(engine, adamw, folder.path, {}, {.step = 100});
    CHECK(names() == Names{"best", "latest", "step-100", "step-11", "step-9"});
    CHECK(fsdp::load_latest(engine, adamw, folder.path, "best")->step == 9);
    CHECK(fsdp::save(engine, adamw, folder.path, {}, {.step = 100}) == folder.path / "step-100.2");
    CHECK(names() == Names{"best", "latest", "step-100", "step-100.2", "step-9"});
    CHECK(fsdp::load_latest(engine, adamw, folder.path)->folder == folder.path / "step-100.2");
    fs::create_directories(folder.path / ".step-7.partial" / "deep");
    fsdp::save(engine, adamw, folder.path, {}, {.step = 101, .pointers = {"best.1"}, .keep_last = 1});
    CHECK(names() == Names{"best", "best.1", "latest", "step-100.2", "step-101", "step-9"});
    // A run that goes on from an earlier checkpoint saves lower steps, and those are the newest.
    fsdp::save(engine, adamw, folder.path, {}, {.step = 5, .pointers = {}, .keep_last = 1});
    CHECK(names() == Names{"best", "best.1", "latest", "step-100.2", "step-101", "step-5", "step-9"});
    fsdp::save(engine, adamw, folder.path, {}, {.step = 6, .keep_last = 1});
    CHECK(names() == Names{"best", "best.1", "latest", "step-101", "step-6", "step-9"});
    // So they are in a copy of the folder, whose files are written in any order.
    fsdp::save(engine, adamw, folder.path, {}, {.step = 7, .pointers = {}});
    auto const now = fs::last_write_time(folder.path / "step-9" / "checkpoint.json");
    for (auto const& [name, hours] : {std::pair("step-101", 4), {"step-6", 3}, {"step-9", 2}, {"step-7", 1}})
      fs::last_write_time(folder.path / name / "checkpoint.json", now + std::chrono::hours(hours));
    std::vector<std::string> order;
    for (auto const& each : fsdp::checkpoint::CheckpointList(folder.path).checkpoints) order.push_back(each.text());
    CHECK(order == Names{"step-9", "step-101", "step-6", "step-7"});
  });
}

TEST_CASE("a file that somebody writes meanwhile is no pointer, and no error") {
  Folder const folder;
  folder.file("a", "step-3\n");
  folder.file("b.tmp", "step-4\n");
  auto const named = [&] { return fsdp::checkpoint::CheckpointList(folder.path).named; };
  CHECK(named() == std::vector<std::string>{"step-3"});
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (int i = 0; i < 2000; ++i) {  // empty, then too long for a pointer, then gone
      { std::ofstream(folder.path / "c") << std::string(1000, 'x') << std::flush; }
      fs::remove(folder.path / "c");
    }
    done = true;
  });
  std::string problem;
  while (!done) {
    try {
      static_cast<void>(named());
    } catch (std::exception const& error) {
      problem = error.what();
    }
  }
  writer.join();
  CHECK(problem == "");
}

TEST_CASE("slices of several blocks are read from within a block, by any number of ranks", "[checkpoint]") {
  fsdp::testing::TemporaryFolder const folder;
  constexpr std::int64_t elements = 700'000;  // three blocks of fp32
  auto const run = [&](int ranks, bool saves) {
    std::vector<float> weights;
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
      fsdp::Mesh mesh(std::move(comm));
      fsdp::Engine engine(mesh, fsdp::FullShard{});
      auto layer = engine.shard(fsdp::testing::Ramp<>{elements}, "layer");
      fsdp::Sgd sgd(engine, {.momentum = 0.9f});
      if (saves) {
        layer.forward();
        layer.backward(1.0f);
        sgd.step(0.01f);
        fsdp::save(engine, sgd, folder.path);
      } else {
        fsdp::load(engine, sgd, folder.path / "step-1");
      }
      auto const all = fsdp::testing::all_weights(engine);
      if (engine.rank() == 0) weights = all;
    });
    return weights;
  };
  auto const saved = run(1, true);
  REQUIRE(saved.size() == static_cast<std::size_t>(elements));
  CHECK(saved.back() != saved.front());
  for (int const ranks : {2, 3}) {
    CAPTURE(ranks);
    CHECK((run(ranks, false) == saved));  // not printed
  }
}
