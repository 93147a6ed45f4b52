// SPDX-License-Identifier: Apache-2.0
// nccl::Communicator over four processes, on as many GPUs as there are, down to one. Correctness only: ranks that share
// a GPU are slow.
// timeout: 470
#include "fsdp/nccl.hpp"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "tests/conformance/communicator_suite.hpp"
#include "tests/conformance/gpu.hpp"

namespace {

using fsdp::bootstrap::Environment;
using fsdp::bootstrap::TcpGroup;
using fsdp::conformance::expect;

constexpr int world_size = 4;
bool const ready = fsdp::testing::need_ranks(world_size);

/// All processes of this program; serves the tests themselves.
TcpGroup& world() {
  static TcpGroup group(Environment::read(), std::chrono::minutes(5));
  return group;
}
fsdp::cuda::Device own_device() {
  static int const ordinal = Environment::read().local_rank;
  return fsdp::cuda::Device(ordinal);
}
fsdp::nccl::Options options() {
  fsdp::nccl::Options result;
  result.timeout = std::chrono::minutes(2);
  result.check_order = true;
  return result;
}

/// Runs `body` on the first ranks; every process throws if any rank did.
template <class Body>
void on_first(int ranks, Body const& body) {
  std::exception_ptr error;
  std::string what;
  if (world().rank() < ranks) {
    try {
      body();
    } catch (std::exception const& caught) {
      error = std::current_exception();
      what = caught.what();
    }
  }
  auto const outcomes = world().exchange(what, "outcomes");
  if (error != nullptr) std::rethrow_exception(error);
  for (int rank = 0; rank < ranks; ++rank) {
    auto const& text = outcomes[static_cast<std::size_t>(rank)];
    expect(text.empty(), "on rank {}: {}", rank, text);
  }
}

struct FromEnvironment {
  using Communicator = fsdp::nccl::Communicator;
  static constexpr bool fixed_tree = false;
  static constexpr bool reports_order = true;
  static constexpr bool reports_peers = false;  // a rank that waits for a lost peer ends its process
  static std::vector<int> sizes() { return {1, 2, 4}; }
  template <class Body>
  static void run(int ranks, Body const& body) {
    auto const own = world().rank() == 0 ? fsdp::bootstrap::listen_on("127.0.0.1", 0).local_port() : 0;
    auto const port = world().exchange(std::to_string(own), "port").front();
    auto const saved = Environment::read();
    on_first(ranks, [&] {
      ::setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
      ::setenv("MASTER_PORT", port.c_str(), 1);
      auto comm = Communicator::from_environment(own_device(), options());
      body(comm);
    });
    ::setenv("WORLD_SIZE", std::to_string(saved.size).c_str(), 1);
  }
};

/// The identifier passes through another control plane, and texts through device memory.
struct FromControl : FromEnvironment {
  static std::vector<int> sizes() { return {2, 3}; }
  template <class Body>
  static void run(int ranks, Body const& body) {
    auto group = world().split(world().rank() < ranks ? 0 : 1, world().rank(), "first");
    on_first(ranks, [&] {
      auto comm = Communicator::from(group, own_device(), options());
      body(comm);
    });
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("nccl, from the environment", FromEnvironment);
FSDP_COMMUNICATOR_SUITE("nccl, from another control plane", FromControl);

TEST_CASE("nccl: the caller's communicator and stream are adopted, and survive", "[communicator]") {
  FromControl::run(2, [](fsdp::nccl::Communicator& owner) {
    auto const& device = owner.device();
    device.make_current();
    cudaStream_t raw = nullptr;
    FSDP_CUDA_CHECK(cudaStreamCreateWithFlags(&raw, cudaStreamNonBlocking));
    float* data = nullptr;
    FSDP_CUDA_CHECK(cudaMalloc(&data, 64 * sizeof(float)));
    auto stream = fsdp::cuda::Stream::adopt(raw);
    fsdp::conformance::upload(device, stream, data, std::vector<float>(64, 1.5f));
    {
      auto adopted = fsdp::nccl::Communicator::adopt(owner.get(), options());
      expect(adopted.rank() == owner.rank() && adopted.size() == owner.size() && adopted.device() == device,
             "identity");
      adopted.all_reduce(stream, static_cast<float const*>(data), data, 64, {"unit", "test"});
      auto alone = adopted.split(adopted.rank(), 0, "alone");
      expect(alone.size() == 1 && alone.exchange("alone", "test").size() == 1, "split of an adopted communicator");
      device.synchronize(stream);
      expect(adopted.pending().empty(), "pending: {}", adopted.pending());
    }
    auto const got = fsdp::conformance::download(device, stream, data, 64);
    fsdp::conformance::expect_equal(got, std::vector<float>(64, 3.0f), "all_reduce on an adopted communicator");
    owner.all_reduce(stream, static_cast<float const*>(data), data, 64, {"unit", "test"});
    fsdp::conformance::expect_equal(fsdp::conformance::download(device, stream, data, 64), std::vector<float>(64, 6.0f),
                                    "all_reduce on the owner, afterwards");
    FSDP_CUDA_CHECK(cudaFree(data));
    FSDP_CUDA_CHECK(cudaStreamDestroy(raw));
  });
}

TEST_CASE("nccl: a communicator that was moved from says so, and can be destroyed and assigned to", "[communicator]") {
  FromControl::run(2, [](fsdp::nccl::Communicator& owner) {
    auto part = owner.split(0, owner.rank(), "part");
    auto moved = std::move(part);
    auto const refused = [&](auto const& call) {
      auto const text = fsdp::conformance::expect_throws<fsdp::UsageError>("a call after a move", call);
      expect(text.find("moved from") != std::string::npos, "another reason: {}", text);
    };
    refused([&] { static_cast<void>(part.rank()); });
    refused([&] { static_cast<void>(part.exchange({}, "test")); });
    refused([&] { static_cast<void>(part.split(0, 0, "again")); });
    part.deallocate(nullptr, 0);
    part = std::move(moved);
    expect(part.exchange({}, "moved back").size() == 2, "a communicator that came back");
    moved = std::move(part);
  });
}

TEST_CASE("nccl: symmetric memory works or is refused, never silently dropped", "[communicator]") {
  auto group = world().split(world().rank() < 2 ? 0 : 1, world().rank(), "first");
  on_first(2, [&] {
    auto symmetric = options();
    symmetric.symmetric_memory = true;
    auto comm = fsdp::nccl::Communicator::from(group, own_device(), symmetric);
    auto stream = comm.device().make_stream("symmetric");
    void* const memory = comm.allocate(5000 * sizeof(float));
    try {
      comm.register_memory(memory, 5000 * sizeof(float));
    } catch (fsdp::ConfigError const&) {
      comm.deallocate(memory, 5000 * sizeof(float));
      return;  // refused, on every rank
    }
    auto* const data = static_cast<float*>(memory);
    fsdp::conformance::upload(comm.device(), stream, data, std::vector<float>(5000, 2.0f));
    comm.all_reduce(stream, static_cast<float const*>(data), data, 5000, {"unit", "test"});
    fsdp::conformance::expect_equal(fsdp::conformance::download(comm.device(), stream, data, 5000),
                                    std::vector<float>(5000, 4.0f), "all_reduce in symmetric memory");
    {
      auto part = comm.split(0, comm.rank(), "part");
      auto collectives = comm.device().make_stream("part");
      part.register_memory(memory, 5000 * sizeof(float));
      part.all_reduce(collectives, static_cast<float const*>(data), data, 5000, {"unit", "test"});
      fsdp::conformance::expect_equal(fsdp::conformance::download(comm.device(), collectives, data, 5000),
                                      std::vector<float>(5000, 8.0f), "all_reduce of a part in symmetric memory");
    }
    comm.deallocate(memory, 5000 * sizeof(float));
  });
}
