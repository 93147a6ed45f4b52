// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of this process, on the host.
#include "fsdp/local.hpp"

#include <atomic>
#include <utility>

#include "fsdp/host.hpp"
#include "run.hpp"
#include "run_rank.hpp"

namespace bench {

int run_local(Settings const& settings) {
  std::atomic<int> code{0};
  fsdp::local::run(settings.ranks, fsdp::host::Device{}, [&](fsdp::local::Communicator<fsdp::host::Device> comm) {
    if (int const own = run_rank<NoVendor>(std::move(comm), settings, "host"); own != 0) code = own;
  });
  return code;
}

}  // namespace bench
