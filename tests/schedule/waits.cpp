// SPDX-License-Identifier: Apache-2.0
// Every event wait of the schedule is needed: with any one site dropped, training goes wrong or ThreadSanitizer reports
// a race. Under ThreadSanitizer each site is dropped in one engine; in all engines, and by values alone, with the label
// `full`. recorded.cpp drops every single wait, in a record of what was done.
// skip-asan
// full-run: [waits]
//
// Each site runs in a child process of its own (this executable, told by an environment variable), because a race may
// do anything.
// long
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/catch.hpp"
#include "tests/schedule/wait_cases.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/sanitized.hpp"

namespace {

using fsdp::WaitSite;
using fsdp::testing::ChildOutcome;
using schedule::cases;
using schedule::small_run;
using schedule::train;
using Delayed = fsdp::testing::DelayDevice<fsdp::host::Device>;

/// Lets the host thread lag behind its streams: sleeps, by seed, before it enqueues a kernel. Or lets one stream lag
/// behind all others: its kernels begin with a sleep, of the same length on every rank, or uneven.
struct Lagging : fsdp::testing::Forward<Delayed> {
  Lagging() = default;
  Lagging(Delayed device, std::uint64_t seed, std::int64_t at_most)
      : Forward{std::move(device)}, draws(std::make_shared<fsdp::testing::Draws>(seed)), limit(at_most) {}
  template <class Kernel, class... Args>
  void launch(Stream& stream, std::int64_t blocks, Kernel kernel, Args... args) const {
    if (limit > 0) std::this_thread::sleep_for(std::chrono::microseconds((*draws)(limit)));
    if (stream.name() == slow_stream) fsdp::testing::delay(base.base, stream, uneven ? (*draws)(6000) : 3000);
    base.launch(stream, blocks, kernel, args...);
  }
  void copy_async(Stream& stream, void* to, void const* from, std::size_t bytes) const {
    if (stream.name() == slow_copies) fsdp::testing::delay(base.base, stream, (*draws)(6000));
    base.copy_async(stream, to, from, bytes);
  }
  std::shared_ptr<fsdp::testing::Draws> draws;
  std::int64_t limit = 0;
  std::string_view slow_stream = "none", slow_copies = "none";
  bool uneven = false;
};
using Device = fsdp::testing::DropDevice<Lagging>;

constexpr bool finds_races = fsdp::testing::has_thread_sanitizer;

/// Trains with the site dropped, with delayed workers and every fourth time with a lagging host; where nothing is
/// noticed, again with longer delays, up to seven times as long: on a busy machine short ones drown. @return 0 if
/// nothing was noticed, 1 if the result differs, 3 if the site was never reached
int child(schedule::Case const& tested, bool drop) {
  auto const run = small_run(tested);
  auto const expected = train(tested.engine, run, Device{});
  // ThreadSanitizer sees a race whoever is late; values show it only when somebody is.
  for (std::uint64_t seed = 1; seed <= (drop ? 56u : finds_races ? 4u : 8u); ++seed) {
    bool const lag = seed % 4 == 0;
    auto const times = static_cast<std::int64_t>(1 + (seed - 1) / 8);
    auto device = Device{Lagging{Delayed{{}, seed, lag ? 0 : 300 * times}, seed, lag ? 100 * times : 0},
                         drop ? tested.site : WaitSite::count_};
    // The next micro-step's sums must catch up with the last one's all-reduces.
    if (tested.site == WaitSite::reduce_partial_read) device.base.slow_stream = "replicate";
    // The next units' gradients must catch up with the all-reduces of those that were in the wire buffer before.
    if (tested.site == WaitSite::reduce_wire_read) device.base.slow_stream = "replicate";
    // The slot's next writer is compute, two units later: it must be there first, and ranks must read at other times.
    if (tested.setting != toy::Setting::none || (tested.rounded && tested.site == WaitSite::compute_gradient_slot)) {
      device.base.slow_stream = "reduce";
      device.base.uneven = true;
    }
    // The next pass's gradients must catch up with peers that copy this rank's part of the mean.
    if (tested.site == WaitSite::replicate_peers_read && !tested.rounded) {
      device.base.slow_copies = "replicate";
      device.base.base.limit = 0;
    }
    std::vector<float> got;
    try {
      got = train(tested.engine, run, device);
    } catch (std::exception const&) {
      return 1;
    }
    if (drop && device.drops->load() == 0) return 3;
    if (got.size() != expected.size() || std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)) != 0)
      return 1;
  }
  return 0;
}

ChildOutcome run_in_child(std::size_t index, bool drop) {
  return schedule::run_child_test(std::to_string(index) + (drop ? " drop" : " keep"));
}

/// Whether two cases train alike while no wait is dropped. See small_run() and child().
bool train_alike(schedule::Case const& one, schedule::Case const& other) {
  auto const is_special = [](WaitSite site) {
    return site == WaitSite::gather_kept_slice || site == WaitSite::reduce_partial_read ||
           site == WaitSite::replicate_peers_read || site == WaitSite::norm_peers_read ||
           site == WaitSite::reduce_wire_read;
  };
  auto const key = [&](schedule::Case const& of) {
    return std::tuple(of.engine, of.prefetch, of.setting, of.rounded, is_special(of.site) ? of.site : WaitSite::none);
  };
  return key(one) == key(other);
}

std::vector<std::size_t> first_of_each_site() {
  std::vector<std::size_t> found;
  std::set<WaitSite> sites;
  for (std::size_t index = 0; index < cases.size(); ++index)
    if (sites.insert(cases[index].site).second) found.push_back(index);
  return found;
}

void check_kept(std::size_t index) {
  INFO("case " << index << ", site " << fsdp::name(cases[index].site));
  auto const outcome = run_in_child(index, false);
  INFO(outcome.text);
  CHECK(outcome.code == 0);
}

void check_dropped(std::size_t index) {
  INFO("case " << index << ", site " << fsdp::name(cases[index].site));
  auto const code = run_in_child(index, true).code;
  CHECK(code != 0);
  CHECK(code != 3);
  CHECK(code != 99);
}

}  // namespace

TEST_CASE("child", "[.child]") {
  auto const* const value = std::getenv(schedule::child_variable);
  REQUIRE(value != nullptr);
  char* rest = nullptr;
  auto const index = static_cast<std::size_t>(std::strtoul(value, &rest, 10));
  std::exit(child(cases.at(index), std::strcmp(rest, " drop") == 0));
}

TEST_CASE("every wait site of the schedule is listed") {
  std::vector<int> seen(static_cast<std::size_t>(WaitSite::count_), 0);
  for (auto const& tested : cases) ++seen[static_cast<std::size_t>(tested.site)];
  for (std::size_t site = 1; site < seen.size(); ++site) {
    INFO(fsdp::wait_site_names[site]);
    CHECK(seen[site] >= 1);
  }
}

TEST_CASE("with all waits in place, delays change nothing") {
  std::vector<std::size_t> kept;
  for (auto const index : first_of_each_site()) {
    if (std::any_of(kept.begin(), kept.end(), [&](auto other) { return train_alike(cases[index], cases[other]); }))
      continue;
    kept.push_back(index);
    check_kept(index);
  }
}

TEST_CASE("each wait, when dropped, is a race") {
  if (!finds_races) return;
  for (auto const index : first_of_each_site()) check_dropped(index);
}

TEST_CASE("each wait, when dropped, is noticed in each engine that needs it", "[.][waits]") {
  for (std::size_t index = 0; index < cases.size(); ++index) {
    check_kept(index);
    if (!cases[index].race_alone || finds_races) check_dropped(index);
  }
}
