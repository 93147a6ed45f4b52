// SPDX-License-Identifier: Apache-2.0
// Overhead of the library: microseconds per unit and pass when kernels do nothing, on 1 and 2 ranks (threads); and
// microseconds per module to declare, seal, train, export and save engines of many modules.
//
// usage: bench_overhead [--units=4,16,64] [--modules=250,1000,5000] [--ranks=1,2] [--steps=400]
//
// inline: compute runs on the calling thread, as in a trainer that calls its own kernels there. streams: compute is a
// stream with a worker. With one rank, fp32 parameters are used where they are; bf16 ones are cast on the gather
// stream. "host" is the time of the calling thread in the phase; "done" adds the wait until every stream has run dry,
// so it is the time of the phase on its own. Medians over the steps, of rank 0. The second table has medians over five
// engines; each module is a unit of its own.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/full_state.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using Comm = fsdp::AnyCommunicator<fsdp::host::Device>;

/// A unit of 64 elements; computes nothing.
struct Empty {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {64});
  }
  template <class Weights>
  void forward(fsdp::host::Stream&, Weights const&) const {}
  template <class Weights, class Gradients>
  void backward(fsdp::host::Stream&, Weights const&, Gradients const&) const {}
};

enum Phase : std::size_t { forward, backward, clip, optimizer, phases };

struct Figures {
  std::array<double, phases> host{}, done{};  ///< microseconds a unit
};

double median(std::vector<double> values) {
  auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

template <class P>
Figures measure(Comm comm, std::size_t units, int steps, bool inline_compute) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  std::optional<fsdp::host::Stream> compute;
  if (inline_compute) compute.emplace(fsdp::host::Stream::inline_stream("compute"));
  using Engine = fsdp::Engine<Comm, P>;
  std::optional<Engine> made;
  inline_compute ? made.emplace(mesh, fsdp::FullShard{}, fsdp::EngineOptions{}, *compute)
                 : made.emplace(mesh, fsdp::FullShard{}, fsdp::EngineOptions{});
  auto& engine = *made;
  auto modules = engine.shard(std::vector<Empty>(units), "units");
  fsdp::AdamW adamw(engine);

  auto const step = [&](auto const& phase) {
    phase(forward, [&] {
      for (auto& unit : modules) unit.forward();
    });
    phase(backward, [&] {
      for (std::size_t i = units; i-- > 0;) modules[i].backward();
    });
    fsdp::GradNorm<Engine> norm;
    phase(clip, [&] { norm = fsdp::clip_grad_norm(engine, 1.0f); });
    phase(optimizer, [&] { adamw.step(norm); });
  };
  auto const microseconds = [&](Clock::time_point from) {
    return std::chrono::duration<double, std::micro>(Clock::now() - from).count() / static_cast<double>(units);
  };
  std::array<std::vector<double>, phases> host, done;
  for (int i = 0; i < steps + steps / 10; ++i) {
    bool const counts = i >= steps / 10;
    step([&](Phase p, auto const& body) {
      auto const begin = Clock::now();
      body();
      if (counts) host[p].push_back(microseconds(begin));
      engine.synchronize();
      if (counts) done[p].push_back(microseconds(begin));
    });
  }
  Figures figures;
  for (std::size_t p = 0; p < phases; ++p) {
    figures.host[p] = median(std::move(host[p]));
    figures.done[p] = median(std::move(done[p]));
  }
  return figures;
}

enum Stage : std::size_t { declare, seal, step, exports, save, stages };
constexpr int engines = 5;

/// Adds to `costs` the microseconds per module of each stage of one engine.
void measure_growth(Comm comm, std::size_t modules, std::filesystem::path const& folder,
                    std::array<std::vector<double>, stages>& costs) {
  fsdp::Mesh<Comm> mesh(std::move(comm));
  fsdp::Engine engine(mesh, fsdp::FullShard{});
  auto const timed = [&](Stage stage, auto const& body) {
    auto const begin = Clock::now();
    body();
    std::chrono::duration<double, std::micro> const taken = Clock::now() - begin;
    costs[stage].push_back(taken.count() / static_cast<double>(modules));
  };
  std::vector<std::string> names;
  for (std::size_t i = 0; i < modules; ++i) names.push_back(fmt::format("experts.{}", i));
  using Module = decltype(engine.shard(Empty{}, names[0]));
  std::vector<Module> list;
  list.reserve(modules);
  timed(declare, [&] {
    for (auto const& name : names) list.push_back(engine.shard(Empty{}, name));
  });
  timed(seal, [&] { engine.seal(); });
  fsdp::AdamW adamw(engine);
  auto const train = [&] {
    for (auto& module : list) module.forward();
    for (std::size_t i = modules; i-- > 0;) list[i].backward();
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
    engine.synchronize();
  };
  train();  // takes memory
  timed(step, train);
  timed(exports, [&] { fsdp::export_full(engine, [](auto const&...) {}); });
  timed(save, [&] { fsdp::save(engine, adamw, folder); });
}

