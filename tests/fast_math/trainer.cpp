// SPDX-License-Identifier: Apache-2.0
// The library's part of a trainer whose kernels may be compiled with -Ofast. Prints what check.sh compares between ways
// of compiling and linking: words that say how threads compute, bits of subnormal weights, and values of a training.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "kernels.hpp"

using Comm = fsdp::local::Communicator<fsdp::host::Device>;
using Engine = fsdp::Engine<Comm>;
using Stream = fsdp::host::Stream;

constexpr std::int64_t elements = 200;
constexpr int ranks = 3;

/// Where a unit of one tensor keeps its pointers.
struct Weights {
  float* weight = nullptr;
  float* gradient = nullptr;
};

/// `count` times the smallest number above zero, without arithmetic, which this thread may do as it likes.
float subnormal(std::int64_t count) {
  return fsdp::detail::bit_cast<float>(static_cast<std::uint32_t>(count < 0 ? -count : count) |
                                       (count < 0 ? 0x80000000u : 0u));
}

/// Prints a hash of all weights' bits, and how many of them are subnormal.
void print_bits(Engine& engine, char const* what) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  int subnormal = 0;
  fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    for (float const& value : values) {
      std::uint32_t word;
      std::memcpy(&word, &value, sizeof word);
      hash = (hash ^ word) * 0x100000001b3ull;
      subnormal += (word & 0x7f800000u) == 0 && (word & 0x007fffffu) != 0;
    }
  });
  if (engine.rank() == 0)
    std::printf("bits %s: %016llx, %d subnormal\n", what, static_cast<unsigned long long>(hash), subnormal);
}

/// Gradients and weights around the smallest normal number, summed over ranks, accumulated, clipped and stepped with.
template <class Optimizer>
void train_subnormals(Engine& engine, Weights& weights, fsdp::AdoptedUnit<Engine>& unit, Optimizer& optimizer, float lr,
                      char const* what) {
  fsdp::import_shard(engine, [](fsdp::TensorInfo const&, std::int64_t first, std::span<float> out) {
    for (auto& value : out) value = subnormal(first++ * 7919 % 0x7fffff);
  });
  for (int step = 0; step < 5; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      std::array<float, elements> gradient;
      for (std::int64_t i = 0; i < elements; ++i)
        gradient[static_cast<std::size_t>(i)] =
            subnormal((i * 104729 + step * 31 + micro * 17 + engine.rank()) % 0x3fffff - 0x1fffff);
      { auto const full = unit.forward(); }
      auto const full = unit.backward();
      // On a stream of its own the copy is enqueued, with its pointer as it is now.
      engine.compute().enqueue([gradient, to = weights.gradient] { trainer::copy(gradient.data(), to, elements); });
    }
    optimizer.step(lr, fsdp::clip_grad_norm(engine, 0x1p-124f));
  }
  print_bits(engine, what);
}

void subnormals(Comm comm, bool inline_stream) {
  fsdp::Mesh mesh{std::move(comm)};
  auto compute = inline_stream ? Stream::inline_stream("compute") : Stream("compute");
  Weights weights;
  {
    Engine engine(mesh, fsdp::FullShard{}, {}, compute);
    fsdp::AdoptedUnit<Engine> unit(engine, "unit", {{"weight", &weights.weight, &weights.gradient, {elements}}},
                                   {.kernels_are_enqueued = true});
    fsdp::Sgd sgd(engine, {.momentum = 0.5f, .weight_decay = 0.1f});
    train_subnormals(engine, weights, unit, sgd, 0.75f, inline_stream ? "inline, Sgd" : "worker, Sgd");
    fsdp::AdamW adamw(engine, {.eps = 1.0f});
    train_subnormals(engine, weights, unit, adamw, 0.5f, inline_stream ? "inline, AdamW" : "worker, AdamW");
  }
  bool in_task = true;
  compute.enqueue([&] { in_task = trainer::flushes_subnormals(); });
  compute.synchronize();
  if (mesh.rank() == 0)
    std::printf("tasks %s flush subnormals: %d\n", inline_stream ? "inline" : "on a worker", in_task ? 1 : 0);
}

