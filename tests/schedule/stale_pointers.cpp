// SPDX-License-Identifier: Apache-2.0
// EngineOptions::trap_stale_pointers: a pointer that is used outside its scope ends the process, and nothing else
// changes.
// skip-tsan
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"
#include "tests/support/local_run.hpp"

namespace {

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
constexpr std::size_t units = 4;

/// The pointers of a trainer, and copies of them from the scope of the first unit.
struct Pointers {
  float *weights[units] = {}, *gradients[units] = {};
  float *kept_weight = nullptr, *kept_gradient = nullptr;
};
using Kernel = std::function<void(std::size_t unit, Pointers const&)>;

/// A forward and a backward pass. Kernels run on the calling thread, or on a worker's stream.
/// @param stack  the pointers are to a stack, of which unit u has slice u
void train(int ranks, bool trap, bool on_worker, Kernel const& forward, Kernel const& backward, bool stack = false) {
  fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
    fsdp::Mesh mesh(std::move(comm));
    auto compute = on_worker ? fsdp::host::Stream("compute") : fsdp::host::Stream::inline_stream("compute");
    Engine engine(mesh, fsdp::FullShard{}, {.trap_stale_pointers = trap}, compute);
    Pointers p;
    std::vector<fsdp::AdoptedUnit<Engine>> adopted;
    for (std::size_t u = 0; u < units; ++u) {
      auto const name = std::to_string(u);
      std::vector<fsdp::AdoptedUnit<Engine>::Tensor> tensors{
          {name + ".w", &p.weights[u], &p.gradients[u], {300}, {}, stack ? static_cast<std::int64_t>(u) : 0}};
      adopted.emplace_back(engine, name, std::move(tensors), fsdp::AdoptedOptions{.kernels_are_enqueued = true});
    }
    for (std::size_t u = 0; u < units; ++u) {
      auto const full = adopted[u].forward();
      if (u == 0) p.kept_weight = p.weights[0];
      engine.compute().enqueue([&forward, u, now = p] { forward(u, now); });
    }
    for (std::size_t u = units; u-- > 0;) {
      auto const full = adopted[u].backward();
      if (u == units - 1) p.kept_gradient = p.gradients[u];
      engine.compute().enqueue([&backward, u, now = p] { backward(u, now); });
    }
    engine.synchronize();
  });
}

thread_local float volatile seen = 0.0f;
void nothing(std::size_t, Pointers const&) {}

constexpr int trapped = 86;
/// How the two passes end in a child process: 0, or trapped after a segmentation fault.
int ending(int ranks, bool trap, bool on_worker, Kernel const& forward, Kernel const& backward, bool stack = false) {
  auto const outcome = fsdp::testing::in_child([&] {
    std::signal(SIGSEGV, [](int) { std::_Exit(trapped); });
    train(ranks, trap, on_worker, forward, backward, stack);
  });
  INFO(outcome.text);
  CHECK(outcome.text.empty());
  return outcome.code;
}

}  // namespace

TEST_CASE("a pointer that was copied in another scope ends the process") {
  int const ranks = GENERATE(1, 2);
  bool const on_worker = GENERATE(false, true);
  INFO("ranks " << ranks << ", on a worker " << on_worker);
  Kernel const read = [](std::size_t u, Pointers const& p) {
    if (u == 1) seen = p.kept_weight[7];
  };
  Kernel const write = [](std::size_t u, Pointers const& p) {
    if (u == 1) p.kept_gradient[299] += 1.0f;
  };
  Kernel const beyond = [](std::size_t u, Pointers const& p) {
    if (u == 1) seen = p.weights[1][512];
  };
  CHECK(ending(ranks, true, on_worker, read, nothing) == trapped);
  CHECK(ending(ranks, true, on_worker, nothing, write) == trapped);
  CHECK(ending(ranks, true, on_worker, beyond, nothing) == trapped);
  Kernel const read_slice = [](std::size_t u, Pointers const& p) {
    if (u == 3) seen = p.kept_weight[3 * 300 + 7];
  };
  Kernel const write_slice = [](std::size_t u, Pointers const& p) {
    if (u == 0) p.kept_gradient[7] += 1.0f;
  };
  CHECK(ending(ranks, true, on_worker, read_slice, nothing, true) == trapped);
  CHECK(ending(ranks, true, on_worker, nothing, write_slice, true) == trapped);
  if (ranks > 1) return;  // without the option, such a read races with the next gather
  CHECK(ending(ranks, false, on_worker, read, nothing) == 0);
  CHECK(ending(ranks, false, on_worker, nothing, write) == 0);
}

TEST_CASE("pointers inside their scopes are good") {
  int const ranks = GENERATE(1, 2);
  bool const on_worker = GENERATE(false, true);
  Kernel const all = [](std::size_t u, Pointers const& p) {
    for (int i = 0; i < 300; ++i) seen = p.weights[u][i];
    if (p.gradients[u] != nullptr) p.gradients[u][299] += 1.0f;
  };
  CHECK(ending(ranks, true, on_worker, all, all) == 0);
}

TEST_CASE("trapping stale pointers changes no bit") {
  int const ranks = GENERATE(1, 2, 3);
  for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                               fsdp::ShardingStrategy(fsdp::NoShard{})}) {
    toy::Run run;
    run.micro_steps = 2;
    run.options.trap_stale_pointers = false;
    auto const expected = toy::train_local(strategy, ranks, run);
    run.options.trap_stale_pointers = true;
    CHECK(toy::train_local(strategy, ranks, run) == expected);
  }
}
