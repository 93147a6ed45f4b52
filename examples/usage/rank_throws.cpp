// SPDX-License-Identifier: Apache-2.0
// If one rank throws, every other rank gets a PeerError that names this rank and its message, and the run ends.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

struct Linear {  // y = w x
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {1});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& p, float x, float* y) const {
    stream.enqueue([=] { *y = p.w.data[0] * x; });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, float x,
                float dy) const {
    stream.enqueue([=] { g.w.data[0] += dy * x; });
  }
};

int main() {
  std::string told[3];  // by rank
  auto const train = [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    float y = 0.0f;
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto model = engine.shard(Linear{}, "model");
    fsdp::AdamW adamw{engine};
    try {
      for (int step = 0; step < 100; ++step) {
        model.forward(2.0f, &y);
        engine.synchronize();
        if (step == 5 && engine.rank() == 1) throw std::runtime_error("step 5 has no data");
        model.backward(2.0f, y - 1.0f);
        adamw.step();
      }
    } catch (fsdp::PeerError const& error) {
      told[engine.rank()] = error.what();
      throw;  // A rank cannot go on without its peers, so the exception leaves train.
    }
  };
  try {
    fsdp::local::run(3, fsdp::host::Device{}, train);  // It rethrows the first exception when all ranks have ended.
  } catch (std::exception const& error) {
    std::printf("PeerError of %s\nPeerError of %s\nmain: %s\n", told[0].c_str(), told[2].c_str(), error.what());
  }
}
// Output:
//   PeerError of rank 0: rank 1 failed: step 5 has no data
//   PeerError of rank 2: rank 1 failed: step 5 has no data
//   main: step 5 has no data
