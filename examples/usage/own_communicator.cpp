// SPDX-License-Identifier: Apache-2.0
// A communicator of your own counts the bytes of each collective, and hands it to the library's communicator of
// threads.
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"

using fsdp::host::Device, fsdp::host::Stream;
using Threads = fsdp::local::Communicator<Device>;

/// All other members are inherited: rank, size, device, allocate, deallocate, broadcast, wait_for_peers, exchange.
class Counting : public Threads {
 public:
  using Bytes = std::map<std::string, std::size_t>;  // by collective and unit

  Counting(Threads threads, Bytes* bytes) : Threads(std::move(threads)), bytes_(bytes) {}
  /// The engine splits its communicator into groups, and runs collectives in these.
  Counting split(int color, int key, std::string_view group) { return {Threads::split(color, key, group), bytes_}; }
  fsdp::Ticket all_gather(Stream& stream, auto const* send, auto* recv, std::size_t count, fsdp::Label label) {
    add("all-gather", label, count * sizeof *send);  // count is the size of one rank's slice
    return Threads::all_gather(stream, send, recv, count, label);
  }
  fsdp::Ticket reduce_scatter(Stream& stream, auto const* send, auto* recv, std::size_t count, fsdp::Label label) {
    add("reduce-scatter", label, count * sizeof *send);  // likewise
    return Threads::reduce_scatter(stream, send, recv, count, label);
  }
  fsdp::Ticket all_reduce(Stream& stream, auto const* send, auto* recv, std::size_t count, fsdp::Label label) {
    add("all-reduce", label, count * sizeof *send);
    return Threads::all_reduce(stream, send, recv, count, label);
  }
  bool takes_means() const { return false; }  // engines call all_reduce instead of the inherited all_reduce_mean

 private:
  void add(std::string_view collective, fsdp::Label label, std::size_t bytes) {
    if (bytes > 0) (*bytes_)[fsdp::formatted("{} of {}", collective, label.unit)] += bytes;
  }
  Bytes* bytes_;
};
static_assert(fsdp::Communicator<Counting>);

/// A module that computes nothing: the communication of a step depends only on shapes.
struct Layer {
  template <class T>
  struct Params {
    fsdp::Tensor<T, 1> w;
  };
  void describe(auto& params, auto&& tensor) const { tensor("w", params.w, {256}); }
  void forward(Stream&, Params<float const> const&) const {}
  void backward(Stream&, Params<float const> const&, Params<float> const&) const {}
};

int main() {
  fsdp::local::run(2, Device{}, [](Threads threads) {
    Counting::Bytes bytes;
    fsdp::Mesh mesh{Counting(std::move(threads), &bytes)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    auto layers = engine.shard(std::vector(2, Layer{}), "layers");
    fsdp::Sgd sgd{engine};
    layers[0].forward(), layers[1].forward(), layers[1].backward(), layers[0].backward(), sgd.step();
    if (engine.rank() != 0) return;
    for (auto const& [what, count] : bytes) std::cout << fsdp::formatted("{}: {} bytes\n", what, count);
  });
}

// Output:
//   all-gather of layers.0: 1024 bytes
//   all-gather of layers.1: 512 bytes
//   reduce-scatter of layers.0: 512 bytes
//   reduce-scatter of layers.1: 512 bytes
