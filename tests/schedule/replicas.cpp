// SPDX-License-Identifier: Apache-2.0
// Replicas that were given different values, or have stepped differently, are an error, also when no collective
// follows.
// skip-asan
#include "tests/schedule/replicas.hpp"

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;

/// The message of what a run on `ranks` threads throws; "" if nothing.
std::string message_of(int ranks, std::function<void(Comm)> const& body) {
  try {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) { body(std::move(comm)); });
  } catch (fsdp::Error const& error) {
    return error.what();
  }
  return {};
}

bool contains(std::string const& text, std::string_view part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("replicas that drift apart are an error, and those that do not are none") {
  for (int const ranks : {2, 3}) {
    CHECK(message_of(ranks, [](Comm comm) { replicas::train(fsdp::NoShard{}, std::move(comm), {}); }) == "");
    for (auto const how : replicas::drifts) {
      auto const message =
          message_of(ranks, [&](Comm comm) { replicas::train(fsdp::NoShard{}, std::move(comm), how); });
      INFO(ranks << " ranks, the last " << replicas::name(how) << ": " << message);
      CHECK(contains(message, replicas::expected(how)));
    }
  }
}

TEST_CASE("shards of one group may differ, replicas of a shard may not") {
  // Ranks 0 and 2, and 1 and 3, are replicas of each other.
  auto const imported = [](std::vector<float> const& values, fsdp::ShardingStrategy const& strategy) {
    return message_of(4, [&](Comm comm) {
      auto const value = values[static_cast<std::size_t>(comm.rank())];
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, strategy);
      engine.shard(Ramp<>{1000}, "sharded");
      engine.shard(Ramp<>{}, "head", fsdp::NoShard{});
      fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t, std::span<float> out) {
        for (auto& each : out) each = tensor.name == "head.w" ? 1.0f : value;
      });
    });
  };
  auto const hybrid = fsdp::HybridShard<>{.group = 2};
  CHECK(imported({1, 2, 1, 2}, hybrid) == "");
  CHECK(imported({1, 2, 3, 4}, fsdp::FullShard{}) == "");
  auto const message = imported({1, 2, 1, 3}, hybrid);
  INFO(message);
  CHECK(contains(message,
                 "replicas of unit 'sharded' differ in imported values: rank 3 was given other values than rank 1"));
}

TEST_CASE("replicas that are given other initial values are refused, and may be sealed again") {
  auto const sealed = [](std::vector<float> const& values, fsdp::ShardingStrategy const& strategy) {
    return message_of(4, [&](Comm comm) {
      auto value = values[static_cast<std::size_t>(comm.rank())];
      fsdp::Mesh mesh(std::move(comm));
      Engine engine(mesh, strategy);
      engine.shard(Ramp<>{}, "first");
      engine.shard(Ramp<>{1000}, "given");
      auto const shards = engine.shards();
      shards.set_initial_values(shards[std::size_t{1}],
                                [&](fsdp::TensorInfo const&, std::int64_t, std::span<float> out) {
                                  for (auto& each : out) each = value;
                                });
      try {
        engine.seal();
      } catch (fsdp::ConfigError const&) {
        value = 1.0f;
        engine.seal();
        auto const weights = fsdp::testing::all_weights(engine);
        if (engine.rank() == 0) CHECK(weights.back() == 1.0f);
        throw;
      }
    });
  };
  fsdp::HybridShard<> const hybrid{.group = 2};
  CHECK(sealed({1, 2, 1, 2}, hybrid) == "");
  CHECK(contains(sealed({1, 2, 1, 3}, hybrid),
                 "replicas of unit 'given' differ in initial values: rank 3 was given other values than rank 1"));
  CHECK(contains(sealed({1, 1, 2, 1}, fsdp::NoShard{}), "rank 2 was given other values than rank 0"));
  CHECK(sealed({1, 2, 3, 4}, fsdp::FullShard{}) == "");
}

TEST_CASE("a rank that keeps no part of what callers give is no replica that differs") {
  CHECK(message_of(4, [](Comm comm) {  // five elements lie on the first rank alone
          fsdp::Mesh mesh(std::move(comm));
          Engine engine(mesh, fsdp::FullShard{});
          engine.shard(Ramp<>{}, "given");
          engine.shard(Ramp<>{}, "replicated", fsdp::NoShard{});
          auto const shards = engine.shards();
          shards.set_initial_values(shards[std::size_t{0}],
                                    [](fsdp::TensorInfo const&, std::int64_t, std::span<float> out) {
                                      for (auto& each : out) each = 2.0f;
                                    });
          engine.seal();
          fsdp::import_shard(engine, [](fsdp::TensorInfo const& tensor, std::int64_t, std::span<float> out) {
            for (auto& each : out) each = 3.0f;
            return tensor.name == "given.w";
          });
        }) == "");
}

TEST_CASE("after replicas were given different values, all is refused until they are given the same") {
  std::vector<std::string> refused(2);
  auto const message = message_of(2, [&](Comm comm) {
    auto const rank = static_cast<std::size_t>(comm.rank());
    fsdp::Mesh mesh(std::move(comm));
    Engine engine(mesh, fsdp::NoShard{});
    auto layer = engine.shard(Ramp<>{}, "layer");
    try {
      replicas::import_all(engine, static_cast<float>(rank));
    } catch (fsdp::ConfigError const&) {
      try {
        layer.forward();
      } catch (fsdp::UsageError const& error) {
        refused[rank] = error.what();
      }
    }
    replicas::import_all(engine, 1.0f);
    layer.forward();
    layer.backward(1.0f);
  });
  CHECK(message == "");
  for (auto const& text : refused) CHECK(contains(text, "forward of 'layer' begins, but an import is incomplete"));
}

TEST_CASE("engines that end under an exception, or are never sealed, are not compared") {
  auto const message = message_of(2, [](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    try {
      Engine engine(mesh, fsdp::NoShard{});
      auto layer = engine.shard(Ramp<>{}, "layer");
      layer.forward();
      layer.backward(1.0f);
      if (mesh.rank() == 0) engine.discard_gradients();
      throw std::domain_error("both ranks give this engine up");
    } catch (std::domain_error const&) {
    }
    if (mesh.rank() == 0) Engine const never_sealed(mesh, fsdp::NoShard{});
    Engine next(mesh, fsdp::NoShard{});
    next.shard(Ramp<>{}, "layer");
    next.seal();
  });
  CHECK(message == "");
}

TEST_CASE("two engines that ranks seal in opposite order are an error that names both") {
  for (bool const alike : {true, false}) {
    auto const message = message_of(2, [&](Comm comm) {
      fsdp::Mesh mesh(std::move(comm));
      Engine student(mesh, fsdp::FullShard{}), teacher(mesh, fsdp::FullShard{});
      student.shard(Ramp<>{}, "student");
      teacher.shard(Ramp<>{}, alike ? "student" : "teacher");
      (mesh.rank() == 0 ? student : teacher).seal();
      (mesh.rank() == 0 ? teacher : student).seal();
    });
    INFO(message);
    CHECK(contains(message, "rank 0 has \"engine 1 of this mesh, whose first unit is 'student'\""));
    CHECK(contains(message, alike ? "rank 1 has \"engine 2 of this mesh, whose first unit is 'student'\""
                                  : "rank 1 has \"engine 2 of this mesh, whose first unit is 'teacher'\""));
  }
}