void print_growth(int ranks, std::size_t modules) {
  auto const folder = std::filesystem::temp_directory_path() /
                      fmt::format("bench_overhead_{}", Clock::now().time_since_epoch().count());
  std::array<std::vector<double>, stages> costs;
  for (int i = 0; i < engines; ++i)
    fsdp::local::run(ranks, fsdp::host::Device{}, [&](Comm comm) {
      std::array<std::vector<double>, stages> others;
      bool const first = comm.rank() == 0;
      measure_growth(std::move(comm), modules, folder, first ? costs : others);
    });
  std::filesystem::remove_all(folder);
  fmt::print("{:>5} {:>7}", ranks, modules);
  for (auto& cost : costs) fmt::print(" {:>9.2f}", median(std::move(cost)));
  fmt::print("\n");
  std::fflush(stdout);
}

std::vector<int> numbers(std::string_view text) {
  std::vector<int> found;
  while (!text.empty()) {
    int value = 0;
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || value < 1) return {};
    found.push_back(value);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (!text.empty()) text.remove_prefix(1);
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> units{4, 16, 64}, modules{250, 1000, 5000}, ranks{1, 2}, steps{400};
  for (int i = 1; i < argc; ++i) {
    std::string_view const argument = argv[i];
    auto const takes = [&](std::string_view option, std::vector<int>& list) {
      if (!argument.starts_with(option)) return false;
      list = numbers(argument.substr(option.size()));
      return !list.empty();
    };
    if (takes("--units=", units) || takes("--modules=", modules) || takes("--ranks=", ranks) ||
        takes("--steps=", steps))
      continue;
    fmt::print(stderr, "usage: {} [--units=4,16,64] [--modules=250,1000,5000] [--ranks=1,2] [--steps=400]\n", argv[0]);
    return 2;
  }
  fmt::print("microseconds per unit; {} steps, median\n", steps[0]);
  fmt::print("{:>5} {:>5} {:<5} {:<8} {:>15} {:>15} {:>15} {:>15}\n", "ranks", "units", "type", "compute", "forward",
             "backward", "clip", "optimizer");
  fmt::print("{:>26}", "");
  for (std::size_t p = 0; p < phases; ++p) fmt::print(" {:>7} {:>7}", "host", "done");
  fmt::print("\n");
  for (auto const n : ranks) {
    for (auto const u : units) {
      for (auto const& [bf16, inline_compute] : {std::pair{false, true}, {false, false}, {true, true}, {true, false}}) {
        auto const count = static_cast<std::size_t>(u);
        Figures figures;
        fsdp::local::run(n, fsdp::host::Device{}, [&, bf16 = bf16, inline_compute = inline_compute](Comm comm) {
          bool const first = comm.rank() == 0;
          auto const mine = bf16 ? measure<fsdp::Bf16>(std::move(comm), count, steps[0], inline_compute)
                                 : measure<fsdp::Fp32>(std::move(comm), count, steps[0], inline_compute);
          if (first) figures = mine;
        });
        fmt::print("{:>5} {:>5} {:<5} {:<8}", n, u, bf16 ? "bf16" : "fp32", inline_compute ? "inline" : "streams");
        for (std::size_t p = 0; p < phases; ++p) fmt::print(" {:>7.2f} {:>7.2f}", figures.host[p], figures.done[p]);
        fmt::print("\n");
        std::fflush(stdout);
      }
    }
  }
  fmt::print("\nmicroseconds per module; {} engines, median\n", engines);
  fmt::print("{:>5} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "ranks", "modules", "declare", "seal", "step", "export",
             "save");
  for (auto const n : ranks)
    for (auto const count : modules) print_growth(n, static_cast<std::size_t>(count));
  return EXIT_SUCCESS;
}
