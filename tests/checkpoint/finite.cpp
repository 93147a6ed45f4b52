// SPDX-License-Identifier: Apache-2.0
// A state with an infinity or NaN: where it is found, on which rank ever, and that no snapshot keeps it.
// skip-tsan
// needs: nlohmann_json xxHash
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>

#include "fsdp/finite_state.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/snapshots.hpp"
#include "tests/catch.hpp"
#include "tests/checkpoint/support.hpp"
#include "tests/support/gradient_units.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/rank_checks.hpp"
#include "tests/support/temporary_folder.hpp"

namespace {

using namespace fsdp::testing;
using fsdp::checkpoint::are_finite;
using fsdp::checkpoint::find_not_finite;
constexpr float infinity = std::numeric_limits<float>::infinity(),
                not_a_number = std::numeric_limits<float>::quiet_NaN();

/// Puts a value at an element of a tensor, on the ranks that keep it.
template <class E>
void put(E& engine, std::string const& name, std::int64_t element, float value) {
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> out) {
    for (auto& each : out) each = 0.5f;
    if (tensor.name == name && element >= first && element - first < std::ssize(out))
      out[static_cast<std::size_t>(element - first)] = value;
  });
}

}  // namespace

TEST_CASE("values are finite unless all bits of their exponents are set") {
  auto const holds = []<class T>(T value) {
    std::array<T, 3> const values{T(1.0f), value, T(-2.0f)};
    return are_finite(std::as_bytes(std::span(values)), fsdp::dtype_of<T>);
  };
  for (float const sign : {1.0f, -1.0f}) {
    CHECK(holds(sign * std::numeric_limits<float>::max()));
    CHECK(holds(sign * std::numeric_limits<float>::denorm_min()));
    CHECK(holds(fsdp::bf16(sign * 3e38f)));
    CHECK(holds(fsdp::fp16(sign * 65504.0f)));
    CHECK(holds(static_cast<double>(sign) * std::numeric_limits<double>::max()));
    for (float const bad : {infinity, not_a_number}) {
      CHECK_FALSE(holds(sign * bad));
      CHECK_FALSE(holds(fsdp::bf16(sign * bad)));
      CHECK_FALSE(holds(fsdp::fp16(sign * bad)));
      CHECK_FALSE(holds(static_cast<double>(sign * bad)));
    }
  }
  CHECK(are_finite({}, fsdp::DType::f32));
}

TEST_CASE("each element of the state that save() would write is looked at, and every rank is told the same") {
  for (int const ranks : {1, 3}) {
    for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::NoShard{})}) {
      run<fsdp::Fp32>({ranks, strategy, shape_for_any_world()}, make_adamw,
                      [&](auto& engine, auto& network, auto& adamw) {
                        train(network, adamw, 0, 1);
                        RANK_CHECK(find_not_finite(engine, adamw).empty());
                        for (auto const& tensor : fsdp::tensor_list(engine))
                          for (std::int64_t const element : {std::int64_t{0}, tensor.numel / 2, tensor.numel - 1}) {
                            put(engine, tensor.name, element, element == 0 ? infinity : not_a_number);
                            RANK_CHECK(find_not_finite(engine, adamw) == "parameters of '" + tensor.name + "'");
                          }
                        put(engine, "", 0, 0);
                        RANK_CHECK(find_not_finite(engine, adamw).empty());
                        // The last element of a rank's part of the optimizer's state.
                        auto const& unit = engine.shards()[0];
                        auto const begin = unit.shard().begin + unit.slice().begin;
                        auto const kept = unit.layout().segments({begin, begin + unit.slice().size()});
                        if (!kept.empty())  // a rank may have padding alone
                          adamw.state(1, 0)[unit.slice().begin + kept.back().offset + kept.back().count - 1] = infinity;
                        RANK_CHECK(find_not_finite(engine, adamw).starts_with("exp_avg_sq of '"));
                      });
    }
  }
  CHECK_RANKS();
}

TEST_CASE("a frozen tensor may have infinities") {
  using Device = fsdp::host::Device;
  fsdp::local::run(2, Device{}, [&](Comm comm) {
    fsdp::Mesh<Comm> mesh(std::move(comm));
    fsdp::Engine<Comm> engine(mesh, fsdp::FullShard{});
    auto base =
        engine.shard(toy::Patch<Device>{engine.device(), 40, 31, 0}, "base", engine.add_unit("base", {.frozen = true}));
    auto head = engine.shard(toy::Patch<Device>{engine.device(), 9, 7, 1}, "head");
    fsdp::AdamW adamw(engine);
    engine.seal();
    auto const mask = fsdp::tensor_list(engine).front().name;
    put(engine, mask, 3, -infinity);
    RANK_CHECK(find_not_finite(engine, adamw).empty());
    engine.drain();
  });
  CHECK_RANKS();
}

TEST_CASE("no snapshot keeps a state that is not finite; the one before it stays") {
  TemporaryFolder const folder;
  run<fsdp::Fp32>({2, fsdp::FullShard{}, tiny()}, make_adamw, [&](auto& engine, auto& network, auto& adamw) {
    train(network, adamw, 0, 1);
    fsdp::Snapshots snapshots(engine, fsdp::SnapshotPlace{folder.path / "memory", "out", "b"});
    RANK_CHECK(snapshots.take(adamw, 1).begun);
    RANK_CHECK(snapshots.wait().empty());
    auto const tensor = fsdp::tensor_list(engine).back();
    put(engine, tensor.name, tensor.numel - 1, not_a_number);
    RANK_CHECK(snapshots.take(adamw, 2).begun);
    auto const why = snapshots.wait();
    RANK_CHECK(has(why, "the snapshot of step 2 was not kept: rank "));
    RANK_CHECK(has(why, "parameters of '" + tensor.name + "' is not finite"));
    RANK_CHECK(snapshots.newest_whole() == 1);
  });
  CHECK_RANKS();
}
