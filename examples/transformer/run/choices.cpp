// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/choices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/run/read_number.hpp"
#include "transformer/run/table.hpp"

namespace transformer {
namespace {

constexpr std::string_view auto_or = "auto:";  // weights follow

}  // namespace

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  for (bool more = true; more;) {
    auto const comma = text.find(',');
    words.emplace_back(text.substr(0, comma));
    more = comma != std::string_view::npos;
    if (more) text.remove_prefix(comma + 1);
  }
  return words;
}

bool is_auto(Settings const& settings) {
  return settings.init_from == "auto" || settings.init_from.starts_with(auto_or);
}

bool may_resume(Settings const& settings) { return settings.init_from == "resume" || is_auto(settings); }

bool names_weights(std::string_view start) { return start != "scratch" && start != "resume"; }

std::string first_start(Settings const& settings) {
  if (settings.init_from == "resume") return settings.init_from;
  if (!settings.model.empty()) return settings.model;
  if (settings.init_from == "auto") return "scratch";
  return is_auto(settings) ? settings.init_from.substr(auto_or.size()) : settings.init_from;
}

Settings defaults(Command command) {
  Settings settings;
  set_defaults(settings);
  if (command == Command::sample) settings.init_from = "resume";
  if (command == Command::prepare) settings.dataset.clear();
  return settings;
}

Tuning tuning_of(Settings const& settings) {
  Tuning tuning;
  tuning.lora_rank = settings.lora_rank;
  if (tuning.adapts())
    tuning.lora_scale = static_cast<float>(settings.lora_alpha / static_cast<double>(tuning.lora_rank));
  if (settings.freeze_layers < 0)
    tuning.last_layers = -settings.freeze_layers;
  else
    tuning.frozen_layers = settings.freeze_layers;
  if (settings.lora_targets != "all") tuning.lora_targets = words_of(settings.lora_targets);
  return tuning;
}

std::int64_t checkpointed_layers(Settings const& settings) {
  auto const& text = settings.activation_checkpointing;
  if (text == "false" || text == "False") return 0;
  if (text == "true" || text == "True") return settings.n_layer;
  std::int64_t layers{};
  if (!read_number(text, layers) || layers < 0)
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected true, false or a number of layers, got '{}'",
                                  name_of(&Settings::activation_checkpointing), text);
  if (layers > settings.n_layer)
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected at most the {} layers, got {}",
                                  name_of(&Settings::activation_checkpointing), settings.n_layer, layers);
  return layers;
}

fsdp::Offloaded offloaded(Settings const& settings, bool has_masters) {
  fsdp::Offloaded parsed;
  if (settings.cpu_offload) parsed = {.moments = true, .masters = has_masters};
  if (settings.offload == "none") return parsed;
  for (auto const& word : words_of(settings.offload)) {
    if (word == "moments")
      parsed.moments = true;
    else if (word == "masters")
      parsed.masters = true;
    else if (word == "gradients")
      parsed.gradients = true;
    else
      fsdp::fail<fsdp::ConfigError>(
          "setting 'offload': expected none, or some of moments, masters and gradients, separated by commas, got "
          "'{}'{}",
          settings.offload, word == "parameters" ? "; parameters stay on the device, sharded" : "");
  }
  if (parsed.masters && !has_masters)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'offload': expected masters only with --dtype=bfloat16; in float32 the masters are the parameters");
  return parsed;
}

