// SPDX-License-Identifier: Apache-2.0
// The subcommand `bench` measures a training step: time, utilisation, memory and exposed communication.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "transformer/launch/job.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/log_lines.hpp"
#include "transformer/report/metrics.hpp"

namespace transformer {

/// Means over the ranks of timed steps.
struct TimedSteps {
  double seconds = 0;  ///< of a step
  double exposed = 0;  ///< seconds of a step in which compute waited for communication
  double loss = 0;     ///< of the last step
};
/// Takes burn_in warm-up steps, then measures `timed` steps. @note Collective: yes.
template <class T>
TimedSteps time_steps(T& trainer, Settings const& s) {
  using Clock = std::chrono::steady_clock;
  auto& engine = trainer.engine();
  auto const steps = static_cast<double>(s.timed);
  for (std::int64_t i = 0; i < s.burn_in; ++i) trainer.step(i, s.learning_rate, i + 1 == s.burn_in);
  static_cast<void>(engine.mean_over_ranks({0.0}));  // all ranks begin together
  auto const blocked_before = trainer.blocked_ns();
  auto const begin = Clock::now();
  double loss = 0;
  for (std::int64_t i = 0; i < s.timed; ++i)
    loss = trainer.step(s.burn_in + i, s.learning_rate, i + 1 == s.timed).value_or(loss);
  double const mine = std::chrono::duration<double>(Clock::now() - begin).count() / steps;
  double const exposed_mine = static_cast<double>(trainer.blocked_ns() - blocked_before) / steps / 1e9;
  auto const mean = engine.mean_over_ranks({mine, exposed_mine, loss});
  return {mean[0], mean[1], mean[2]};
}

/// The largest PSS (proportional set size) of a rank, in bytes. @note Collective: yes; blocks.
template <class C>
std::int64_t largest_pss_bytes(C& world) {
  std::int64_t largest = 0;
  for (auto const& text : world.exchange(std::to_string(pss_bytes()), "memory"))
    largest = std::max<std::int64_t>(largest, std::atoll(text.c_str()));
  return largest;
}

/// Measurements of `bench`.
struct BenchResult {
  int ranks = 1;
  std::string_view strategy;
  TimedSteps steps;
  bool counts_waits = false;  ///< steps.exposed is known
  double flop_per_token = 0;
  Peak peak;              ///< of all ranks together
  double first_peak = 0;  ///< FLOP per second, measured before the steps; 0: `peak` is no higher
  RankMemory memory;      ///< of rank 0
  std::int64_t largest_pss = 0;
  /// Memory in use at the end of the steps. It is the peak, because the first step allocates everything.
  struct DeviceMemory {
    std::int64_t used = 0, total = 0;  ///< bytes, of all processes
  };
  std::optional<DeviceMemory> device_memory;
};
/// Prints the result, and writes it as a JSON object. @throws fsdp::ResourceError if the log cannot be written
void print_bench(BenchResult const& result, Job const& job, JsonLog& log);

/// @param peak  of all ranks together; the host's is measured once more after the steps, unless it was given
/// @throws fsdp::ResourceError on rank 0 if the log cannot be written
/// @note Collective: yes.
template <class T>
void bench(T& trainer, Job const& job, Peak peak, int ranks, JsonLog& log) {
  auto const& s = job.settings;
  auto& engine = trainer.engine();
  BenchResult result;
  double const first_peak = peak.flops;
  result.ranks = ranks;
  result.strategy = engine.strategy().name;
  result.steps = time_steps(trainer, s);
  result.counts_waits = T::counts_waits;
  result.largest_pss = largest_pss_bytes(engine.world());
  if constexpr (measures_peak_again<std::remove_reference_t<decltype(engine.world())>>)
    if (raise(peak, engine.world(),
              s.peak_tflops > 0 ? 0 : highest_host_rate<typename T::Element>(engine.world().device())))
      result.first_peak = first_peak;
  if (engine.rank() != 0) return;
  result.peak = std::move(peak);
  result.flop_per_token = T::Program::flop_per_token(trainer.config(), s);
  result.memory = rank_memory(engine.account());
  if constexpr (requires { engine.device().memory(); }) {
    auto const memory = engine.device().memory();
    result.device_memory = {static_cast<std::int64_t>(memory.total - memory.free),
                            static_cast<std::int64_t>(memory.total)};
  }
  print_bench(result, job, log);
}

}  // namespace transformer
