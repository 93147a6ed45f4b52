// SPDX-License-Identifier: Apache-2.0
// Compares step times of engines whose compute sleeps, over real links, with the forecast of the same program.
//
//   mpirun -n 2 bench_plan_sleeper_mpi [UNITS ELEMENTS FORWARD_MS STEPS]
//
// Calibration, before any step: the time of an all_gather, a reduce_scatter and an all_reduce, each alone, of a quarter
// of a unit and of a whole one; a line through both gives a fixed time and a time a byte. Local copies likewise.
// Tested: full_shard, shard_grad_op and no_shard, each with prefetch 0, 1 and 2. Nothing is changed after the first
// step.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/mpi.hpp"
#include "fsdp/plan.hpp"

namespace {

using Device = fsdp::host::Device;
using Stream = Device::Stream;

struct Sleeper {
  static constexpr bool sets_gradients = true;
  std::int64_t elements;
  double forward_s, backward_s;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {elements});
  }
  static void rest(Stream& stream, double seconds) {
    stream.enqueue([seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  }
  void forward(Stream& stream, Params<float const> const&) const { rest(stream, forward_s); }
  template <class G>
  void backward(Stream& stream, Params<float const> const&, G const&) const {
    rest(stream, backward_s);
  }
};

struct Options {
  int units = 8;
  std::int64_t elements = 1 << 20;
  double forward_s = 0.02;
  int steps = 10;
};

/// Seconds of `call`, the median of several; ranks begin together.
template <class Comm, class Call>
double timed(Comm& world, Call const& call) {
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    world.exchange("", "begin");
    auto const begin = std::chrono::steady_clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

/// A line through the times of a quarter and of the whole. @param elements  of the whole buffer, in fp32
template <class Time>
fsdp::Cost fitted(std::int64_t elements, Time const& time) {
  auto const small = time(elements / 4), large = time(elements);
  auto const per_byte = std::max(0.0, (large - small) / (static_cast<double>(elements - elements / 4) * 4));
  return {std::max(0.0, large - per_byte * static_cast<double>(elements) * 4), per_byte};
}

/// Costs of this machine and its links. @note Collective: yes.
template <class Comm>
fsdp::Costs calibrated(Comm& world, Options const& options) {
  using fsdp::step::Primitive;
  Device const device;
  auto comm = world.split(0, world.rank(), "calibration");
  auto stream = device.make_stream("calibration", fsdp::StreamPriority::normal);
  auto const elements = options.elements / comm.size() * comm.size();
  auto const bytes = static_cast<std::size_t>(elements) * 4;
  auto* const data = static_cast<float*>(comm.allocate(bytes));
  auto* const other = static_cast<float*>(comm.allocate(bytes));
  std::fill_n(data, elements, 1.0f);
  std::fill_n(other, elements, 1.0f);
  auto const part = [&](std::int64_t whole) { return static_cast<std::size_t>(whole / comm.size()); };
  auto const own = [&](std::int64_t whole) { return data + part(whole) * static_cast<std::size_t>(comm.rank()); };
  fsdp::Label const label{"calibration", "alone"};
  auto const on_stream = [&](auto const& enqueue) {
    return timed(world, [&] {
      enqueue();
      device.synchronize(stream);
    });
  };
  fsdp::Costs costs;
  costs[Primitive::all_gather] = fitted(elements, [&](std::int64_t n) {
    return on_stream([&] { comm.all_gather(stream, own(n), data, part(n), label); });
  });
  costs[Primitive::reduce_scatter] = fitted(elements, [&](std::int64_t n) {
    return on_stream([&] { comm.reduce_scatter(stream, data, own(n), part(n), label); });
  });
  costs[Primitive::all_reduce] = fitted(elements, [&](std::int64_t n) {
    return on_stream([&] { comm.all_reduce(stream, data, data, static_cast<std::size_t>(n), label); });
  });
  auto const copy = fitted(elements, [&](std::int64_t n) {
    return on_stream([&] { device.copy_async(stream, other, data, static_cast<std::size_t>(n) * 4); });
  });
  for (auto const primitive : {Primitive::cast, Primitive::copy, Primitive::zero, Primitive::accumulate, Primitive::add,
                               Primitive::round, Primitive::update})
    costs[primitive] = {0, copy.per_byte};
  costs.link.fill(0);
  device.synchronize(stream);
  comm.deallocate(data, bytes);
  comm.deallocate(other, bytes);
  if (world.rank() == 0)
    for (auto const primitive : {Primitive::all_gather, Primitive::reduce_scatter, Primitive::all_reduce})
      std::printf("calibration: %s %.3f ms + %.3f ms/MB\n", std::string(name(primitive)).c_str(),
                  1e3 * costs[primitive].fixed, 1e9 * costs[primitive].per_byte);
  return costs;
}

}  // namespace

int main(int argc, char** argv) {
  return fsdp::mpi::run(argc, argv, [&](fsdp::mpi::Environment& environment) {
    Options options;
    if (argc > 1) options.units = std::atoi(argv[1]);
    if (argc > 2) options.elements = std::atoll(argv[2]);
    if (argc > 3) options.forward_s = 1e-3 * std::atof(argv[3]);
    if (argc > 4) options.steps = std::atoi(argv[4]);
    fsdp::mpi::Communicator world{environment};
    bool const first = world.rank() == 0;
    fsdp::Mesh mesh{std::move(world)};
    auto const costs = calibrated(mesh.world(), options);
    double total = 0, worst = 0, total_trivial = 0;
    int rows = 0, within = 0;
    if (first)
      std::printf("%-14s %8s %12s %12s %8s %12s %10s\n", "strategy", "prefetch", "measured ms", "forecast ms",
                  "error %", "compute ms", "exposed ms");
    for (auto const& strategy : {fsdp::ShardingStrategy(fsdp::FullShard{}), fsdp::ShardingStrategy(fsdp::ShardGradOp{}),
                                 fsdp::ShardingStrategy(fsdp::NoShard{})})
      for (int const prefetch : {0, 1, 2}) {
        fsdp::Engine engine{mesh, strategy, {.prefetch = prefetch}};
        auto layers = engine.shard(std::vector(static_cast<std::size_t>(options.units),
                                               Sleeper{options.elements, options.forward_s, 2 * options.forward_s}),
                                   "layers");
        fsdp::Sgd sgd{engine, {.lr = 0.0f}};
        auto const step = [&] {
          for (auto& layer : layers) layer.forward();
          for (auto i = layers.size(); i-- > 0;) layers[i].backward();
          sgd.step();
        };
        for (int i = 0; i < 2; ++i) step();
        engine.device().synchronize(engine.compute());
        mesh.world().exchange("", "warm");
        auto const begin = std::chrono::steady_clock::now();
        for (int i = 0; i < options.steps; ++i) step();
        engine.device().synchronize(engine.compute());
        mesh.world().exchange("", "done");
        auto const measured =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / options.steps;
        fsdp::plan::Workload load;
        load.uses.resize(layers.size());
        load.clips = false;
        auto known = costs;
        known[fsdp::PassKind::forward].assign(layers.size(), options.forward_s);
        known[fsdp::PassKind::backward].assign(layers.size(), 2 * options.forward_s);
        auto const forecast = fsdp::plan::forecast(engine.program(), load, known);
        auto const error = 100 * (forecast.step / measured - 1);
        auto const trivial = 100 * (forecast.compute / measured - 1);
        total += std::abs(error), total_trivial += std::abs(trivial), worst = std::max(worst, std::abs(error));
        ++rows, within += std::abs(error) <= 5 ? 1 : 0;
        if (first)
          std::printf("%-14s %8d %12.1f %12.1f %+8.1f %12.1f %10.1f\n", std::string(strategy.name).c_str(), prefetch,
                      1e3 * measured, 1e3 * forecast.step, error, 1e3 * forecast.compute, 1e3 * forecast.exposed);
        std::fflush(stdout);
      }
    if (first)
      std::printf("mean |error| %.1f %%, worst %.1f %%, within 5 %%: %d of %d; compute alone: mean %.1f %%\n",
                  total / rows, worst, within, rows, total_trivial / rows);
    return 0;
  });
}
