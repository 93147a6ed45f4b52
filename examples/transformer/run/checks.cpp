// SPDX-License-Identifier: Apache-2.0
// Checks settings that depend on each other.
#include "transformer/run/choices.hpp"

#include <string>
#include <string_view>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/run/table.hpp"
#include "transformer/run/variants.hpp"

namespace transformer {
namespace {

/// Where a value that does not fit these ranks comes from, unless this start has given it. For messages.
std::string whose(Settings const& s, std::string_view name) {
  if (!s.is_of_run(name)) return {};
  return fmt::format(", as in the run in '{}'; set another value with --{}=N", s.out_dir, name);
}

void check_strategy(Settings const& s, std::int64_t ranks) {
  if (s.strategy == "hybrid_shard") {
    if (s.shard_group == 0)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'shard_group': on one machine, strategy hybrid_shard needs a number of ranks per shard group "
          "(--shard_group=N), got none");
    if (ranks % s.shard_group != 0)
      fsdp::fail<fsdp::ConfigError>("setting 'shard_group': expected a divisor of the {} ranks, got {}{}", ranks,
                                    s.shard_group, whose(s, "shard_group"));
  } else if (s.shard_group != 0) {
    fsdp::fail<fsdp::ConfigError>(
        "setting 'shard_group': only strategy hybrid_shard has shard groups, got shard_group {} with strategy {}",
        s.shard_group, s.strategy);
  }
}

}  // namespace

void expect_tuning(Settings const& s) {
  if (s.lora_rank > 0 && s.freeze_layers != 0)
    fsdp::fail<fsdp::ConfigError>(
        "settings 'lora_rank' and 'freeze_layers': adapters freeze everything else; use either, not both: got {}{} and "
        "{}{}",
        s.lora_rank, whose(s, "lora_rank"), s.freeze_layers, whose(s, "freeze_layers"));
  if (s.freeze_layers > s.n_layer || s.freeze_layers < -s.n_layer)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'freeze_layers': expected a number from -{} to {}, the model's layers, got {}{}", s.n_layer, s.n_layer,
        s.freeze_layers, whose(s, "freeze_layers"));
}

