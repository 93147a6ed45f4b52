// SPDX-License-Identifier: Apache-2.0
// nanogpt bench: time of a training step, utilisation, memory, and what of communication is not hidden.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "fsdp/memory.hpp"
#include "metrics.hpp"
#include "train.hpp"

namespace nanogpt {

/// @param sgemm_peak  of all ranks together, FLOP per second
/// @note Collective: yes.
template <class T>
void bench(T& trainer, Job const& job, double sgemm_peak, int ranks, JsonLog& log) {
  using Clock = std::chrono::steady_clock;
  auto const& s = job.settings;
  auto& engine = trainer.engine();
  auto const steps = static_cast<double>(s.timed);
  for (std::int64_t i = 0; i < s.burn_in; ++i) trainer.step(i, s.learning_rate);
  static_cast<void>(engine.mean_over_ranks({0.0}));  // all ranks begin together
  auto const blocked_before = trainer.blocked_ns();
  auto const begin = Clock::now();
  double loss = 0;
  for (std::int64_t i = 0; i < s.timed; ++i) loss = trainer.step(s.burn_in + i, s.learning_rate);
  double const mine = std::chrono::duration<double>(Clock::now() - begin).count() / steps;
  double const exposed_mine = static_cast<double>(trainer.blocked_ns() - blocked_before) / steps / 1e9;

  auto const mean = engine.mean_over_ranks({mine, exposed_mine, loss});
  double const seconds = mean[0], exposed = mean[1];
  std::int64_t largest_pss = 0;
  for (auto const& text : engine.world().exchange(std::to_string(pss_bytes()))) largest_pss = std::max<std::int64_t>(largest_pss, std::atoll(text.c_str()));
  if (engine.rank() != 0) return;

  double const tokens = static_cast<double>(s.gradient_accumulation_steps * s.batch_size * s.block_size);
  double const flop = tokens * trainer.config().flop_per_token();
  double const mfu = flop / seconds / sgemm_peak;
  fmt::print("time per iteration: {:.4f}ms, MFU: {:.2f}%\n", seconds * 1e3, mfu * 100);
  fmt::print("tokens/s: {}\n", with_commas(std::llround(tokens / seconds)));
  fmt::print("{:.2f} GFLOP/s a rank of a measured sgemm peak of {:.2f} GFLOP/s: {:.2f}%\n", flop / seconds / ranks / 1e9,
             sgemm_peak / ranks / 1e9, mfu * 100);
  fmt::print("exposed communication: {:.4f}ms an iteration, {:.2f}%\n", exposed * 1e3, exposed / seconds * 100);
  fmt::print("memory of rank 0 by the account, in bytes:\n");
  std::string by_tag;
  for (std::size_t tag = 0; tag < static_cast<std::size_t>(fsdp::MemoryTag::count_); ++tag) {
    auto const name = fsdp::memory_tag_names[tag];
    auto const bytes = engine.account().reserved(static_cast<fsdp::MemoryTag>(tag));
    fmt::print("  {:<12} {:>16}\n", name, with_commas(bytes));
    by_tag += fmt::format("\"{}\":{},", name, bytes);
  }
  auto const total = engine.account().reserved_total();
  fmt::print("  {:<12} {:>16}\n", "total", with_commas(total));
  fmt::print("PSS, largest of all ranks: {} bytes\n", with_commas(largest_pss));
  fmt::print("loss after {} iterations: {:.4f}\n", s.burn_in + s.timed, mean[2]);
  std::fflush(stdout);
  log.write(fmt::format(
      R"({{"strategy":"{}","ranks":{},"time_ms":{:.17g},"tokens_per_s":{:.17g},"mfu":{:.17g},"sgemm_peak_flops_per_rank":{:.17g},)"
      R"("exposed_ms":{:.17g},"pss_bytes_max":{},"loss":{:.17g},"mem_bytes":{{{}"total":{}}}}})",
      T::Engine::ShardingStrategy::name, ranks, seconds * 1e3, tokens / seconds, mfu, sgemm_peak / ranks, exposed * 1e3,
      largest_pss, mean[2], by_tag, total));
}

}  // namespace nanogpt
