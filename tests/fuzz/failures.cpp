// SPDX-License-Identifier: Apache-2.0
// Random runs in which ranks fail: each ends with an error on every rank that says what happened, or goes on and is
// right. No run ends by a deadline, by a signal or in silence, and failures leave neither threads nor memory behind.
// links: fsdp_test_trainers
// full-run: --runs=10000 --memory
// timeout: 3600
// skip-sanitizers
#include <malloc.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/fuzz/draw_scenario.hpp"
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

using trial::Inside;

/// What user code throws in these runs.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A call that should have been refused, or a module that should have been run, was not.
struct Unexpected : std::logic_error {
  using std::logic_error::logic_error;
};

/// How one rank ended.
struct End {
  bool failed = false, returned = false;
  bool ours = false;  ///< an fsdp::Error
  std::string text;
};

void throw_fault(Trick trick, std::string const& text) {
  if (trick == Trick::throws_other) throw 42;
  throw Fault(text);
}

class Rank {
 public:
  Rank(int rank, Plan const& plan, trial::Trainer& trainer)
      : rank_(rank), plan_(&plan), trainer_(&trainer), delays_(static_cast<std::uint64_t>(rank)) {}

  /// @return false if the rank returns early
  bool run(std::vector<Call> const& calls) {
    trainer_->begin();
    for (std::size_t at = 0; at < calls.size(); ++at) {
      auto const& call = calls[at];
      dawdle();
      if (call.trick == Trick::returns) return false;
      if (call.trick == Trick::outside) throw Fault(fault_text(rank_, "the caller"));
      if (call.trick == Trick::refused) {
        refuse(call.op);
      } else if (call.caught) {
        catching(call, at);
      } else {
        trainer_->run(call.op, inside(call, at));
      }
    }
    trainer_->end(plan_->end == Trick::none ? Inside() : Inside([this](fsdp::host::Stream&) {
      throw_fault(plan_->end, fault_text(rank_, "the reader"));
    }));
    return true;
  }

 private:
  void refuse(Op const& op) {
    try {
      trainer_->run(op);
    } catch (fsdp::PeerError const&) {
      throw;
    } catch (fsdp::Error const&) {
      return;
    }
    throw Unexpected("was not refused: " + literal(op));
  }
  void catching(Call const& call, std::size_t at) {
    try {
      trainer_->run(call.op, inside(call, at));
    } catch (Fault const&) {
      return;
    } catch (int) {
      return;
    }
    throw Unexpected("ran without its fault: " + literal(call.op));
  }
  void dawdle() {
    if (plan_->delay_us > 0)
      std::this_thread::sleep_for(std::chrono::microseconds{delays_.between(0, plan_->delay_us)});
  }
  /// In one of the modules that the call runs.
  Inside inside(Call const& call, std::size_t at) {
    if (call.trick == Trick::none) {
      if (plan_->delay_us == 0) return {};
      return [this](fsdp::host::Stream& stream) {
        stream.enqueue([span = std::chrono::microseconds{delays_.between(0, plan_->delay_us)}] {
          std::this_thread::sleep_for(span);
        });
      };
    }
    auto const parts = plan_->trial.model.parts.size();
    auto const turn = call.op.to == Op::all ? at % parts : 0;
    auto const text = fault_text(rank_, plan_->trial.model.parts[call.op.from + turn].prefix);
    return [this, &call, turn, text, calls = std::size_t{}](fsdp::host::Stream& stream) mutable {
      if (calls++ != turn) return;
      switch (call.trick) {
        case Trick::task: stream.enqueue([text] { throw Fault(text); }); break;
        case Trick::task_waits:
          stream.enqueue([text] { throw Fault(text); });
          stream.synchronize();
          break;
        case Trick::gather_task: trainer_->gather().enqueue([text] { throw Fault(text); }); break;
        case Trick::nested: refuse(call.other); break;
        default: throw_fault(call.trick, text); break;
      }
    };
  }

  int rank_;
  Plan const* plan_;
  trial::Trainer* trainer_;
  trial::Draw delays_;
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
        failed(false, "no std::exception");
        throw;
      }
      allocations_left = -1;
    });
  } catch (...) {  // the ranks have noted theirs
  }
  return ends;
}