std::int64_t segment_layers(Settings const& settings, std::int64_t unit_layers) {
  auto const segment = settings.recompute_segment, layers = checkpointed_layers(settings);
  if (segment == 1) return 1;
  if (layers == 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'recompute_segment': only layers that are computed again form segments; expected --{} too",
        name_of(&Settings::activation_checkpointing));
  if (segment > layers)
    fsdp::fail<fsdp::ConfigError>("setting 'recompute_segment': expected at most the {} layers of {}, got {}", layers,
                                  name_of(&Settings::activation_checkpointing), segment);
  if (unit_layers == 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'recompute_segment': --wrap=model has all layers in one unit: expected 1, got {}", segment);
  if (segment % unit_layers != 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'recompute_segment': a segment has whole units: expected 1 or a multiple of their {} layers, got {}",
        unit_layers, segment);
  return segment;
}

Resharding resharding(Settings const& settings) {
  auto const& text = settings.reshard_after_forward;
  bool const drops = settings.strategy == "full_shard" || settings.strategy == "hybrid_shard";
  auto const refuse = [&](std::string_view expected) {
    fsdp::fail<fsdp::ConfigError>("setting 'reshard_after_forward': expected {}, got '{}'", expected, text);
  };
  if (text.empty()) return {drops, 0};
  if (text == "false" || text == "False") return {false, 0};
  Resharding parsed;
  if (text != "true" && text != "True" && (!read_number(text, parsed.ranks) || parsed.ranks < 2))
    refuse("true, false or a number of ranks above 1");
  if (!drops) refuse(fmt::format("false, which is what {} does", settings.strategy));
  return parsed;
}

std::int64_t layers_in_unit(Settings const& settings, std::int64_t layer_parameters) {
  if (settings.wrap == "model") return 0;
  if (settings.wrap == "block") return 1;
  return std::min(settings.n_layer, (settings.min_params + layer_parameters - 1) / layer_parameters);
}

std::vector<std::string> notes_on(Settings const& settings, std::int64_t ranks, bool shares_gpus) {
  std::vector<std::string> notes;
  auto const note = [&](std::string_view name, std::string_view why) {
    if (settings.was_given(name)) notes.push_back(fmt::format("note: '{}' of nanoGPT has no effect: {}", name, why));
  };
  note("compile", "nanogpt compiles nothing at run time");
  note("backend", "device and launcher decide how ranks communicate (see --comm)");
  if (settings.was_given("bucket_mb") && settings.strategy != "no_shard")
    notes.push_back(
        fmt::format("note: 'bucket_mb' has no effect: only no_shard has buckets, and {} reduces each unit by itself",
                    settings.strategy));
  if (settings.was_given("reduce_dtype") && ranks == 1)
    notes.emplace_back("note: 'reduce_dtype' has no effect with one rank, which has no gradients of others to sum");
  if (auto const steps = settings.gradient_accumulation_steps, in_last = steps % ranks; in_last != 0)
    notes.push_back(
        fmt::format("note: gradient_accumulation_steps {} is not a multiple of the {} ranks: each rank makes {} "
                    "micro-step{}, and in the last one {} of the ranks {} no sequences: a step takes as long as one of "
                    "{} micro-steps",
                    steps, ranks, steps / ranks + 1, steps < ranks ? "" : "s", ranks - in_last,
                    ranks - in_last == 1 ? "has" : "have", (steps / ranks + 1) * ranks));
  if (auto const segment = settings.recompute_segment; segment > 1 && segment == checkpointed_layers(settings))
    notes.push_back(
        fmt::format("note: recompute_segment {} puts all layers of '{}' into one segment, and the last segment is not "
                    "computed again: nothing is computed again",
                    segment, name_of(&Settings::activation_checkpointing)));
  if (settings.share_gpu && !shares_gpus)
    notes.emplace_back("note: 'share_gpu' has no effect: no machine has more processes than GPUs");
  if (settings.strategy == "hybrid_shard" && settings.shard_group == 1)
    notes.emplace_back(
        "note: shard groups of one rank do not shard: every rank keeps the whole model, as with no_shard");
  else if (settings.strategy == "hybrid_shard" && settings.shard_group == ranks)
    notes.push_back(
        fmt::format("note: one shard group of all {} ranks has no replicas, so this equals full_shard", ranks));
  if (settings.wandb_log) note("wandb_log", "nothing is sent anywhere; --log_json=FILE logs");
  return notes;
}

}  // namespace transformer
