// SPDX-License-Identifier: Apache-2.0
// Every event wait of the schedule is needed: with any one site dropped, training goes wrong or ThreadSanitizer reports
// a race.
// skip-asan
//
// Each site runs in a child process of its own (this executable, told by an environment variable), because a race may
// do anything.
// long
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/catch.hpp"
#include "tests/support/devices.hpp"
#include "tests/support/local_run.hpp"

namespace {

using fsdp::WaitSite;
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
  std::shared_ptr<fsdp::testing::Draws> draws;
  std::int64_t limit = 0;
  std::string_view slow_stream = "none";
  bool uneven = false;
};
using Device = fsdp::testing::DropDevice<Lagging>;

#if defined(__SANITIZE_THREAD__)
constexpr bool finds_races = true;
#else
constexpr bool finds_races = false;
#endif

enum class Engine { full, hybrid, replicated, mixed, mixed_hybrid };

struct Case {
  WaitSite site;
  int prefetch;
  Engine engine;
  bool race_alone = false;  // values hardly ever show it: ThreadSanitizer must
  toy::Setting setting = toy::Setting::none;
  bool rounded = false;  // gradients travel in bf16, from wire buffers
};

// Where a site is implied by another in one configuration (gather_peers_read with two slots: a peer's next all-gather
// has begun), it is tested in one where it is not.
std::vector<Case> const cases{
    {WaitSite::compute_unsharded, 1, Engine::full},
    {WaitSite::compute_gradient_slot, 1, Engine::full},
    {WaitSite::gather_slot_read, 0, Engine::full},
    {WaitSite::gather_peers_read, 0, Engine::full},
    {WaitSite::gather_updated, 1, Engine::full},
    {WaitSite::gather_kept_slice, 2, Engine::full},
    {WaitSite::reduce_gradients, 1, Engine::full},
    {WaitSite::reduce_peers_read, 1, Engine::full},
    {WaitSite::reduce_partial_read, 1, Engine::hybrid},
    {WaitSite::replicate_scattered, 1, Engine::hybrid},
    {WaitSite::replicate_peers_read, 1, Engine::replicated},
    {WaitSite::replicate_scatter_peers, 1, Engine::hybrid, true},
    {WaitSite::optimizer_reduced, 1, Engine::full},
    {WaitSite::norm_peers_read, 1, Engine::full, true},
    {WaitSite::collective_peer_ready, 1, Engine::full},
    {WaitSite::collective_peer_partial, 1, Engine::replicated},
    // Units that differ: a replicated block between others that shard, one of which may stay until backward.
    {WaitSite::compute_unsharded, 1, Engine::mixed},
    {WaitSite::compute_gradient_slot, 1, Engine::mixed},
    {WaitSite::gather_slot_read, 0, Engine::mixed},
    {WaitSite::gather_peers_read, 0, Engine::mixed},
    {WaitSite::gather_updated, 1, Engine::mixed},
    {WaitSite::reduce_gradients, 1, Engine::mixed},
    {WaitSite::reduce_peers_read, 1, Engine::mixed},
    {WaitSite::reduce_partial_read, 1, Engine::mixed_hybrid},
    {WaitSite::replicate_scattered, 1, Engine::mixed_hybrid},
    {WaitSite::replicate_peers_read, 1, Engine::mixed},
    {WaitSite::replicate_scatter_peers, 1, Engine::mixed_hybrid, true},
    {WaitSite::optimizer_reduced, 1, Engine::mixed},
    {WaitSite::norm_peers_read, 1, Engine::mixed, true},
    {WaitSite::collective_peer_ready, 1, Engine::mixed},
    {WaitSite::collective_peer_partial, 1, Engine::mixed},
    // Where nothing is zeroed, the same waits keep a slot from its next writer.
    {WaitSite::compute_gradient_slot, 1, Engine::full, false, toy::Setting::every},
    {WaitSite::reduce_peers_read, 1, Engine::full, false, toy::Setting::every},
    // Where gradients travel from wire buffers, the waits for peers keep those from their next content.
    {WaitSite::compute_gradient_slot, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_gradients, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_peers_read, 1, Engine::full, false, toy::Setting::none, true},
    {WaitSite::reduce_wire_read, 1, Engine::hybrid, false, toy::Setting::none, true},
    {WaitSite::reduce_wire_read, 1, Engine::mixed_hybrid, false, toy::Setting::none, true},
    {WaitSite::replicate_scattered, 1, Engine::hybrid, false, toy::Setting::none, true},
    {WaitSite::replicate_scatter_peers, 1, Engine::hybrid, true, toy::Setting::none, true},
    {WaitSite::replicate_peers_read, 1, Engine::hybrid, true, toy::Setting::none, true},
    {WaitSite::replicate_peers_read, 1, Engine::replicated, false, toy::Setting::none, true},
    {WaitSite::optimizer_reduced, 1, Engine::full, false, toy::Setting::none, true},
};

