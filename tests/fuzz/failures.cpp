// SPDX-License-Identifier: Apache-2.0
// Random runs in which ranks fail: each ends with an error on every rank that says what happened, or goes on and is
// right. No run ends by a deadline, by a signal or in silence, and failures leave neither threads nor memory behind.
// links: fsdp_test_trial
// full-run: --runs=10000 --memory
// timeout: 3600
// skip-sanitizers
#include <fmt/format.h>
#include <malloc.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/fuzz/draw_scenario.hpp"
#include "tests/fuzz/rank.hpp"
#include "tests/fuzz/scenario.hpp"
#include "tests/support/seeds.hpp"
#include "tests/support/trial/compare.hpp"
#include "tests/support/trial/text.hpp"

namespace {

/// Memory that the calling thread may still take from its device; negative: any. Device memory is the only one that is
/// aligned and may fail without an exception.
thread_local int allocations_left = -1;

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  auto const step = static_cast<std::size_t>(alignment);
  void* const memory = std::aligned_alloc(step, (bytes + step - 1) / step * step);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, std::align_val_t alignment, std::nothrow_t const&) noexcept {
  if (allocations_left == 0) return nullptr;
  if (allocations_left > 0) --allocations_left;
  auto const step = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(step, (bytes + step - 1) / step * step);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace fuzz {
namespace {

/// The text for an exception that is no std::exception.
constexpr char const* nameless = "no std::exception";

/// How one rank ended.
struct End {
  bool failed = false, returned = false;
  bool ours = false;  ///< an fsdp::Error
  std::string text;
};

/// Makes the engine, and another one after a failure if that is planned. @return false if the rank returns early
bool run_plan(trial::Local world, Plan const& plan, trial::Outcome<float>& outcome) {
  auto const rank = world.rank();
  auto const once = [&](trial::Local comm, std::vector<Call> const& calls) {
    auto const trainer = trial::make_trainer(std::move(comm), plan.trial, plan.setting);
    if (!Rank(rank, plan, *trainer).run(calls)) return false;
    outcome = std::move(trainer->outcome());
    return true;
  };
  if (plan.afresh.empty()) return once(std::move(world), plan.calls);
  try {
    if (once(world.split(0, rank, "first"), plan.calls)) return true;
  } catch (Fault const&) {
  }
  return once(world.split(0, rank, "second"), plan.afresh);
}

/// Runs a scenario, whatever comes. @return how each rank ended
std::vector<End> run_ranks(Scenario const& scenario, trial::Outcomes& outcomes) {
  std::vector<End> ends(scenario.ranks.size());
  try {
    fsdp::local::run(static_cast<int>(ends.size()), fsdp::host::Device{}, [&](trial::Local comm) {
      auto const rank = comm.rank();
      auto const& plan = scenario.ranks[static_cast<std::size_t>(rank)];
      auto& end = ends[static_cast<std::size_t>(rank)];
      auto const failed = [&](bool ours, std::string const& text) {
        allocations_left = -1;
        end.failed = true;
        end.ours = ours;
        end.text = text;
      };
      try {
        if (plan.before == Trick::returns) {
          end.returned = true;
          return;
        }
        if (plan.before == Trick::outside) throw Fault(fault_text(rank, "the caller"));
        allocations_left = plan.allocations;
        end.returned = !run_plan(std::move(comm), plan, outcomes[static_cast<std::size_t>(rank)]);
      } catch (fsdp::Error const& error) {
        failed(true, error.what());
        throw;
      } catch (std::exception const& error) {
        failed(false, error.what());
        throw;
      } catch (...) {
        failed(false, nameless);
        throw;
      }
      allocations_left = -1;
    });
  } catch (...) {  // the ranks have noted theirs
  }
  return ends;
}

bool says(std::string const& text, std::string const& what) { return text.find(what) != std::string::npos; }

/// Errors in how the ranks ended; empty: none.
std::string judge(Scenario const& scenario, std::vector<End> const& ends, trial::Outcomes const& outcomes) {
  std::size_t failed = 0, returned = 0;
  for (auto const& end : ends) failed += end.failed, returned += end.returned;
  if (failed == 0 && returned == 0) {
    if (scenario.ending == Ending::errors) return "no rank noticed";
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      auto const& plan = scenario.ranks[rank];
      auto const text = far_from(reference_of(plan, outcomes[0].initial), static_cast<int>(rank), outcomes[rank]);
      if (!text.empty()) return text;
    }
    return {};
  }
  std::string silent;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    auto const& end = ends[rank];
    if (end.returned) continue;
    if (!end.failed) {
      silent += fmt::format("rank {} ended as if nothing had happened; ", rank);
      continue;
    }
    auto const own = says(end.text, fmt::format("fault of rank {}", rank)) || end.text == nameless;
    if (!own && !end.ours) silent += fmt::format("rank {} ends with an error that is not the library's; ", rank);
    bool named = scenario.causes.empty() && says(end.text, "rank ");
    for (auto const& cause : scenario.causes) named = named || says(end.text, cause);
    if (!named && !says(end.text, nameless)) silent += fmt::format("rank {} does not say why; ", rank);
  }
  if (scenario.ending == Ending::reference && failed > 0) silent += "it should have gone on; ";
  return silent;
}

std::string run_scenario(std::uint64_t seed) {
  auto const scenario = draw_scenario(seed);
  trial::Outcomes outcomes(scenario.ranks.size());
  auto const ends = run_ranks(scenario, outcomes);
  auto text = judge(scenario, ends, outcomes);
  if (text.empty()) return {};
  for (std::size_t rank = 0; rank < ends.size(); ++rank)
    text += fmt::format("\n    rank {}: {}", rank,
                        ends[rank].returned ? "returned early"
                        : ends[rank].failed ? ends[rank].text
                                            : "completed");
  return text;
}

/// Threads of this process; sanitizers have one of their own. A thread that was joined is listed until the kernel has
/// put it away: more than `usual` threads are counted again, for some seconds.
std::size_t threads(std::size_t usual) {
  std::size_t count = 0;
  for (int attempt = 0; attempt < 5000; ++attempt) {
    count = 0;
    for ([[maybe_unused]] auto const& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
    if (count <= usual) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return count;
}

/// Lets the same 200 runs fail over and over, and looks at the heap after pools have grown to what they need.
/// @return what 1,000 failures have left on it, if that is more than an eighth of an event's flag each: the smallest
/// thing that a failure could leave
std::string memory_growth() {
  std::vector<std::uint64_t> failing;
  for (std::uint64_t seed = 0; failing.size() < 200; ++seed)
    if (draw_scenario(seed).ending == Ending::errors) failing.push_back(seed);
  constexpr std::size_t warm = 6, times = 5;
  std::size_t before = 0;
  for (std::size_t time = 0; time < warm + times; ++time) {
    if (time == warm) before = ::mallinfo2().uordblks;
    for (auto const seed : failing) static_cast<void>(run_scenario(seed));
  }
  auto const after = ::mallinfo2().uordblks;
  auto const failures = failing.size() * times;
  fmt::print("heap: {} bytes in use, {} after {} more failures\n", before, after, failures);
  if (after <= before + failures * sizeof(fsdp::host::detail::EventState) / 8) return {};
  return fmt::format("{} failures left {} bytes", failures, after - before);
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  fsdp::testing::Seeds seeds{.count = 250};
  std::int64_t deadline = 3600;  // a machine may stop for minutes; `each_seed` ends what does not go on
  bool memory = false;
  for (int i = 1; i < argc; ++i) {
    std::string const option = argv[i];
    auto const value = std::strtoull(option.c_str() + std::min(option.size(), option.find('=') + 1), nullptr, 10);
    if (option.starts_with("--runs=")) {
      seeds.count = value;
    } else if (option.starts_with("--first=")) {
      seeds.first = value;
    } else if (option.starts_with("--seed=")) {
      seeds.first = value, seeds.count = 1;
      fmt::print("{}", fuzz::describe(fuzz::draw_scenario(value)));
    } else if (option == "--memory") {
      memory = true;
    } else if (option.starts_with("--deadline=")) {
      deadline = static_cast<std::int64_t>(value);
    } else {
      fmt::print(stderr, "usage: {} [--runs=N] [--first=S] [--seed=S] [--deadline=SECONDS] [--memory]\n", argv[0]);
      return 2;
    }
  }
  fsdp::host::set_wait_deadline(std::chrono::seconds{deadline});
  auto const run = [](std::uint64_t seed) {
    static std::size_t const usual = fuzz::threads(std::numeric_limits<std::size_t>::max());
    auto text = fuzz::run_scenario(seed);
    auto const threads = fuzz::threads(usual);
    if (text.empty() && threads > usual) text = fmt::format("{} threads, {} before", threads, usual);
    return text;
  };
  auto failed = each_seed(seeds, run, [](std::uint64_t seed, std::string const& text) {
    fmt::print("seed {} '{}': {}\n", seed, fuzz::draw_scenario(seed).name, text);
  });
  fmt::print("{} of {} runs failed\n", failed, seeds.count);
  if (memory)
    failed += each_seed(
        fsdp::testing::Seeds{.limit_s = 1200}, [](std::uint64_t) { return fuzz::memory_growth(); },
        [](std::uint64_t, std::string const& text) { fmt::print("memory: {}\n", text); });
  return failed == 0 ? 0 : 1;
}