bool says(std::string const& text, std::string const& what) { return text.find(what) != std::string::npos; }

/// What is wrong with how the ranks ended; empty: nothing.
std::string judge(Scenario const& scenario, std::vector<End> const& ends, trial::Outcomes const& outcomes) {
  std::size_t failed = 0, returned = 0;
  for (auto const& end : ends) failed += end.failed, returned += end.returned;
  if (failed == 0 && returned == 0) {
    if (scenario.ending == Ending::errors) return "no rank noticed";
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      auto const& plan = scenario.ranks[rank];
      trial::Reference reference(plan.trial, outcomes[0].initial);
      for (auto const& call : plan.afresh.empty() ? plan.calls : plan.afresh)
        if (call.trick == Trick::none || call.trick == Trick::nested) reference.run(call.op);
      auto const text = far_from(reference, static_cast<int>(rank), outcomes[rank]);
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
    bool named = scenario.causes.empty() && says(end.text, "rank ");
    for (auto const& cause : scenario.causes) named = named || says(end.text, cause);
    if (!named && !says(end.text, "no std::exception")) silent += fmt::format("rank {} does not say why; ", rank);
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

std::size_t threads() {
  std::size_t count = 0;
  for ([[maybe_unused]] auto const& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

/// Lets 200 runs fail, six times over. @return what the last five times have left on the heap, if it is more than
/// fragmentation: half of an event's flag, the smallest thing that a failure could leave, for each failure
std::string memory_growth() {
  std::vector<std::uint64_t> failing;
  for (std::uint64_t seed = 0; failing.size() < 200; ++seed)
    if (draw_scenario(seed).ending == Ending::errors) failing.push_back(seed);
  constexpr int times = 5;
  std::size_t before = 0;
  for (int time = 0; time <= times; ++time) {
    if (time == 1) before = ::mallinfo2().uordblks;
    for (auto const seed : failing) static_cast<void>(run_scenario(seed));
  }
  auto const after = ::mallinfo2().uordblks;
  auto const bound = failing.size() * times * sizeof(fsdp::host::detail::EventState) / 2;
  fmt::print("heap: {} bytes in use after {} failures, {} after {}\n", before, failing.size(), after,
             failing.size() * (times + 1));
  if (after <= before + bound) return {};
  return fmt::format("{} failures left {} bytes, {} may be fragmentation", failing.size() * times, after - before,
                     bound);
}

}  // namespace

Scenario draw_scenario(std::uint64_t seed) { return Scenarios(seed).next(); }

std::string describe(Scenario const& scenario) {
  auto text = fmt::format("{}\n{}\n", scenario.name, literal(scenario.ranks[0].trial));
  for (std::size_t rank = 0; rank < scenario.ranks.size(); ++rank) {
    auto const& plan = scenario.ranks[rank];
    text += fmt::format("rank {}: {}\n", rank, literal(plan.setting));
    constexpr std::array<std::string_view, 10> tricks{"",
                                                      "throws",
                                                      "throws 42",
                                                      "task throws",
                                                      "task throws, waits",
                                                      "gather throws",
                                                      "the caller throws",
                                                      "returns",
                                                      "is refused",
                                                      "calls inside"};
    if (plan.before != Trick::none)
      text += fmt::format("  before: {}\n", tricks[static_cast<std::size_t>(plan.before)]);
    for (auto const& call : plan.calls)
      text += fmt::format("  {} {}{}{}\n", literal(call.op), tricks[static_cast<std::size_t>(call.trick)],
                          call.trick == Trick::nested ? " " + literal(call.other) : "", call.caught ? ", caught" : "");
  }
  return text;
}

}  // namespace fuzz

int main(int argc, char** argv) {
  fsdp::testing::Seeds seeds{.count = 200};
  std::int64_t deadline = 60;
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
  seeds.limit_s = static_cast<unsigned>(2 * deadline);
  auto const threads = fuzz::threads();
  auto const run = [&](std::uint64_t seed) {
    auto text = fuzz::run_scenario(seed);
    if (text.empty() && fuzz::threads() != threads) text = "threads are left";
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
