// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/bench.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "fsdp/memory.hpp"

namespace transformer {

void print_bench(BenchResult const& result, Job const& job, JsonLog& log) {
  auto const& s = job.settings;
  auto const& [seconds, exposed, loss] = result.steps;
  int const ranks = result.ranks;
  auto const tokens = static_cast<double>(s.tokens_per_step());
  double const flop = tokens * result.flop_per_token;
  double const reached = flop / seconds;
  auto peak = result.peak;
  if (result.first_peak > 0 && s.verbose)
    fmt::print("note: the {} is {:.2f} GFLOP/s per rank after the steps, and was {:.2f} before\n", peak.source,
               peak.flops / ranks / 1e9, result.first_peak / ranks / 1e9);
  if (reached > peak.flops) {
    if (s.verbose || !peak.is_measured)
      fmt::print(
          "note: the steps reached more than the {} of {:.2f} GFLOP/s per rank; MFU is relative to the reached "
          "rate\n",
          peak.source, peak.flops / ranks / 1e9);
    peak = {reached, "reached", 0, true};
  }
  double const mfu = reached / peak.flops;
  fmt::print("time per iteration: {:.4f}ms, MFU: {:.2f}%\n", seconds * 1e3, mfu * 100);
  fmt::print("tokens/s: {}\n", with_commas(std::llround(tokens / seconds)));
  fmt::print("{:.2f} of {:.2f} GFLOP/s per rank ({}): {:.2f}%\n", flop / seconds / ranks / 1e9,
             peak.flops / ranks / 1e9, peak.source, mfu * 100);
  if (result.counts_waits)
    fmt::print("exposed communication: {:.4f}ms an iteration in which compute waits for it, {:.2f}% of the time\n",
               exposed * 1e3, exposed / seconds * 100);
  fmt::print("memory of rank 0 as counted by fsdp, in bytes:\n");
  std::string by_tag;
  std::int64_t total = 0;
  for (std::size_t tag = 0; tag < result.memory.reserved.size(); ++tag) {
    auto const name = fsdp::memory_tag_names[tag];
    auto const bytes = result.memory.reserved[tag];
    total += bytes;
    fmt::print("  {:<12} {:>16}\n", name, with_commas(bytes));
    by_tag += fmt::format("\"{}\":{},", name, bytes);
  }
  fmt::print("  {:<12} {:>16}\n", "total", with_commas(total));
  if (auto const& memory = result.device_memory)
    fmt::print("device memory in use by all processes: {} of {} bytes\n", with_commas(memory->used),
               with_commas(memory->total));
  fmt::print("largest PSS (proportional set size) of a rank: {} bytes\n", with_commas(result.largest_pss));
  fmt::print("loss after {} iterations: {}\n", s.burn_in + s.timed, loss_text(loss));
  std::fflush(stdout);
  log.write_or_fail(fmt::format(
      R"({{"strategy":"{}","device":"{}","dtype":"{}","ranks":{},"time_ms":{:.17g},"tokens_per_s":{:.17g},"mfu":{:.17g},)"
      R"("peak_flops_per_rank":{:.17g},"exposed_ms":{},"pss_bytes_max":{},"device_bytes":{},"loss":{:.17g},)"
      R"("mem_bytes":{{{}"total":{}}}}})",
      result.strategy, job.device, job.dtype, ranks, seconds * 1e3, tokens / seconds, mfu, peak.flops / ranks,
      result.counts_waits ? fmt::format("{:.17g}", exposed * 1e3) : "null", result.largest_pss,
      result.device_memory ? std::to_string(result.device_memory->used) : "null", loss, by_tag, total));
}

}  // namespace transformer
