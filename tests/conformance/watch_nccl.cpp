// SPDX-License-Identifier: Apache-2.0
// The watch over an NCCL communicator: what it says and how it ends the process. Needs NCCL's library, but no GPU.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "fsdp/detail/nccl/watch.hpp"
#include "tests/catch.hpp"
#include "tests/support/in_child.hpp"

namespace {

using fsdp::comm::CallDescription;
using fsdp::comm::Collective;
using fsdp::nccl::Watch;
using fsdp::testing::in_child;
using std::chrono::milliseconds;

bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

CallDescription operation() {
  return CallDescription::collective(Collective::all_gather, 1024, fsdp::DType::bf16, 0, {"block.3", "backward"})
      .numbered(57);
}

}  // namespace

TEST_CASE("a wait that misses its deadline is reported and ends the process", "[nccl]") {
  auto const outcome = in_child([] {
    Watch watch("rank 2 of 8 (cuda:2)", 2, milliseconds(200));
    Watch::Phase const phase(&watch, operation());
    std::this_thread::sleep_for(std::chrono::minutes(5));
  });
  CHECK(outcome.code == fsdp::host::wait_expired_exit_code);
  for (auto const* part :
       {"rank 2 of 8 (cuda:2): waiting in all_gather 57 of 1024 bf16 for unit 'block.3' (backward), for ",
        " s, since 2", "Z; giving up"}) {
    INFO(outcome.text);
    CHECK(contains(outcome.text, part));
  }
}

TEST_CASE("a request to terminate during a wait is reported and ends the process", "[nccl]") {
  auto const outcome = in_child([] {
    Watch watch("rank 0 of 2 (cuda:0)", 0, std::chrono::minutes(5));
    fsdp::host::request_termination();
    std::this_thread::sleep_for(milliseconds(300));  // nothing is awaited: the watch leaves the process alone
    Watch::Phase const phase(&watch, operation());
    std::this_thread::sleep_for(std::chrono::minutes(5));
  });
  CHECK(outcome.code == fsdp::host::wait_terminated_exit_code);
  CHECK(contains(outcome.text, "asked to terminate"));
}

TEST_CASE("a wait that ends in time leaves no trace", "[nccl]") {
  auto const outcome = in_child([] {
    Watch watch("rank 0 of 2 (cuda:0)", 0, milliseconds(2000));
    for (int i = 0; i < 4; ++i) {
      Watch::Phase const outer(&watch, {.call = "the outer wait"});
      Watch::Phase const inner(&watch, operation());
      Watch::Phase const unwatched(nullptr, operation());
      if (!contains(watch.pending(), "all_gather 57")) std::_Exit(3);
      std::this_thread::sleep_for(milliseconds(600));
    }
    if (!watch.pending().empty()) std::_Exit(4);
    std::this_thread::sleep_for(milliseconds(400));
  });
  CHECK(outcome.code == 0);
  CHECK(outcome.text == "");
}
