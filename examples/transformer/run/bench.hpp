// SPDX-License-Identifier: Apache-2.0
// `bench`: time of a training step, utilisation, memory, and what of communication is not hidden.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "fsdp/memory.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/math/peak.hpp"
#include "transformer/report/metrics.hpp"

namespace transformer {

/// Means over the ranks of timed steps.
struct TimedSteps {
  double seconds = 0;  ///< of a step
  double exposed = 0;  ///< seconds of a step in which compute waited for communication
  double loss = 0;     ///< of the last step
};
/// Makes burn_in steps, then `timed` steps, which it times. @note Collective: yes.
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

/// @param peak  of all ranks together; the host's is measured once more after the steps
/// @throws fsdp::ResourceError on rank 0 if the log cannot be written
/// @note Collective: yes.
template <class T>
void bench(T& trainer, Job const& job, Peak peak, int ranks, JsonLog& log) {
  auto const& s = job.settings;
  auto& engine = trainer.engine();
  auto const [seconds, exposed, loss] = time_steps(trainer, s);
  auto const largest_pss = largest_pss_bytes(engine.world());
  if constexpr (measures_peak_again<std::remove_reference_t<decltype(engine.world())>>)
    raise(peak, engine.world(), highest_host_rate<typename T::Element>(engine.world().device()));
  if (engine.rank() != 0) return;

  double const tokens = static_cast<double>(s.gradient_accumulation_steps * s.batch_size * s.block_size);
  double const flop = tokens * T::Program::flop_per_token(trainer.config(), s);
  double const mfu = flop / seconds / peak.flops;
  fmt::print("time per iteration: {:.4f}ms, MFU: {:.2f}%\n", seconds * 1e3, mfu * 100);
  fmt::print("tokens/s: {}\n", with_commas(std::llround(tokens / seconds)));
  fmt::print("{:.2f} of {:.2f} GFLOP/s per rank ({}): {:.2f}%\n", flop / seconds / ranks / 1e9,
             peak.flops / ranks / 1e9, peak.source, mfu * 100);
  if constexpr (T::counts_waits)
    fmt::print("exposed communication: {:.4f}ms an iteration, {:.2f}%\n", exposed * 1e3, exposed / seconds * 100);
  fmt::print("memory of rank 0 as counted by fsdp, in bytes:\n");
  std::string by_tag;
  for (std::size_t tag = 0; tag < static_cast<std::size_t>(fsdp::MemoryTag::count_); ++tag) {
    auto const name = fsdp::memory_tag_names[tag];
    auto const bytes = engine.account().reserved(static_cast<fsdp::MemoryTag>(tag));
    fmt::print("  {:<12} {:>16}\n", name, with_commas(bytes));
    by_tag += fmt::format("\"{}\":{},", name, bytes);
  }
  auto const total = engine.account().reserved_total();
  fmt::print("  {:<12} {:>16}\n", "total", with_commas(total));
  // Everything is allocated by the end of the first step: what is in use now is the peak.
  std::string device_bytes = "null";
  if constexpr (requires { engine.device().memory(); }) {
    auto const memory = engine.device().memory();
    auto const used = static_cast<std::int64_t>(memory.total - memory.free);
    fmt::print("device memory in use by all processes: {} of {} bytes\n", with_commas(used),
               with_commas(static_cast<std::int64_t>(memory.total)));
    device_bytes = std::to_string(used);
  }
  fmt::print("largest PSS (proportional set size) of a rank: {} bytes\n", with_commas(largest_pss));
  fmt::print("loss after {} iterations: {}\n", s.burn_in + s.timed, loss_text(loss));
  std::fflush(stdout);
  log.write_or_fail(fmt::format(
      R"({{"strategy":"{}","device":"{}","dtype":"{}","ranks":{},"time_ms":{:.17g},"tokens_per_s":{:.17g},"mfu":{:.17g},)"
      R"("peak_flops_per_rank":{:.17g},"exposed_ms":{},"pss_bytes_max":{},"device_bytes":{},"loss":{:.17g},)"
      R"("mem_bytes":{{{}"total":{}}}}})",
      engine.strategy().name, job.device, job.dtype, ranks, seconds * 1e3, tokens / seconds, mfu, peak.flops / ranks,
      T::counts_waits ? fmt::format("{:.17g}", exposed * 1e3) : "null", largest_pss, device_bytes, loss, by_tag,
      total));
}

}  // namespace transformer
