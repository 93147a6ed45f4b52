// SPDX-License-Identifier: Apache-2.0
// Checkpoints without the parameters of frozen tensors: what they hold, and that a run goes on from one with the same
// bits once its frozen parameters are there.
// needs: nlohmann_json xxHash
// skip-tsan
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using fsdp::testing::has;
using fsdp::testing::what;
using Device = fsdp::host::Device;
using Comm = fsdp::local::Communicator<Device>;
using Engine = fsdp::Engine<Comm, fsdp::Fp32>;

/// A base and a head, of which the steps [first, last) are trained.
/// @param before, after  called with engine and optimizer
/// @return all parameters
template <class Before, class After>
std::vector<float> train(int ranks, fsdp::ShardingStrategy strategy, bool freezes, int first, int last,
                         Before const& before, After const& after) {
  std::vector<float> parameters;
  fsdp::local::run(ranks, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    Engine engine(mesh, strategy, {});
    auto base = engine.shard(toy::Patch<Device>{engine.device(), 40, 31, 0}, "base",
                             engine.add_unit("base", {.frozen = freezes}));
    auto head = engine.shard(toy::Patch<Device>{engine.device(), 9, 7, 1}, "head");
    fsdp::AdamW<Engine> adamw(engine, {.lr = 0.05f});
    before(engine, adamw);
    for (int step = first; step < last; ++step) {
      toy::Push const push{.step = step, .alike = true};
      base.forward();
      head.forward();
      head.backward(push);
      if (!freezes) base.backward(push);
      adamw.step();
    }
    after(engine, adamw);
    auto const all = toy::all_parameters(engine);
    if (engine.rank() == 0) parameters = all;
    engine.drain();
  });
  return parameters;
}
auto const nothing = [](auto&, auto&) {};

std::uintmax_t bytes_in(std::filesystem::path const& folder) {
  std::uintmax_t bytes = 0;
  for (auto const& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") bytes += entry.file_size();
  return bytes;
}

/// Sets the base's parameters as a program does that loads them from the model's files.
void load_base(Engine& engine, float value) {
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    if (!std::string_view(tensor.name).starts_with("base")) return false;
    for (auto& each : out) each = value + static_cast<float>(first++ % 17);
    return true;
  });
}

}  // namespace

TEST_CASE("a checkpoint without frozen parameters holds the others, and the run goes on from it with the same bits") {
  auto const base = [](auto& engine, auto&) { load_base(engine, 0.25f); };
  auto const expected = train(1, fsdp::NoShard{}, true, 0, 6, base, nothing);
  for (int const ranks : {1, 2, 3}) {
    fsdp::testing::TemporaryFolder const folder;
    train(ranks, fsdp::FullShard{}, true, 0, 3, base, [&](auto& engine, auto& adamw) {
      fsdp::save(engine, adamw, folder.path / "whole", {});
      fsdp::save(engine, adamw, folder.path / "part", {}, {.without_frozen = true});
    });
    auto const whole = bytes_in(folder.path / "whole" / "step-3"), part = bytes_in(folder.path / "part" / "step-3");
    CHECK(whole - part >= (40 * 31 + 31) * sizeof(float));
    CHECK(part < 3 * (9 * 7 + 7) * sizeof(float) + 4096 * static_cast<std::uintmax_t>(ranks));
    for (int const others : {1, 2, 4}) {
      INFO(ranks << " ranks, then " << others);
      auto const resumed = train(
          others, others == 2 ? fsdp::ShardingStrategy(fsdp::NoShard{}) : fsdp::FullShard{}, true, 3, 6,
          [&](auto& engine, auto& adamw) {
            load_base(engine, 0.25f);
            fsdp::load(engine, adamw, folder.path / "part" / "step-3");
          },
          nothing);
      CHECK(resumed == expected);
    }
  }
}

TEST_CASE("an engine in which a tensor trains whose parameters a checkpoint lacks refuses it, unchanged") {
  fsdp::testing::TemporaryFolder const folder;
  train(2, fsdp::FullShard{}, true, 0, 1, nothing,
        [&](auto& engine, auto& adamw) { fsdp::save(engine, adamw, folder.path, {}, {.without_frozen = true}); });
  auto const before = train(2, fsdp::FullShard{}, false, 0, 0, nothing, nothing);
  auto const after = train(
      2, fsdp::FullShard{}, false, 0, 0,
      [&](auto& engine, auto&) {
        auto const message = what([&] { fsdp::load(engine, folder.path / "step-1"); });
        RANK_CHECK(has(message, "was saved without the parameters of tensor 'base."));
        RANK_CHECK(has(message, "which was frozen; freeze it"));
      },
      nothing);
  CHECK(after == before);
}

TEST_CASE("without frozen tensors the option changes nothing") {
  fsdp::testing::TemporaryFolder const folder;
  train(2, fsdp::FullShard{}, false, 0, 2, nothing, [&](auto& engine, auto& adamw) {
    fsdp::save(engine, adamw, folder.path / "a", {});
    fsdp::save(engine, adamw, folder.path / "b", {}, {.without_frozen = true});
  });
  CHECK(fsdp::checkpoint::read_text_file(folder.path / "a" / "step-2" / "checkpoint.json") ==
        fsdp::checkpoint::read_text_file(folder.path / "b" / "step-2" / "checkpoint.json"));
}
