// SPDX-License-Identifier: Apache-2.0
// nanogpt's settings, in the order of --help within each group.
#include <vector>

#include "transformer/run/common_rows.hpp"
#include "transformer/run/help.hpp"

namespace transformer {
namespace {

using S = Settings;

std::vector<Setting> nanogpt_settings() {
  SettingsTable t;
  add_run(t);
  t.heading = "Folders and start";
  t.text(
      "init_from", &S::init_from, in::train | in::sample,
      "initial weights. scratch: random; resume: the run in out_dir (train keeps each of its settings that is not "
      "given here); auto: resume if out_dir has a checkpoint, else scratch; gpt2, gpt2-medium, gpt2-large, gpt2-xl; a "
      "folder with safetensors and config.json; a model file of llm.c; auto:WEIGHTS: resume if out_dir has a "
      "checkpoint, else these weights. sample takes neither scratch nor auto");
  add_start(t);
  t.optional_text("model_dir", &S::model_dir, in::train | in::sample,
                  "folder with the subfolders gpt2, gpt2-medium, ...; searched before HuggingFace's cache");
  add_data(t);
  t.choice("tokenizer", &S::tokenizer, in::prepare, "tokenizer: characters, or GPT-2's byte pairs", {"char", "gpt2"});
  t.optional_text("encoder_json", &S::encoder_json, in::prepare | in::sample | in::exporting,
                  "file of GPT-2's tokens: encoder.json, or HuggingFace's vocab.json");
  t.optional_text("vocab_bpe", &S::vocab_bpe, in::prepare | in::sample | in::exporting,
                  "file of GPT-2's merges: vocab.bpe, or HuggingFace's merges.txt");
  add_batches(t);
  t.heading = "Model";
  t.count("n_layer", &S::n_layer, in::training, "transformer blocks", 1, 10'000);
  t.count("n_head", &S::n_head, in::training, "attention heads of a block", 1, 10'000);
  t.count("n_embd", &S::n_embd, in::training, "width of the model", 1, 1'000'000);
  t.fraction("dropout", &S::dropout, in::training | in::of_run, "probability of dropping an activation");
  t.flag("bias", &S::bias, in::training, "biases in linear layers and norms");
  add_optimizer(t);
  add_ranks(t);
  add_sharding(t);
  add_tuning(t);
  t.heading = "Settings of nanoGPT (accepted, without effect)";
  t.flag("compile", &S::compile, in::computing, "nanogpt compiles nothing at run time");
  t.text("backend", &S::backend, in::train | in::bench, "use --comm instead");
  t.flag("wandb_log", &S::wandb_log, in::train, "use --log_json=FILE instead");
  t.text("wandb_project", &S::wandb_project, in::train, "unused");
  t.text("wandb_run_name", &S::wandb_run_name, in::train, "unused");
  add_logs(t);
  add_samples(t);
  t.heading = "Export";
  t.choice("format", &S::format, in::exporting,
           "format of the export: huggingface, llm.c, or nanogpt (a folder as training writes it)",
           {"huggingface", "llm.c", "nanogpt"});
  add_measurement(t);
  t.heading = "Plan";
  t.count("gpus", &S::gpus, in::plan, "number of GPUs of a planned run, one rank each (default: ranks)", 1, 1'000'000);
  t.optional_text(
      "hardware", &S::hardware, in::plan,
      "file that describes the GPUs, their nodes and network, as examples/nanogpt/deploy/hardware/dgx_h100.txt: "
      "plan searches for the fastest strategy, shard_group, prefetch and activation_checkpointing that fit, "
      "and keeps those that are given");
  t.optional_text("model", &S::model, in::plan,
                  "model to plan for: gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder with config.json, or "
                  "LAYERSxHEADSxWIDTH, such as 80x64x8192 (default: n_layer, n_head and n_embd)");
  add_files(t);
  return t.rows;
}

}  // namespace

void set_defaults(Settings&) {}

ProgramText const& program_text() {
  static constexpr ProgramText text{
      "nanogpt trains GPT models, fully sharded over processes or threads. Its settings are nanoGPT's.",
      "  nanogpt prepare --dataset=shakespeare_char --data=tinyshakespeare.txt\n"
      "  mpirun -n 2 nanogpt train train_shakespeare_char_cpu --gradient_accumulation_steps=2 --out_dir=out\n"
      "  nanogpt sample --out_dir=out\n"
      "  nanogpt report out\n"};
  return text;
}

std::vector<Setting> const& all_settings() {
  static std::vector<Setting> const table = nanogpt_settings();
  return table;
}

}  // namespace transformer
