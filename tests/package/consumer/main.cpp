// SPDX-License-Identifier: Apache-2.0
// Sums the ranks' numbers over three threads.
#include <cstdio>

#include <fsdp/fsdp.hpp>
#include <fsdp/host.hpp>
#include <fsdp/local.hpp>

int core_answer();

int main() {
  using Comm = fsdp::local::Communicator<fsdp::host::Device>;
  fsdp::local::run(core_answer(), fsdp::host::Device{}, [](Comm comm) {
    auto stream = comm.device().make_stream("sum");
    auto* const value = static_cast<float*>(comm.allocate(sizeof(float)));
    *value = static_cast<float>(comm.rank() + 1);
    comm.all_reduce(stream, value, value, 1, fsdp::Label{"numbers", "sum"});
    comm.device().synchronize(stream);
    if (comm.rank() == 0) std::printf("sum %g\n", static_cast<double>(*value));
    comm.exchange({}, "done");
    comm.deallocate(value, sizeof(float));
  });
}