/// out = tanh(x w) + log(1 + exp(x)), elementwise; one block.
struct Forward {
  template <class Block>
  void operator()(Block const& block, std::int64_t, float const* x, float const* w, float* out) const {
    namespace math = fsdp::math;
    auto const f = [](float a, float b) { return math::tanh(a * b) + math::log(1.0f + math::exp(a)); };
    block.each(elements, out, f, x, w);
  }
};

struct Layer {
  fsdp::host::Device device;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> weight;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {elements}, fsdp::TensorOptions{.init = fsdp::init::normal(0.5f)});
  }
  void forward(Stream& stream, Params<float const> const& w, float const* x, float* out) const {
    device.launch(stream, 1, Forward{}, x, w.weight.data, out);
  }
  void backward(Stream& stream, Params<float const> const&, Params<float> const& g, float const* out) const {
    stream.enqueue([out, to = g.weight.data] { trainer::copy(out, to, elements); });
  }
};

void training(Comm comm) {
  fsdp::Mesh mesh{std::move(comm)};
  std::array<float, elements> x, out;
  Engine engine{mesh, fsdp::FullShard{}};
  for (std::int64_t i = 0; i < elements; ++i)
    x[static_cast<std::size_t>(i)] = 0.03f * static_cast<float>((i + engine.rank()) % 100 - 50);
  auto layer = engine.shard(Layer{engine.device()}, "layer");
  fsdp::AdamW adamw{engine, {.weight_decay = 0.1f}};
  for (int step = 0; step < 20; ++step) {
    layer.forward(x.data(), out.data());
    layer.backward(out.data());
    auto const norm = fsdp::clip_grad_norm(engine, 1.0f);
    engine.synchronize();
    auto const mean = engine.mean_over_ranks({static_cast<double>(trainer::sum(out.data(), elements)) / elements})[0];
    if (engine.rank() == 0) std::printf("value %d: %.9g %.9g\n", step, norm.value(), mean);
    adamw.step(1e-2f, norm);
  }
  fsdp::export_full(engine, [&](fsdp::TensorInfo const&, std::span<float const> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      std::printf("value w%zu: %.9g\n", i, static_cast<double>(values[i]));
  });

  // A gradient that is not finite is noticed by every flag: the step is refused where it is asked to be.
  layer.forward(x.data(), out.data());
  engine.synchronize();
  std::uint32_t const nan = 0x7fc00000u;
  if (engine.rank() == 1) std::memcpy(&out[17], &nan, sizeof nan);
  layer.backward(out.data());
  std::string refused = "no";
  try {
    static_cast<void>(fsdp::clip_grad_norm(engine, 1.0f, {.non_finite = fsdp::NonFinite::raise}));
  } catch (fsdp::Error const&) {
    refused = "yes";
  }
  if (engine.rank() == 0) std::printf("NaN refused: %s\n", refused.c_str());
  refused = "no";
  try {
    float lr;
    std::memcpy(&lr, &nan, sizeof lr);
    adamw.step(lr);
  } catch (fsdp::UsageError const&) {
    refused = "yes";
  }
  if (engine.rank() == 0) std::printf("NaN as learning rate refused: %s\n", refused.c_str());
  engine.synchronize();
}

int main() {
  std::printf("main thread flushes subnormals: %d\n", trainer::flushes_subnormals() ? 1 : 0);
  for (bool const inline_stream : {true, false})
    fsdp::local::run(ranks, fsdp::host::Device{}, [=](Comm comm) { subnormals(std::move(comm), inline_stream); });
  fsdp::local::run(ranks, fsdp::host::Device{}, [](Comm comm) { training(std::move(comm)); });
  return 0;
}
