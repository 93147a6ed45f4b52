// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/planned_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"

namespace transformer {
namespace {

constexpr double gb(std::int64_t bytes) { return static_cast<double>(bytes) / 1e9; }
constexpr double ms(double seconds) { return 1e3 * seconds; }

void print_heading() {
  fmt::print("{:<13} {:>6} {:>9} {:>10}  {:>9} {:>10} {:>10} {:>12} {:>6}\n", "strategy", "group", "prefetch",
             "recompute", "memory GB", "step ms", "exposed ms", "tokens/s", "MFU %");
}
std::string text(Settings const& settings) {
  return fmt::format("{:<13} {:>6} {:>9} {:>10}", settings.strategy,
                     settings.strategy == "hybrid_shard" ? fmt::to_string(settings.shard_group) : "-",
                     settings.strategy == "no_shard" ? "-" : fmt::to_string(settings.prefetch),
                     settings.activation_checkpointing);
}
void print_row(PlannedRun const& run) {
  fmt::print("{}  {:>9.3f} {:>10.3f} {:>10.3f} {:>12.0f} {:>6.1f}\n", text(run.settings), gb(run.memory.total()),
             ms(run.time.step), ms(run.time.exposed), run.tokens_per_second, 100 * run.mfu);
}
void print_bytes(PlannedRun const& run) {
  auto const& memory = run.memory;
  fmt::print(
      "memory of a GPU, bytes: parameters {}, gradients {}, optimizer {}, gather buffers {}, reduce buffers {}, "
      "activations {}, workspace {}, scalars {}, total {}\n",
      memory.engine.parameters, memory.engine.gradients, memory.engine.optimizer, memory.engine.gather,
      memory.engine.reduce, memory.activations, memory.workspace, memory.scalars, memory.total());
}

}  // namespace

void expect_plannable(Settings& settings, fsdp::plan::Hardware const& hardware) {
  fsdp::plan::expect_whole_nodes(hardware, static_cast<int>(settings.ranks));
  if (!settings.was_given(name_of(&Settings::gradient_accumulation_steps)))
    settings.gradient_accumulation_steps = settings.ranks;
  if (settings.offload != "none" || settings.cpu_offload || tuning_of(settings).adapts() || settings.train_layers > 0)
    fsdp::fail<fsdp::ConfigError>(
        "a plan on hardware has no times for offloading, adapters and frozen layers: expected none of them with "
        "--hardware; without it, plan computes their memory");
}

std::vector<Settings> candidates(Settings const& base, fsdp::plan::Hardware const& hardware, std::int64_t parameters) {
  auto const given = [&](auto member) { return base.was_given(name_of(member)); };
  std::vector<std::string> strategies{"full_shard", "shard_grad_op", "hybrid_shard"};
  constexpr double state_bytes = 16;  // of a parameter: master, gradient and two moments in fp32
  if (state_bytes * static_cast<double>(parameters) <= hardware.memory) strategies.emplace_back("no_shard");
  if (given(&Settings::strategy)) strategies = {base.strategy};
  std::vector<std::int64_t> groups, ahead{1, 2, 3};
  for (std::int64_t group = hardware.gpus_per_node; group < base.ranks; group *= 2)
    if (base.ranks % group == 0) groups.push_back(group);
  if (given(&Settings::shard_group)) groups = {base.shard_group};
  if (given(&Settings::prefetch)) ahead = {base.prefetch};
  std::vector<std::string> recomputation{"false", "true"};
  if (given(&Settings::activation_checkpointing) && base.activation_checkpointing != "both")
    recomputation = {base.activation_checkpointing};
  std::vector<Settings> all;
  for (auto const& again : recomputation)
    for (auto const& strategy : strategies)
      for (auto const group : strategy == "hybrid_shard" ? groups : std::vector<std::int64_t>{0})
        for (auto const prefetch : strategy == "no_shard" ? std::vector<std::int64_t>{1} : ahead) {
          auto next = base;
          next.activation_checkpointing = again;
          next.strategy = strategy;
          next.shard_group = group;
          next.prefetch = prefetch;
          all.push_back(std::move(next));
        }
  return all;
}

int print_planned_runs(std::vector<PlannedRun> const& runs, fsdp::plan::Hardware const& hardware) {
  auto const fits = [&](PlannedRun const& run) { return static_cast<double>(run.memory.total()) <= hardware.memory; };
  // Among equally fast ones, the one that needs least memory.
  auto const better = [&](PlannedRun const& a, PlannedRun const& b) {
    if (fits(a) != fits(b)) return fits(a);
    if (!fits(a)) return a.memory.total() < b.memory.total();
    if (a.time.step != b.time.step) return a.time.step < b.time.step;
    return a.memory.total() < b.memory.total();
  };
  auto sorted = runs;
  std::sort(sorted.begin(), sorted.end(), better);
  auto const& best = sorted.front();
  if (!fits(best)) {
    auto const lacking = best.memory.total() - static_cast<std::int64_t>(hardware.memory);
    print_heading();
    print_row(best);
    print_bytes(best);
    fmt::print(
        "nothing fits {:.0f} bytes of a GPU. The line above comes nearest: {} bytes ({:.3f} GB) are lacking. Use a "
        "smaller batch_size or more GPUs\n",
        hardware.memory, lacking, gb(lacking));
    std::fflush(stdout);
    return 1;
  }
  print_heading();
  constexpr std::size_t most = 12;
  auto const fitting = static_cast<std::size_t>(std::count_if(sorted.begin(), sorted.end(), fits));
  for (std::size_t i = 0; i < std::min(most, fitting); ++i) print_row(sorted[i]);
  fmt::print("{} of {} options fit {:.3f} GB{}. The fastest:\n", fitting, sorted.size(), hardware.memory / 1e9,
             fitting > most ? fmt::format(" (the fastest {} are shown)", most) : "");
  print_bytes(best);
  fmt::print(
      "step {:.3f} ms: compute {:.3f} ms, communication {:.3f} ms, of which {:.3f} ms exposed; {:.0f} tokens/s, "
      "MFU {:.1f} %\n",
      ms(best.time.step), ms(best.time.compute), ms(best.time.communication), ms(best.time.exposed),
      best.tokens_per_second, 100 * best.mfu);
  fmt::print(
      "options: --strategy={}{}{} --activation_checkpointing={}\n", best.settings.strategy,
      best.settings.strategy == "hybrid_shard" ? fmt::format(" --shard_group={}", best.settings.shard_group)
                                               : std::string(),
      best.settings.strategy == "no_shard" ? std::string() : fmt::format(" --prefetch={}", best.settings.prefetch),
      best.settings.activation_checkpointing);
  std::fflush(stdout);
  return 0;
}

}  // namespace transformer
