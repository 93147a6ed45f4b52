// SPDX-License-Identifier: Apache-2.0
// An engine asks the communicator that an AnyCommunicator holds whether its collectives complete in order among peers,
// and waits for peers as over the communicator itself.
// skip-sanitizers
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/communicator.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
#include "fsdp/local.hpp"
#include "tests/catch.hpp"
#include "tests/support/forwarding.hpp"
#include "tests/support/ramp.hpp"

namespace {

using fsdp::testing::Ramp;
using Local = fsdp::local::Communicator<fsdp::host::Device>;

/// Counts waits for peers, also of what is split from it.
class Counted : public fsdp::testing::Forwarding<Counted, Local> {
 public:
  Counted(Local inner, bool in_order, std::size_t& waits)
      : Forwarding(std::move(inner)), in_order_(in_order), waits_(&waits) {}
  Counted split(int color, int key, std::string_view name) {
    return {inner().split(color, key, name), in_order_, *waits_};
  }
  void wait_for_peers(Stream& stream, fsdp::Ticket ticket, fsdp::WaitSite site) {
    ++*waits_;
    inner().wait_for_peers(stream, ticket, site);
  }
  bool completes_in_order() const { return in_order_; }
  void before(Stream&, fsdp::Label) {}

 private:
  bool in_order_;
  std::size_t* waits_;
};

struct Result {
  std::vector<float> weights;
  std::size_t waits = 0;  ///< of rank 0
};

/// @tparam C  the engine's communicator
template <class C>
Result train(bool in_order) {
  std::vector<Result> results(2);
  fsdp::local::run(2, fsdp::host::Device{}, [&](Local comm) {
    auto& result = results[static_cast<std::size_t>(comm.rank())];
    fsdp::Mesh<C> mesh{C(Counted(std::move(comm), in_order, result.waits))};
    fsdp::Engine<C> engine(mesh, fsdp::FullShard{}, {.prefetch = 1});
    std::vector<fsdp::ShardedModule<Ramp<>, fsdp::Engine<C>>> layers;
    for (auto const* const name : {"a", "b", "c", "d"}) layers.push_back(engine.shard(Ramp<>{150}, name));
    fsdp::Sgd optimizer(engine, {.momentum = 0.9f});
    for (int step = 0; step < 3; ++step) {
      for (auto& layer : layers) layer.forward();
      for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) layer->backward(1.0f);
      optimizer.step(0.01f);
    }
    result.weights = fsdp::testing::all_weights(engine);
  });
  return results[0];
}

}  // namespace

TEST_CASE("over any communicator, an engine waits for peers as its communicator needs", "[schedule]") {
  using Any = fsdp::AnyCommunicator<fsdp::host::Device>;
  auto const ordered = train<Counted>(true), unordered = train<Counted>(false);
  CHECK(unordered.waits > ordered.waits);
  CHECK(unordered.weights == ordered.weights);
  CHECK(ordered.weights.size() == 600);
  for (bool const in_order : {true, false}) {
    CAPTURE(in_order);
    auto const any = train<Any>(in_order);
    CHECK(any.waits == (in_order ? ordered : unordered).waits);
    CHECK(any.weights == ordered.weights);
  }
}
