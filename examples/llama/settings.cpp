// SPDX-License-Identifier: Apache-2.0
// llama's settings, in the order of --help within each group.
#include <algorithm>
#include <string_view>
#include <vector>

#include "transformer/run/common_rows.hpp"
#include "transformer/run/help.hpp"

namespace transformer {
namespace {

using S = Settings;

/// A common row, to be changed for llama.
Setting& row(SettingsTable& t, std::string_view name) {
  return *std::find_if(t.rows.begin(), t.rows.end(), [&](Setting const& each) { return each.name == name; });
}

std::vector<Setting> llama_settings() {
  SettingsTable t;
  add_run(t);
  t.heading = "Folders and start";
  t.optional_text(
      "model", &S::model, in::train | in::sample | in::bench | in::plan | in::prepare | in::exporting | in::of_run,
      "HuggingFace folder of the model to begin with: config.json, safetensors and tokenizer.json or tokenizer.model. "
      "bench and plan read config.json only. sample: a model to use instead of out_dir. sample and export of a run "
      "with "
      "adapters: the new place of its model, if that was moved");
  t.choice("init_from", &S::init_from, in::train,
           "model: begin with the weights in --model; resume: continue the run in out_dir (each of its settings that "
           "is not given here is kept); auto: resume if out_dir has a checkpoint, else model",
           {"model", "resume", "auto"});
  add_start(t);
  add_data(t);
  t.flag("add_eos", &S::add_eos, in::prepare,
         "end each document with the end-of-text token, if the model's tokenizer does not do so itself");
  t.rows.back().may_stand_alone = true;
  add_batches(t);
  add_optimizer(t);
  t.choice("lr_schedule", &S::lr_schedule, in::train | in::of_run, "shape of the learning rate's decay after warm-up",
           {"linear", "cosine"});
  add_ranks(t);
  add_sharding(t);
  add_tuning(t);
  t.text("lora_targets", &S::lora_targets, in::training | in::of_run,
         "linear layers with adapters, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "
         "down_proj; or all");
  add_logs(t);
  add_samples(t);
  add_measurement(t);
  t.heading = "Export";
  t.choice("format", &S::format, in::exporting,
           "format of the export: huggingface (the whole model; adapters are merged), or peft (adapters alone)",
           {"huggingface", "peft"});
  t.positive("max_shard_gb", &S::max_shard_gb, in::exporting,
             "largest file of weights, in GB (10^9 bytes): a larger model becomes several files with an index");
  add_files(t);

  row(t, "decay_lr").help = "decay the learning rate after warm-up, as lr_schedule says; false: keep it constant";
  row(t, "block_size").of_run = true;
  row(t, "start").may_be_empty = true;
  row(t, "stop_at_end").help =
      "end a sample at a token that ends texts: the tokenizer's, or one of eos_token_id in "
      "generation_config.json or config.json";
  auto& end = row(t, "lr_decay_iters");
  end.help = "iteration at which the learning rate reaches min_lr; 0: max_iters";
  end.low = 0;
  return t.rows;
}

}  // namespace

void set_defaults(Settings& settings) {
  settings.init_from = "model";
  settings.dataset = "texts";
  settings.gradient_accumulation_steps = 1;
  settings.batch_size = 4;
  settings.block_size = 512;
  settings.learning_rate = 2e-5;
  settings.min_lr = 0;
  settings.warmup_iters = 0;
  settings.lr_decay_iters = 0;
  settings.lr_schedule = "linear";
  settings.max_iters = 1000;
  settings.eval_interval = 100;
  settings.eval_iters = 10;
  settings.weight_decay = 0;
  settings.beta2 = 0.999;
  settings.temperature = 0.8;
  settings.max_new_tokens = 200;
  settings.num_samples = 1;
  settings.start.clear();
  settings.stop_at_end = true;
}

ProgramText const& program_text() {
  static constexpr ProgramText text{
      "llama fine-tunes Llama models from HuggingFace's folders, fully sharded over processes or threads.",
      "  llama prepare --model=MODEL --dataset=chess --data=games.jsonl\n"
      "  llama plan --model=MODEL --ranks=2\n"
      "  mpirun -n 2 llama train --model=MODEL --dataset=chess --gradient_accumulation_steps=2 --out_dir=out\n"
      "  llama sample --out_dir=out --start=\"1. e4\"\n"
      "  llama export --out_dir=out --to=tuned\n"};
  return text;
}

std::vector<Setting> const& all_settings() {
  static std::vector<Setting> const table = llama_settings();
  return table;
}

}  // namespace transformer
