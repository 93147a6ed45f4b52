// SPDX-License-Identifier: Apache-2.0
// Every event wait of the schedule over the CUDA device: with all of them nothing races, and without any one site
// ThreadSanitizer reports a race, however streams ran. Without the sanitizer: every case waits at its site, and delays
// change no bit.
//
// Each dropped site runs in a process of its own (this executable, told by an environment variable), which its first
// race ends.
// environment: FSDP_STANDIN_NO_FAVOURS=1 FSDP_STANDIN_DELAY_US=100
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/cuda.hpp"
#include "tests/catch.hpp"
#include "tests/schedule/wait_cases.hpp"
#include "tests/support/devices.hpp"

namespace {

using fsdp::WaitSite;
using schedule::Case;
using schedule::cases;

constexpr int raced = 66, never_waited = 3;

#if defined(__SANITIZE_THREAD__)
constexpr bool finds_races = true;
#else
constexpr bool finds_races = false;
#endif

/// Counts waits by site, and drops those at one of them. Copies share the counts.
struct Sited : fsdp::testing::Forward<fsdp::cuda::Device> {
  using Counts = std::array<std::atomic<std::int64_t>, static_cast<std::size_t>(WaitSite::count_)>;
  explicit Sited(WaitSite site = WaitSite::count_) : Forward{fsdp::cuda::Device{}}, dropped(site) {}

  void wait(Stream& stream, Event const& event, WaitSite at) const {
    (*counts)[static_cast<std::size_t>(at)].fetch_add(1, std::memory_order_relaxed);
    if (at != dropped) base.wait(stream, event, at);
  }
  std::int64_t waits_at(WaitSite site) const { return (*counts)[static_cast<std::size_t>(site)].load(); }

  WaitSite dropped;
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
};

std::vector<float> train(Case const& tested, Sited const& device) {
  auto what = schedule::small_run(tested);
  what.steps = 2;  // the second waits for all that the first has left
  return schedule::train(tested.engine, what, device);
}

/// The difference of two cases.
auto run_of(Case const& tested) {
  auto const run = schedule::small_run(tested);
  return std::tuple{tested.engine,         tested.prefetch, tested.setting,    tested.rounded,
                    run.options.keep_last, run.micro_steps, run.relative_clip, run.shape.hidden.size()};
}

bool equal_bits(std::vector<float> const& a, std::vector<float> const& b) {
  return !a.empty() && a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// @return how a process ends that trains without the waits at the case's site: `raced` at its first race
int run_without(std::size_t index) {
  ::setenv("TSAN_OPTIONS", "halt_on_error=1:exitcode=66:symbolize=0:log_path=/dev/null", 1);  // read as one begins
  return schedule::run_child_test(std::to_string(index)).code;
}

}  // namespace

TEST_CASE("child", "[.child]") {
  auto const* const value = std::getenv(schedule::child_variable);
  REQUIRE(value != nullptr);
  auto const& tested = cases.at(std::strtoul(value, nullptr, 10));
  Sited const device{tested.site};
  train(tested, device);
  std::exit(device.waits_at(tested.site) == 0 ? never_waited : 0);
}

TEST_CASE("with all waits in place nothing races, and each case comes to its site", "[standin][kept]") {
  std::map<decltype(run_of(cases[0])), Sited> runs;
  for (std::size_t index = 0; index < cases.size(); ++index) {
    auto const& tested = cases[index];
    INFO("case " << index << ", site " << fsdp::name(tested.site));
    auto const [run, is_new] = runs.try_emplace(run_of(tested));
    if (is_new) {
      auto const parameters = train(tested, run->second);
      if (!finds_races) CHECK(equal_bits(parameters, train(tested, Sited{})));
    }
    CHECK(run->second.waits_at(tested.site) > 0);
  }
}

TEST_CASE("each wait, when dropped, is a race", "[standin][dropped]") {
  if (!finds_races) return;
  for (std::size_t index = 0; index < cases.size(); ++index) {
    INFO("case " << index << ", site " << fsdp::name(cases[index].site));
    CHECK(run_without(index) == raced);
  }
}

TEST_CASE("a broadcast waits for its root's data, and what overwrites it for its readers", "[standin][kept]") {
  constexpr std::size_t count = 64;
  fsdp::local::run(2, Sited{}, [&](fsdp::local::Communicator<Sited>& comm) {
    auto stream = comm.device().make_stream("collectives", fsdp::StreamPriority::high);
    auto* const data = static_cast<float*>(comm.allocate(count * sizeof(float)));
    if (comm.rank() == 0) comm.device().zero_async(stream, data, count * sizeof(float));
    auto const ticket = comm.broadcast(stream, data, count, 0, fsdp::Label{"unit", "test"});
    std::vector<float> got(count, 1.0f);
    comm.device().copy_async(stream, got.data(), data, count * sizeof(float));
    comm.wait_for_peers(stream, ticket, WaitSite::none);
    comm.device().zero_async(stream, data, count * sizeof(float));
    comm.device().synchronize(stream);
    comm.deallocate(data, count * sizeof(float));
    if (got != std::vector<float>(count)) fsdp::fail<fsdp::Error>("rank {} got something else", comm.rank());
  });
}
