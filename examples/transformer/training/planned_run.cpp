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
#include "transformer/run/variants.hpp"

namespace transformer {
namespace {

constexpr double gb(std::int64_t bytes) { return static_cast<double>(bytes) / 1e9; }
constexpr double ms(double seconds) { return 1e3 * seconds; }

bool shards(Settings const& settings) { return settings.strategy != "no_shard" && settings.strategy != "ddp"; }

void print_heading() {
  fmt::print("{:<13} {:>6} {:>9} {:>10} {:>6}  {:>9} {:>10} {:>10} {:>12} {:>6}\n", "strategy", "group", "prefetch",
             "recompute", "batch", "memory GB", "step ms", "exposed ms", "tokens/s", "MFU %");
}
std::string text(Settings const& settings) {
  return fmt::format("{:<13} {:>6} {:>9} {:>10} {:>6}", settings.strategy,
                     settings.strategy == "hybrid_shard" ? fmt::to_string(settings.shard_group) : "-",
                     shards(settings) ? fmt::to_string(settings.prefetch) : "-", settings.activation_checkpointing,
                     settings.batch_size);
}
void print_row(PlannedRun const& run) {
  fmt::print("{}  {:>9.3f} {:>10.3f} {:>10.3f} {:>12.0f} {:>6.1f}\n", text(run.settings), gb(run.memory.total()),
             ms(run.time.step), ms(run.time.exposed), run.tokens_per_second, 100 * run.mfu);
}
bool differ_in_prefetch(Settings const& a, Settings const& b) {
  return a.strategy == b.strategy && a.shard_group == b.shard_group && a.batch_size == b.batch_size &&
         a.activation_checkpointing == b.activation_checkpointing;
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

void expect_countable(Settings const& settings, ModelSize const& model) {
  constexpr double most = 1e18;       // bytes; 64 bits count 9.2e18
  constexpr double state_bytes = 32;  // of a parameter: states, and buffers of units
  if (state_bytes * model.parameters > most)
    fsdp::fail<fsdp::ConfigError>(
        "plan: the bytes of a model of {:.3g} parameters may not be counted in 64 bits: use a smaller n_layer or "
        "n_embd",
        model.parameters);
  for (auto const batch : variants_of(settings, {settings.batch_size}).batch_sizes) {
    auto const tokens = static_cast<double>(batch) * static_cast<double>(settings.block_size);
    // A layer keeps some 34 values of its width for a token, the head some of the vocabulary's; both with a margin.
    auto const activation_bytes = 4 * tokens * (64 * model.layers * model.width + 8 * model.vocabulary);
    auto const of_step = tokens * static_cast<double>(std::max(settings.gradient_accumulation_steps, settings.ranks));
    if (activation_bytes > most || of_step > most)
      fsdp::fail<fsdp::ConfigError>(
          "plan: the bytes of {} sequences of {} tokens in {} layers of width {} may not be counted in 64 bits: use a "
          "smaller batch_size, block_size, gradient_accumulation_steps, n_layer or n_embd",
          batch, settings.block_size, model.layers, model.width);
  }
}

void expect_plannable(Settings& settings, fsdp::plan::Hardware const& hardware) {
  fsdp::plan::expect_whole_nodes(hardware, static_cast<int>(settings.ranks));
  if (!settings.was_given(name_of(&Settings::gradient_accumulation_steps)))
    settings.gradient_accumulation_steps = settings.ranks;
  if (settings.offload != "none" || settings.cpu_offload || tuning_of(settings).adapts() || settings.freeze_layers != 0)
    fsdp::fail<fsdp::ConfigError>(
        "a plan on hardware has no times for offloading, adapters and frozen layers: expected none of them with "
        "--hardware; without it, plan computes their memory");
}

namespace {

/// Shard groups that are whole nodes or parts of one that divide it.
std::vector<std::int64_t> groups_of(std::int64_t ranks, std::int64_t gpus_per_node) {
  std::vector<std::int64_t> groups;
  for (std::int64_t group = 2; group <= ranks / 2; ++group)
    if (ranks % group == 0 && (group % gpus_per_node == 0 || gpus_per_node % group == 0)) groups.push_back(group);
  return groups;
}

}  // namespace

std::vector<Settings> candidates(Settings const& base, fsdp::plan::Hardware const& hardware, std::int64_t parameters) {
  auto const given = [&](auto member) { return base.was_given(name_of(member)); };
  std::vector<std::string> strategies{"full_shard", "shard_grad_op", "hybrid_shard"};
  constexpr double state_bytes = 16;  // of a parameter: master, gradient and two moments in fp32
  if (state_bytes * static_cast<double>(parameters) <= hardware.memory) strategies.emplace_back("no_shard");
  if (given(&Settings::strategy)) strategies = {base.strategy};
  auto groups = groups_of(base.ranks, hardware.gpus_per_node);
  if (given(&Settings::shard_group) || (groups.empty() && given(&Settings::strategy))) groups = {base.shard_group};
  std::vector<std::int64_t> ahead{1, 2, 3};
  if (given(&Settings::prefetch)) ahead = {base.prefetch};
  auto variants = variants_of(base, {base.batch_size});
  if (!given(&Settings::activation_checkpointing)) variants.recomputation = {"false", "true"};
  std::vector<Settings> all;
  for (auto const batch : variants.batch_sizes)
    for (auto const& again : variants.recomputation)
      for (auto const& strategy : strategies)
        for (auto const group : strategy == "hybrid_shard" ? groups : std::vector{base.shard_group})
          for (auto const prefetch : ahead) {
            auto next = base;
            next.batch_size = batch;
            next.activation_checkpointing = again;
            next.strategy = strategy;
            next.shard_group = group;
            next.prefetch = prefetch;
            if (shards(next) || prefetch == ahead.front()) all.push_back(std::move(next));
          }
  return all;
}

int print_planned_runs(std::vector<PlannedRun> const& runs, fsdp::plan::Hardware const& hardware) {
  auto const fits = [&](PlannedRun const& run) { return static_cast<double>(run.memory.total()) <= hardware.memory; };
  // Among equally fast ones, the one that needs least memory.
  auto const better = [&](PlannedRun const& a, PlannedRun const& b) {
    if (fits(a) != fits(b)) return fits(a);
    if (fits(a) && a.tokens_per_second != b.tokens_per_second) return a.tokens_per_second > b.tokens_per_second;
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
  auto const fitting = std::count_if(sorted.begin(), sorted.end(), fits);
  constexpr std::size_t most = 12;
  std::vector<Settings> shown;
  for (auto run = sorted.begin(); run != sorted.begin() + fitting && shown.size() < most; ++run) {
    if (std::any_of(shown.begin(), shown.end(),
                    [&](auto const& other) { return differ_in_prefetch(run->settings, other); }))
      continue;
    print_row(*run);
    shown.push_back(run->settings);
  }
  fmt::print(
      "{} of {} options fit {:.3f} GB; of those that differ in prefetch alone the best one is shown{}. The fastest:\n",
      fitting, sorted.size(), hardware.memory / 1e9, shown.size() == most ? fmt::format(", and at most {}", most) : "");
  print_bytes(best);
  fmt::print(
      "step {:.3f} ms, {} tokens: compute {:.3f} ms, communication {:.3f} ms, of which {:.3f} ms exposed (compute "
      "waits for it); {:.0f} tokens/s, MFU {:.1f} %\n",
      ms(best.time.step), best.settings.tokens_per_step(), ms(best.time.compute), ms(best.time.communication),
      ms(best.time.exposed), best.tokens_per_second, 100 * best.mfu);
  auto const& chosen = best.settings;
  fmt::print("options: --strategy={}", chosen.strategy);
  if (chosen.strategy == "hybrid_shard") fmt::print(" --shard_group={}", chosen.shard_group);
  if (shards(chosen)) fmt::print(" --prefetch={}", chosen.prefetch);
  fmt::print(" --activation_checkpointing={} --batch_size={} --gradient_accumulation_steps={}\n",
             chosen.activation_checkpointing, chosen.batch_size, chosen.gradient_accumulation_steps);
  std::fflush(stdout);
  return 0;
}

}  // namespace transformer
