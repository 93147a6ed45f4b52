// SPDX-License-Identifier: Apache-2.0
// Overlap in an engine: FullShard over L equal units of matrix products, forward and backward.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "compute.hpp"
#include "fsdp/engine.hpp"
#include "report.hpp"
#include "timing.hpp"

namespace bench {

/// A unit: `matrices` square weights, each multiplied once forward and twice backward; or not at all, to time the
/// communication alone.
template <class D>
struct Layer {
  Products<D>* products;
  std::int64_t matrices, width;
  bool const* computes;

  template <class T>
  struct Params {
    fsdp::Tensor<T, 3> weight;  // (matrices, width, width)
  };
  template <class T, class Visit>
  void describe(Params<T>& p, Visit&& tensor) const {
    tensor("weight", p.weight, {matrices, width, width}, fsdp::TensorOptions{.init = fsdp::init::normal(0.02f)});
  }
  void forward(typename D::Stream& stream, Params<float const> const& w) const {
    if (!*computes) return;
    for (std::int64_t i = 0; i < matrices; ++i) products->forward(stream, w.weight.data + i * products->matrix());
  }
  void backward(typename D::Stream& stream, Params<float const> const& w, Params<float> const& g) const {
    if (!*computes) return;
    for (std::int64_t i = matrices; i-- > 0;)
      products->backward(stream, w.weight.data + i * products->matrix(), g.weight.data + i * products->matrix());
  }
};

struct Shape {
  std::size_t units = 0;
  std::int64_t matrices = 1;  ///< of a unit
  int prefetch = 1;
};

/// Measures one shape. @note Collective: yes.
template <fsdp::Communicator C>
class Units {
 public:
  using Device = typename C::Device;
  using Stream = typename Device::Stream;
  using Engine = fsdp::Engine<C, fsdp::Fp32>;
  using Module = fsdp::ShardedModule<Layer<Device>, Engine>;

  Units(fsdp::Mesh<C>& mesh, Settings const& settings)
      : mesh_(mesh),
        settings_(settings),
        compute_(mesh.device().make_stream("compute", fsdp::StreamPriority::normal)),
        products_(mesh.device(), compute_, settings.rows, settings.width),
        watch_(mesh.world()) {}

  OverlapRow measure(Shape const& shape) {
    bool computes = true;
    fsdp::EngineOptions options;
    options.prefetch = shape.prefetch;
    Engine engine(mesh_, fsdp::FullShard{}, options, compute_);
    auto modules = engine.shard(
        std::vector<Layer<Device>>(shape.units, Layer<Device>{&products_, shape.matrices, settings_.width, &computes}),
        "unit");
    auto const bytes = static_cast<std::size_t>(shape.matrices * products_.matrix()) * sizeof(float);
    Scratch<Device> const weights(mesh_.device(), compute_, shape.units * bytes / sizeof(float));
    Scratch<Device> const gradient(mesh_.device(), compute_, bytes / sizeof(float));
    for (int i = 0; i < 2; ++i) step(engine, modules);

    std::vector<double> comm, compute, both;
    for (int round = 0; round < settings_.rounds; ++round) {
      computes = false;
      comm.push_back(watch_.time([&] { step(engine, modules); }));
      computes = true;
      compute.push_back(watch_.time([&] {
        step_alone(shape, weights.data(), gradient.data());
        mesh_.device().synchronize(compute_);
      }));
      both.push_back(watch_.time([&] { step(engine, modules); }));
    }
    comm = watch_.slowest(comm);
    compute = watch_.slowest(compute);
    both = watch_.slowest(both);
    std::vector<double> slowdown;  // within a round: other load on the machine meets both
    for (std::size_t round = 0; round < both.size(); ++round) slowdown.push_back(both[round] / compute[round]);
    OverlapRow row;
    row.what = "full_shard";
    row.bytes = bytes;
    row.units = shape.units;
    row.prefetch = shape.prefetch;
    row.comm = median(comm);
    row.compute = median(compute);
    row.overlapped = median(both);
    row.compute_beside = row.compute * median(slowdown);
    row.reserved = static_cast<std::size_t>(engine.account().reserved_total());
    return row;
  }

 private:
  void step(Engine& engine, std::vector<Module>& modules) {
    for (auto& layer : modules) layer.forward();
    for (auto layer = modules.rbegin(); layer != modules.rend(); ++layer) layer->backward();
    engine.synchronize();
  }
  /// Times the products without an engine.
  void step_alone(Shape const& shape, float const* weights, float* gradient) {
    auto const all = static_cast<std::int64_t>(shape.units) * shape.matrices;
    for (std::int64_t i = 0; i < all; ++i) products_.forward(compute_, weights + i * products_.matrix());
    for (std::int64_t i = all; i-- > 0;)
      products_.backward(compute_, weights + i * products_.matrix(),
                         gradient + i % shape.matrices * products_.matrix());
  }

  fsdp::Mesh<C>& mesh_;
  Settings const& settings_;
  Stream compute_;
  Products<Device> products_;
  Stopwatch<C> watch_;
};

/// Whole matrices in about `bytes`.
inline std::int64_t matrices_in(std::size_t bytes, std::int64_t width) {
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes) / (width * width * std::int64_t{sizeof(float)}));
}

/// One shape, or with --sweep unit sizes by prefetch depths, always about units * unit_bytes of parameters.
template <fsdp::Communicator C>
void run_units(C comm, Settings const& settings, Report& report) {
  report.begin_overlap(describe_compute<typename C::Device>(settings) +
                       "; forward and backward of all units; slowdown: of the whole step");
  fsdp::Mesh<C> mesh(std::move(comm));
  Units<C> units(mesh, settings);
  auto const asked = matrices_in(settings.unit_bytes, settings.width);
  if (settings.mode == Mode::units) {
    report.add(units.measure({settings.units, asked, settings.prefetch}));
    return;
  }
  auto const all = asked * static_cast<std::int64_t>(settings.units);
  for (std::int64_t matrices = 1; matrices <= all; matrices *= 2)
    for (int const prefetch : {0, 1, 2, 4})
      if (prefetch == 0 || prefetch * matrices < all)
        report.add(units.measure({static_cast<std::size_t>((all + matrices - 1) / matrices), matrices, prefetch}));
}

}  // namespace bench
