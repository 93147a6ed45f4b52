// SPDX-License-Identifier: Apache-2.0
// Trains a vector, saves and loads it if the headers for that are there, and prints it: the same with fsdp::compiled and
// without. WITH_MPI: ranks are processes.
#include <fsdp/fsdp.hpp>
#include <fsdp/host.hpp>

#include <cstdio>
#include <filesystem>
#include <span>
#include <utility>

#ifdef WITH_MPI
#include <fsdp/mpi.hpp>
#else
#include <fsdp/local.hpp>
#endif

#if __has_include(<nlohmann/json.hpp>) && __has_include(<xxhash.h>)
#include <fsdp/checkpoint.hpp>
#define WITH_CHECKPOINT 1
#endif

struct Vector {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {5}, {.init = fsdp::init::ones});
  }
  void forward(fsdp::host::Stream&, Params<float const> const&) const {}
  void backward(fsdp::host::Stream& stream, Params<float const> const& w, Params<float> const& g) const {
    stream.enqueue([w, g] {
      for (int i = 0; i < 5; ++i) g.w.data[i] += static_cast<float>(i) - w.w.data[i];
    });
  }
};

template <class Comm>
void train(Comm comm) {
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}};
  auto vector = engine.shard(Vector{}, "vector");
  fsdp::AdamW adamw{engine, {.lr = 0.1f}};
  for (int step = 0; step < 3; ++step) {
    vector.forward();
    vector.backward();
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
  }
#if WITH_CHECKPOINT
  std::filesystem::path const folder = "checkpoints";
  fsdp::save(engine, adamw, folder, {{"step", 3}});
  vector.forward();
  vector.backward();
  adamw.step();
  auto const loaded = fsdp::load_latest(engine, adamw, folder);
  if (!loaded || loaded->extra["step"] != 3) std::printf("the checkpoint is not there\n");
#endif
  fsdp::export_full(engine, [](fsdp::TensorInfo const& tensor, std::span<float const> values) {
    std::printf("%s:", tensor.name.c_str());
    for (float const value : values) std::printf(" %a", static_cast<double>(value));
    std::printf("\n");
  });
}

int main([[maybe_unused]] int argc, [[maybe_unused]] char** argv) {
#ifdef WITH_MPI
  return fsdp::mpi::run(argc, argv, [](fsdp::mpi::Environment const& environment) {
    train(fsdp::mpi::Communicator(environment));
    return 0;
  });
#else
  fsdp::local::run(3, fsdp::host::Device{}, [](auto comm) { train(std::move(comm)); });
#endif
}