toy::Run small_run(Case const& tested) {
  toy::Run run;
  run.steps = 4;
  run.shard_group = 2;
  run.options.prefetch = tested.prefetch;
  run.options.bucket_bytes = 2048;
  run.options.first_bucket_bytes = 512;
  run.shape.hidden = {17, 17, 17};
  run.shape.setting = tested.setting;
  if (tested.rounded) run.options.reduce_dtype = fsdp::DType::bf16;
  if (tested.site == WaitSite::gather_kept_slice) {
    // Three slots: backward gathers the last block into the one that the first block has left, which says nothing of
    // the last block's copy.
    run.options.reshard_ranks = 2;
    run.options.keep_last = false;
  }
  if (tested.site == WaitSite::reduce_partial_read) {
    // Every micro-step all-reduces: the next one adds to the same partial shards, with no optimizer step between.
    run.options.no_replica_sync = true;
    run.micro_steps = 3;
  }
  if (tested.rounded && tested.site == WaitSite::replicate_scatter_peers) {
    // One unit alone has one wire buffer, which the next micro-step writes with no optimizer step between. With two
    // buffers the next unit's reduce-scatter says that peers have read this one's.
    run.shape.hidden.clear();
    run.micro_steps = 3;
  }
  return run;
}

std::vector<float> train(Engine engine, toy::Run run, Device const& device) {
  fsdp::HybridShard<> const hybrid{.group = 2};
  if (engine == Engine::mixed || engine == Engine::mixed_hybrid) {
    run.shape.hidden.resize(5, run.shape.hidden[0]);  // so many that those that take buffers in turn do so
    run.shape.strategies = {{}, {}, fsdp::NoShard{}};
  }
  if (engine == Engine::mixed) run.shape.strategies.push_back(fsdp::ShardGradOp{});
  if (engine == Engine::hybrid || engine == Engine::mixed_hybrid) return toy::train_local(hybrid, 4, run, device);
  if (engine == Engine::replicated) return toy::train_local(fsdp::NoShard{}, 4, run, device);
  return toy::train_local(fsdp::FullShard{}, 4, run, device);
}

/// Trains with the site dropped, with delayed workers and every fourth time with a lagging host; where nothing is
/// noticed, again with longer delays, up to seven times as long: on a busy machine short ones drown. @return 0 if
/// nothing was noticed, 1 if the result differs, 3 if the site was never reached
int child(Case const& tested, bool drop) {
  auto run = small_run(tested);
  run.relative_clip =
      tested.site == WaitSite::norm_peers_read;  // otherwise implied: the next gradients wait for all ranks
  if (run.relative_clip) run.clip = 0.5f;
  auto const expected = train(tested.engine, run, Device{});
  for (std::uint64_t seed = 1; seed <= (drop ? 56u : 8u); ++seed) {
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

constexpr char const* variable = "FSDP_TEST_DROP";

int run_in_child(std::size_t index, bool drop) {
  auto const process = fork();
  if (process == 0) {
    auto const value = std::to_string(index) + (drop ? " drop" : " keep");
    setenv(variable, value.c_str(), 1);
    execl("/proc/self/exe", "waits", "[.child]", static_cast<char*>(nullptr));
    _exit(99);
  }
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("child", "[.child]") {
  auto const* const value = std::getenv(variable);
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
  for (std::size_t index = 0; index < cases.size(); ++index) {
    INFO("case " << index << ", site " << fsdp::name(cases[index].site));
    CHECK(run_in_child(index, false) == 0);
  }
}

TEST_CASE("each wait, when dropped, is noticed") {
  for (std::size_t index = 0; index < cases.size(); ++index) {
    INFO("case " << index << ", site " << fsdp::name(cases[index].site));
    if (cases[index].race_alone && !finds_races) continue;
    auto const code = run_in_child(index, true);
    CHECK(code != 0);
    CHECK(code != 3);
    CHECK(code != 99);
  }
}