void check_together(Settings const& s, Command command, std::int64_t ranks) {
  if (command == Command::prepare) {
    if (s.data.empty())
      fsdp::fail<fsdp::ConfigError>(
          "setting 'data': expected the text to prepare (--data=FILE, or --data=- for standard input), got nothing");
    if (s.dataset.empty())
      fsdp::fail<fsdp::ConfigError>(
          "setting 'dataset': expected the name of the data set to write (--dataset=NAME, for the folder data/NAME), "
          "got "
          "nothing");
    if (!s.val_data.empty() && s.was_given("val_fraction") && s.val_fraction != 0)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_fraction': with --val_data, all of --data is used for training: expected 0 or no val_fraction, "
          "got {}",
          s.val_fraction);
    if (s.data == "-" && s.val_data == "-")
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_data': --data reads standard input already: expected a file, got '-'");
    if (auto const* const model = find_setting("model");
        model != nullptr && model->exists_in(command) && s.model.empty())
      fsdp::fail<fsdp::ConfigError>(
          "setting 'model': expected the folder of the model whose tokenizer makes the tokens (--model=FOLDER), got "
          "nothing");
    bool const gpt2 = s.tokenizer == "gpt2";
    for (auto const& [name, file] :
         {std::pair("encoder_json", &s.encoder_json), std::pair("vocab_bpe", &s.vocab_bpe)}) {
      if (gpt2 && file->empty())
        fsdp::fail<fsdp::ConfigError>(
            "setting '{}': tokenizer gpt2 needs this file (GPT-2's encoder.json and vocab.bpe, or HuggingFace's "
            "vocab.json and merges.txt), got nothing",
            name);
      if (!gpt2 && !file->empty())
        fsdp::fail<fsdp::ConfigError>(
            "setting '{}': only --tokenizer=gpt2 reads this file, got '{}' with --tokenizer={}", name, *file,
            s.tokenizer);
    }
    return;
  }
  auto const* const model = find_setting("model");
  if (model != nullptr && model->exists_in(command) && setting_of_weights() == "model" && command != Command::sample &&
      command != Command::export_ && s.model.empty() && !may_resume(s))
    fsdp::fail<fsdp::ConfigError>("setting 'model': expected the folder of a model (--model=FOLDER), got nothing");
  if (command == Command::report) return;
  if (command == Command::bench || command == Command::plan) static_cast<void>(variants_of(s, {}));
  if (command == Command::plan) return check_strategy(s, ranks);
  if ((command == Command::sample || command == Command::export_) && s.encoder_json.empty() != s.vocab_bpe.empty())
    fsdp::fail<fsdp::ConfigError>(
        "setting '{}': expected both files of the tokenizer, encoder_json and vocab_bpe, got only one",
        s.encoder_json.empty() ? "encoder_json" : "vocab_bpe");
  if (command == Command::sample) {
    if (s.init_from == "scratch" || is_auto(s))
      fsdp::fail<fsdp::ConfigError>(
          "setting 'init_from': expected resume (the model in out_dir) or weights to sample from, got '{}'",
          s.init_from);
    if (!s.checkpoint.empty() && s.init_from != "resume")
      fsdp::fail<fsdp::ConfigError>(
          "setting 'checkpoint': only a run in out_dir has checkpoints (init_from resume), got '{}' with init_from {}",
          s.checkpoint, s.init_from);
    check_strategy(s, ranks);
    return;
  }
  if (command == Command::export_) {
    if (s.to.empty())
      fsdp::fail<fsdp::ConfigError>("setting 'to': expected the folder to write to (--to=DIR), got nothing");
    if (s.dtype == "float16" || s.dtype == "fastest")
      fsdp::fail<fsdp::ConfigError>("setting 'dtype': expected float32 or bfloat16 for an export, got {}", s.dtype);
    return;
  }
  if (s.init_from != "scratch" && s.model.empty() && command == Command::bench)
    fsdp::fail<fsdp::ConfigError>("setting 'init_from': bench supports only scratch, got '{}'", s.init_from);
  if (!s.checkpoint.empty() && s.init_from != "resume")
    fsdp::fail<fsdp::ConfigError>(
        "setting 'checkpoint': only init_from=resume takes a checkpoint, got '{}' with init_from={}", s.checkpoint,
        s.init_from);
  if (auto const start = first_start(s);
      s.init_from != "auto" && is_auto(s) &&
      (start.empty() || start == "scratch" || start == "resume" || start.starts_with("auto")))
    fsdp::fail<fsdp::ConfigError>("setting 'init_from': expected weights after 'auto:', got '{}'", s.init_from);
  if (s.overwrite && may_resume(s))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'overwrite': --overwrite replaces the old run with a new one, but --init_from={} continues the old "
        "run: expected only one of the two",
        s.init_from);
  if (s.snapshot_interval > 0 && s.snapshot_folder.empty())
    fsdp::fail<fsdp::ConfigError>(
        "setting 'snapshot_folder': snapshots need a folder in each node's memory (--snapshot_folder=/dev/shm/NAME), "
        "got nothing");
  static_cast<void>(offloaded(s, s.dtype != "float32"));
  if (command != Command::bench || s.activation_checkpointing != "both")
    static_cast<void>(segment_layers(s, s.wrap == "model" ? 0 : 1));
  auto const kept = resharding(s).ranks;
  if (auto const group = s.strategy == "hybrid_shard" ? s.shard_group : ranks;
      kept > 0 && group > 0 && (kept >= group || group % kept != 0))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'reshard_after_forward': expected true, false, or a smaller divisor of the {} ranks that share a "
        "unit, got {}{}",
        group, kept, whose(s, "reshard_after_forward"));
  if (s.was_given("min_params") && s.wrap != "size")
    fsdp::fail<fsdp::ConfigError>("setting 'min_params': only --wrap=size uses min_params, got {} with --wrap={}",
                                  s.min_params, s.wrap);
  expect_tuning(s);
  if (s.was_given("lora_alpha") && s.lora_rank == 0)
    fsdp::fail<fsdp::ConfigError>("setting 'lora_alpha': only adapters use it; expected --{} too",
                                  name_of(&Settings::lora_rank));
  if (s.n_embd % s.n_head != 0)
    fsdp::fail<fsdp::ConfigError>("setting 'n_embd': expected a multiple of n_head = {}, got {}", s.n_head, s.n_embd);
  check_strategy(s, ranks);
}

}  // namespace transformer
