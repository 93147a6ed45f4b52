// SPDX-License-Identifier: Apache-2.0
// A small trainer, as an example of a user's file that is compiled often.
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

struct Line {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("w", p.w, {64});
  }
  void forward(fsdp::host::Stream& stream, Params<float const> const& w, float const* x, float* y) const {
    stream.enqueue([w, x, y] {
      for (int i = 0; i < 64; ++i) y[i] = w.w.data[i] * x[i];
    });
  }
  void backward(fsdp::host::Stream& stream, Params<float const> const&, Params<float> const& g, float const* x,
                float const* dy) const {
    stream.enqueue([g, x, dy] {
      for (int i = 0; i < 64; ++i) g.w.data[i] += x[i] * dy[i];
    });
  }
};

int main() {
  fsdp::local::run(2, fsdp::host::Device{}, [](auto comm) {
    float x[64]{}, y[64]{}, dy[64]{};
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto lines = engine.shard(std::vector(2, Line{}), "lines");
    fsdp::AdamW adamw{engine, {.lr = 1e-3f}};
    for (auto& line : lines) line.forward(x, y);
    for (auto i = lines.size(); i-- > 0;) lines[i].backward(x, dy);
    adamw.step(fsdp::clip_grad_norm(engine, 1.0f));
    engine.synchronize();
  });
}
