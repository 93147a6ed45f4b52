// SPDX-License-Identifier: Apache-2.0
// The values of a trainer's settings, and where they came from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace transformer {

/// The subcommands; a setting says in which of them it exists.
enum class Command : unsigned { train = 1, sample = 2, bench = 4, prepare = 8, export_ = 16, report = 32, plan = 64 };

/// The settings of all trainers, with their defaults. A trainer's table says which of them it has, and under what name.
struct Settings {
  // files and reporting
  std::string out_dir = "out";
  std::int64_t eval_interval = 2000;
  std::int64_t log_interval = 1;
  std::int64_t eval_iters = 200;
  bool eval_only = false;
  bool always_save_checkpoint = true;
  std::int64_t checkpoint_interval = 0;  ///< iterations between checkpoints; 0: eval_interval
  std::int64_t keep_last = 2;
  bool async_checkpoint = true;
  std::int64_t snapshot_interval = 0;  ///< iterations between snapshots; 0: none
  std::string snapshot_folder;         ///< in the memory of each node; empty: none
  std::string init_from = "scratch";
  bool overwrite = false;
  std::string model_dir = "models";
  std::string model;  ///< the folder of a model; empty: init_from says what training begins with
  std::string log_json;
  std::int64_t sample_interval = 0;  ///< 0: no samples
  std::int64_t sample_tokens = 200;
  std::string trace;  ///< empty: no trace
  std::int64_t trace_steps = 3;
  // data
  std::string dataset = "openwebtext";
  std::string train_data;  ///< a file, a pattern or a folder of token files; empty: those of `dataset`
  std::string val_data;    ///< the same for validation, empty: beside the training files; prepare: a text or documents
  std::string data;        ///< prepare: the text file, or the folder of documents
  std::string tokenizer = "char";
  std::string encoder_json, vocab_bpe;  ///< empty: none
  double val_fraction = 0.1;
  bool add_eos = false;  ///< prepare: the end-of-text token ends each row
  std::string sampling = "epoch";
  std::int64_t gradient_accumulation_steps = 40;
  std::int64_t batch_size = 12;
  std::int64_t block_size = 1024;
  // model
  std::int64_t n_layer = 12;
  std::int64_t n_head = 12;
  std::int64_t n_embd = 768;
  double dropout = 0.0;
  bool bias = false;
  // optimizer
  double learning_rate = 6e-4;
  std::int64_t max_iters = 600000;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double grad_clip = 1.0;
  std::int64_t max_skipped_steps = 10;  ///< in a row, whose gradient norm is not finite: training stops
  bool decay_lr = true;
  std::int64_t warmup_iters = 2000;
  std::int64_t lr_decay_iters = 600000;
  double min_lr = 6e-5;
  std::string lr_schedule = "cosine";  ///< after warm-up; without effect if decay_lr is false
  // system
  std::string device;  ///< empty: cuda if it was built and a GPU is there, else cpu
  std::string dtype;   ///< empty: the device's default
  bool measure_dtype = false;
  std::int64_t seed = 1337;
  std::int64_t ranks = 1;
  std::int64_t threads = 0;  ///< of a rank on the host, or of prepare; 0: auto
  std::string comm = "auto";
  bool share_gpu = false;
  double collective_timeout = 600.0;
  double peak_tflops = 0;  ///< of a GPU, or of a rank on the host; 0: by the data sheet, or measured
  // sharding
  std::string strategy = "full_shard";
  std::int64_t shard_group = 0;
  std::string reshard_after_forward;  ///< empty: as the strategy says
  std::string wrap = "block";
  std::int64_t min_params = 100'000'000;
  std::int64_t prefetch = 1;
  double bucket_mb = 25.0;
  std::string activation_checkpointing = "false";
  std::int64_t recompute_segment = 1;
  std::string reduce_dtype;  ///< empty: float32
  std::string offload = "none";
  bool cpu_offload = false;  ///< moments, and masters if there are any
  // fine-tuning
  std::int64_t lora_rank = 0;  ///< 0: no adapters
  double lora_alpha = 16.0;
  std::string lora_targets = "all";  ///< linear layers with adapters, separated by commas
  /// Lowest blocks that are frozen, with the embeddings. Below 0: all blocks but this many last ones. 0: none.
  std::int64_t freeze_layers = 0;
  // settings of nanoGPT without effect
  bool compile = true;
  std::string backend = "nccl";
  bool wandb_log = false;
  std::string wandb_project = "owt", wandb_run_name = "gpt2";
  // sample
  std::string start = "\n";
  std::int64_t num_samples = 10;
  std::int64_t max_new_tokens = 500;
  double temperature = 0.8;
  std::int64_t top_k = 200;
  double top_p = 1.0;
  bool stop_at_end = false;
  std::string checkpoint;  ///< export too; empty: out_dir's model.safetensors
  // export
  std::string format = "huggingface";
  double max_shard_gb = 5.0;  ///< of a file of weights, 10^9 bytes
  // bench
  std::int64_t burn_in = 10;
  std::int64_t timed = 20;
  bool pieces = false;
  std::string batch_sizes;  ///< empty: batch_size alone
  std::string json;
  // plan
  std::int64_t gpus = 0;  ///< 0: ranks
  std::string hardware;   ///< empty: memory alone
  // report
  std::vector<std::string> runs;  ///< folders; not a setting of its own
  std::string to, svg, csv;       ///< files; `to` empty: report.html in the first folder. export: a folder
  bool watch = false;
  bool verbose = false;  ///< notes on the measured peak

  std::vector<std::string> given;   ///< settings that a config file or the command line has set
  std::vector<std::string> of_run;  ///< settings that were not given and come from the run that is resumed
  std::vector<std::string> chosen;  ///< settings that the program has chosen for these ranks, because nothing set them
  std::vector<std::string> former_names;  ///< former names of settings that this start used, each once
  /// Tokens of an iteration on all ranks together.
  std::int64_t tokens_per_step() const { return gradient_accumulation_steps * batch_size * block_size; }
  bool was_given(std::string_view name) const { return contains(given, name); }
  bool is_of_run(std::string_view name) const { return contains(of_run, name); }
  bool was_chosen(std::string_view name) const { return contains(chosen, name); }

 private:
  static bool contains(std::vector<std::string> const& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

/// Whether training continues a run if there is one in out_dir.
bool may_resume(Settings const& settings);
/// init_from is auto or auto:WEIGHTS: training that finds no checkpoint in out_dir starts without one.
bool is_auto(Settings const& settings);
/// Initial weights if training resumes no run: scratch, or a name of weights: the setting `model` if it is there. With
/// resume: "resume".
std::string first_start(Settings const& settings);
/// Whether a start names weights: it is neither scratch nor resume.
bool names_weights(std::string_view start);

/// The defaults of a subcommand: those of the program, but `sample` resumes, and `prepare` has no data set to replace.
Settings defaults(Command command);
/// The defaults of a program's settings where they differ from Settings'. Each program defines it.
void set_defaults(Settings& settings);

}  // namespace transformer
