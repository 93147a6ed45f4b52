// SPDX-License-Identifier: Apache-2.0
// How often a training step calls CUDA and NCCL: as often in every step, not more for units of more tensors; and steps
// after the first allocate nothing and wait for nothing but the passes that the host may be ahead.
// skip-sanitizers
// environment: FSDP_STANDIN_DEVICES=4
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/cuda.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/nccl.hpp"
#include "tests/catch.hpp"
#include "tests/standin/made_calls.hpp"
#include "tests/support/shard_group.hpp"

namespace {

using standin::Counts;
using standin::test::difference;
using standin::test::text_of;

constexpr int ranks = 4, steps = 5;
constexpr std::size_t full_ahead = 2;   // the step from which the host is passes_ahead passes ahead
constexpr std::int64_t elements = 840;  // of a unit, divided by any of the numbers of tensors

/// A module that computes nothing: what is called is the library's.
struct Idle {
  int tensors;
  template <class T>
  struct Params {
    std::array<fsdp::Tensor<T, 1>, 7> tensor;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& visit) const {
    for (int i = 0; i < tensors; ++i)
      visit(std::to_string(i), p.tensor[static_cast<std::size_t>(i)], {elements / tensors},
            fsdp::TensorOptions{.decay = i % 2 == 0});
  }
  template <class Stream, class W>
  void forward(Stream&, W const&) const {}
  template <class Stream, class W, class G>
  void backward(Stream&, W const&, G const&) const {}
};

struct Case {
  char const* name;
  fsdp::ShardingStrategy strategy;
  fsdp::EngineOptions options{};
};
std::vector<Case> const& cases() {
  static std::vector<Case> const all{
      {"FullShard", fsdp::FullShard{}},
      {"FullShard, kept by 2", fsdp::FullShard{}, {.reshard_ranks = 2}},
      {"ShardGradOp", fsdp::ShardGradOp{}},
      {"NoShard", fsdp::NoShard{}},
      {"HybridShard", fsdp::testing::in_groups_of(2, fsdp::HybridShard<fsdp::FullShard>{})},
      {"HybridShard, kept", fsdp::testing::in_groups_of(2, fsdp::HybridShard<fsdp::ShardGradOp>{})},
  };
  return all;
}

constexpr std::array<char const*, 4> parts{"forward", "backward", "norm", "optimizer"};
/// Calls of a rank's thread in each part of a step.
using Step = std::array<Counts, parts.size()>;
using Steps = std::vector<Step>;

template <class C>
Steps steps_of_rank(C world, Case const& tried, int units, int tensors) {
  fsdp::Mesh<C> mesh(std::move(world));
  fsdp::Engine<C> engine(mesh, tried.strategy, tried.options);
  auto modules = engine.shard(std::vector<Idle>(static_cast<std::size_t>(units), Idle{tensors}), "units");
  fsdp::AdamW adamw(engine);
  Steps all(steps);
  for (auto& step : all) {
    std::size_t part = 0;
    auto before = standin::calls_of_thread();
    auto const end_part = [&] {
      auto const now = standin::calls_of_thread();
      step[part] = difference(now, std::exchange(before, now));
      // How often the watch over NCCL finds no event left, and looks which are done, depends on time.
      for (char const* look : {"cudaEventQuery", "cudaGetLastError", "cudaThreadExchangeStreamCaptureMode"})
        step[part].erase(look);
      ++part;
    };
    for (auto& module : modules) module.forward();
    end_part();
    for (auto i = modules.size(); i-- > 0;) modules[i].backward();
    end_part();
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    end_part();
    adamw.step(norm);
    end_part();
  }
  engine.synchronize();
  return all;
}

using Local = fsdp::local::Communicator<fsdp::cuda::Device>;
using Control = fsdp::local::Communicator<fsdp::host::Device>;

/// Rank by rank, of threads that share a device, or have one each.
std::vector<Steps> train(bool over_nccl, Case const& tried, int units, int tensors) {
  std::vector<Steps> result(ranks);
  auto const put = [&](int rank, Steps all) { result[static_cast<std::size_t>(rank)] = std::move(all); };
  if (over_nccl) {
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Control control) {
      int const rank = control.rank();
      put(rank,
          steps_of_rank(fsdp::nccl::Communicator::from(control, fsdp::cuda::Device(rank)), tried, units, tensors));
    });
  } else {
    fsdp::local::run(ranks, fsdp::cuda::Device{}, [&](Local world) {
      int const rank = world.rank();
      put(rank, steps_of_rank(std::move(world), tried, units, tensors));
    });
  }
  return result;
}

std::int64_t count(Counts const& counts, std::string_view name) {
  auto const found = counts.find(name);
  return found == counts.end() ? 0 : found->second;
}

/// From runs over 6 and over 3 units: calls of rank 0 in the last step.
void print_calls_of_a_unit(bool over_nccl, Case const& tried, std::vector<Steps> const& six,
                           std::vector<Steps> const& three) {
  std::printf("calls of a unit over %s, %s:", over_nccl ? "nccl" : "local", tried.name);
  for (std::size_t part = 0; part < parts.size(); ++part) {
    auto const more = standin::test::calls_in(six[0].back()[part]) - standin::test::calls_in(three[0].back()[part]);
    std::printf(" %s %.3g", parts[part], static_cast<double>(more) / 3);
  }
  std::printf("\n");
}

}  // namespace

TEST_CASE(
    "every step calls CUDA as often, whatever the tensors of a unit; after the first it allocates and waits for "
    "nothing",
    "[standin]") {
  auto const over_nccl = GENERATE(false, true);
  for (auto const& tried : cases()) {
    CAPTURE(over_nccl, tried.name);
    auto const all = train(over_nccl, tried, 6, 1);
    for (auto const& rank : all) {
      for (std::size_t step = 1; step < steps; ++step) {
        CAPTURE(step);
        for (std::size_t part = 0; part < parts.size(); ++part) {
          CAPTURE(parts[part]);
          CHECK(standin::test::costly(rank[step][part]) == "");
          if (step < full_ahead) continue;
          CHECK(text_of(rank[step][part]) == text_of(rank[full_ahead][part]));
          // A pass waits for the one that passes_ahead passes ago has begun: [Note: How far the host runs ahead].
          CHECK(count(rank[step][part], standin::host_waits) == (part < 2 ? 1 : 0));
          CHECK(count(rank[step][part], "cudaEventSynchronize") == (part < 2 ? 1 : 0));
        }
      }
    }
    for (int const tensors : {2, 7}) {
      CAPTURE(tensors);
      auto const other = train(over_nccl, tried, 6, tensors);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        for (std::size_t part = 0; part < parts.size(); ++part)
          CHECK(text_of(other[rank].back()[part]) == text_of(all[rank].back()[part]));
      }
    }
    print_calls_of_a_unit(over_nccl, tried, all, train(over_nccl, tried, 3, 1));
  }
}
