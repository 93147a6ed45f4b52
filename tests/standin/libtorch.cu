// SPDX-License-Identifier: Apache-2.0
// Sharded modules of torch over the CUDA device train as plain torch does. Gathers and reductions run on streams of the
// stand-in. Torch computes on the host, in the stand-in's memory, so the device completes the engine's work on the
// compute stream before a call returns, and the stand-in does not protect its memory from threads of ranks.
//
// needs: LibTorch
// skip-tsan
// skip-asan
#include <string_view>
#include <utility>

#include "fsdp/cuda.hpp"
#include "fsdp/local.hpp"
#include "tests/libtorch/catch.hpp"
#include "tests/libtorch/training.hpp"
#include "tests/standin/runtime/state.hpp"
#include "tests/support/devices.hpp"

namespace networks {

struct TorchOnHost : fsdp::testing::Forward<fsdp::cuda::Device> {
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    base.copy_async(stream, to, from, bytes);
    complete(stream);
  }
  void zero_async(Stream& stream, void* to, std::size_t bytes) const {
    base.zero_async(stream, to, bytes);
    complete(stream);
  }
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    base.launch(stream, blocks, kernel, args...);
    complete(stream);
  }
  void wait(Stream& stream, Event const& event, fsdp::WaitSite site) const {
    base.wait(stream, event, site);
    complete(stream);
  }
  void complete(Stream& stream) const {
    if (stream.get() == compute) base.synchronize(stream);
  }

  static thread_local cudaStream_t compute;  ///< of the thread's rank
};
thread_local cudaStream_t TorchOnHost::compute = nullptr;

fsdp::cuda::Stream compute_stream(TorchOnHost const& device) {
  auto stream = device.make_stream("compute", fsdp::StreamPriority::normal);
  TorchOnHost::compute = stream.get();
  standin::open_device_memory();
  return stream;
}

}  // namespace networks

template <>
struct fsdp::libtorch::detail::TorchDevice<networks::TorchOnHost> {
  static c10::Device of(networks::TorchOnHost const&) { return c10::Device(c10::kCPU); }
  static void expect_compute(fsdp::cuda::Stream const&, int) {}
  static void expect_current(networks::TorchOnHost const&, fsdp::cuda::Stream const&, int, std::string_view) {}
};

namespace {

using Comm = fsdp::local::Communicator<networks::TorchOnHost>;
using namespace networks;

template <class Precision>
Result train(Network const& network, int ranks, fsdp::ShardingStrategy const& strategy, Settings const& settings) {
  Result result;
  fsdp::local::run(ranks, TorchOnHost{}, [&](Comm comm) {
    Trainer<Comm, Precision> trainer(std::move(comm), network, strategy, settings);
    auto own = trainer.train();
    if (trainer.engine.rank() == 0) result = std::move(own);
  });
  return result;
}

}  // namespace

TEST_CASE("torch's modules over the CUDA device train as plain torch does") {
  for (auto const& network : all())
    for (bool const torch_optimizer : {false, true}) {
      Settings const settings{.steps = 2, .micro_steps = 2, .clip = 1.0, .torch_optimizer = torch_optimizer};
      auto const expected = train_plain(network, settings);
      for (auto const& strategy : strategies) {
        INFO(network.name << ", " << strategy.name << ", torch's optimizer " << torch_optimizer);
        CHECK(fault(difference(expected, train<fsdp::Fp32>(network, 2, strategy, settings))) == "");
      }
    }
}
