// SPDX-License-Identifier: Apache-2.0
// local::Communicator over CUDA: ranks are threads, dealt round over the GPUs that there are, down to one.
// timeout: 470
#include "fsdp/cuda.hpp"
#include "fsdp/local.hpp"
#include "tests/conformance/communicator_suite.hpp"
#include "tests/conformance/gpu.hpp"

namespace {

bool const ready = fsdp::testing::need_gpu();

struct LocalCuda {
  using Communicator = fsdp::local::Communicator<fsdp::cuda::Device>;
  static constexpr bool fixed_tree = true;
  static constexpr bool reports_order = true;
  static constexpr bool reports_peers = true;
#if defined(FSDP_CUDA_STANDIN)  // local_host.cpp has the other sizes
  static std::vector<int> sizes() { return {1, 3, 4}; }
#else
  static std::vector<int> sizes() { return {1, 2, 3, 4, 7}; }
#endif
  template <class Body>
  static void run(int ranks, Body const& body) {
    fsdp::local::run(
        ranks, [](int rank) { return fsdp::cuda::Device(rank % fsdp::cuda::device_count()); },
        [&](Communicator& comm) { body(comm); });
  }
};

}  // namespace

FSDP_COMMUNICATOR_SUITE("local<cuda>", LocalCuda);
