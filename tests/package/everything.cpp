// SPDX-License-Identifier: Apache-2.0
// Everything that a user of the host may call, so that a compiler which optimises sees all of it: compiled, never run.
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "fsdp/safetensors.hpp"
#include "fsdp/trace.hpp"
#ifdef WITH_MPI
#include "fsdp/mpi.hpp"
#endif

namespace {

template <class Stream>
struct Module {
  std::int64_t width;
  template <class T>
  struct Params {
    fsdp::Tensor<T, 2> weight;
    fsdp::Tensor<T, 1> bias;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {width, 2 * width});
    tensor("bias", p.bias, {width}, fsdp::no_decay);
  }
  template <class W>
  void forward(Stream&, Params<W> const&) const {}
  template <class W, class G>
  void backward(Stream&, Params<W> const&, Params<G> const&) const {}
};

template <class P, class Comm>
void use(fsdp::ShardingStrategy const& strategy, Comm comm) {
  fsdp::Mesh mesh(std::move(comm));
  using Engine = fsdp::Engine<Comm, P>;
  using Stream = typename Engine::Stream;
  Engine engine(mesh, strategy, {.reshard_ranks = 0, .allow_no_sync = true});
  auto const shared = engine.add_unit("shared");
  auto one = engine.shard(Module<Stream>{8}, "one", shared);
  auto many = engine.shard(std::vector(2, Module<Stream>{8}), "many");
  typename Engine::Param* weight = nullptr;
  typename Engine::Reduce* gradient = nullptr;
  fsdp::AdoptedUnit<Engine> adopted(engine, "adopted", {{"weight", &weight, &gradient, {8}}},
                                    {.kernels_are_enqueued = true});
  engine.set_forward_prefetch(one, {many[0]});
  fsdp::AdamW<Engine, fsdp::bf16> adamw(engine, {.stochastic_rounding = true});
  fsdp::Sgd sgd(engine, {.momentum = 0.9f});
  engine.start_trace(100);
  one.forward();
  for (auto& module : many) module.forward();
  { auto const scope = adopted.forward(); }
  { auto const scope = adopted.backward(); }
  for (auto& module : many) module.backward();
  one.backward();
  auto const norm = fsdp::clip_grad_norm(engine, 1.0f, {.non_finite = fsdp::NonFinite::raise});
  {
    fsdp::GradScaler scaler(engine);
    scaler.step(adamw, 1e-3f, norm);
  }
  sgd.step();
  auto const traces = fsdp::gather_trace(engine.world(), engine.stop_trace());
  auto const report = fsdp::text(fsdp::overlap_report(traces[0])) + fsdp::chrome_trace(traces);
  auto const evaluation = engine.evaluation();

  fsdp::checkpoint::SafetensorsWriter writer("weights.safetensors", {}, {});
  fsdp::export_full(engine, [&](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    writer.write(tensor.name, values);
  });
  writer.finish();
  fsdp::export_gradients(engine, [](fsdp::TensorInfo const&, std::span<float const>) {});
  fsdp::checkpoint::SafetensorsFile const file("weights.safetensors");
  fsdp::import_shard(engine, [&](fsdp::TensorInfo const& tensor, std::int64_t first, std::span<float> values) {
    file.read(tensor.name, tensor.shape, first, values);
  });
}

}  // namespace

int main() {
  using Comm = fsdp::local::Communicator<fsdp::host::Device>;
  fsdp::local::run(2, fsdp::host::Device{},
                   [](Comm comm) { use<fsdp::Bf16>(fsdp::HybridShard<>{.group = 1}, std::move(comm)); });
#ifdef WITH_MPI
  return fsdp::mpi::run(0, nullptr, [](fsdp::mpi::Environment& environment) {
    fsdp::mpi::Communicator world{environment};
    auto stream = world.device().make_stream("sum");
    float value = 1.0f;
    world.all_reduce(stream, static_cast<float const*>(&value), &value, 1, {"value", "sum"});
    world.device().synchronize(stream);
    return world.split(0, world.rank(), "part").size();
  });
#endif
}
