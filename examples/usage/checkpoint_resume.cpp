// SPDX-License-Identifier: Apache-2.0
// This program saves a run of 2 ranks at step 10, and resumes it on 3 ranks: the losses agree up to rounding.
#include <unistd.h>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

#include "fsdp/checkpoint.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

struct Table {  // y = value[i]
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> value;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("value", p.value, {384});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, int i, float* y) const {
    stream.enqueue([=] { *y = p.value.data[i]; });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, int i, float dy) const {
    stream.enqueue([=] { g.value.data[i] += dy; });
  }
};

void train(fsdp::local::Communicator<fsdp::host::Device> comm, std::filesystem::path const& folder) {
  float y = 0.0f, scale = static_cast<float>(comm.size()) / 6.0f;
  fsdp::Mesh mesh{std::move(comm)};
  fsdp::Engine engine{mesh, fsdp::FullShard{}};
  auto model = engine.shard(Table{}, "table");
  fsdp::AdamW adamw{engine, {.lr = 0.03f}};
  int step = 0;
  if (auto const loaded = fsdp::load_latest(engine, adamw, folder)) step = loaded->extra["step"];
  while (step < 20) {
    double loss = 0.0;
    for (int i = 64 * engine.rank(); i < 384; i += 64 * engine.world_size()) {  // the same 6 samples on 2 or 3 ranks
      model.forward(i, &y);
      engine.synchronize();
      loss += scale * (y - 1.0f) * (y - 1.0f);
      model.backward(i, scale * (y - 1.0f));
    }
    adamw.step();
    loss = engine.mean_over_ranks({loss})[0];
    if (++step == 10) fsdp::save(engine, adamw, folder, {{"step", step}});
    if (engine.rank() == 0 && step == 20) std::printf("step 20 on %d ranks: loss %.4f\n", engine.world_size(), loss);
  }
}

int main() {
  auto const folder = std::filesystem::temp_directory_path() / ("fsdp-usage-" + std::to_string(getpid()));
  fsdp::local::run(2, fsdp::host::Device{}, [&](auto comm) { train(std::move(comm), folder); });  // steps 1 to 20
  fsdp::local::run(3, fsdp::host::Device{}, [&](auto comm) { train(std::move(comm), folder); });  // steps 11 to 20
  std::filesystem::remove_all(folder);
}
// Output:
//   step 20 on 2 ranks: loss 0.2103
//   step 20 on 3 ranks: loss 0.2103
