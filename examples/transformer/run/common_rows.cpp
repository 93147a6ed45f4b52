// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/common_rows.hpp"

namespace transformer {

using S = Settings;

void add_run(SettingsTable& t) {
  t.heading = "Folders and start";
  t.text("out_dir", &S::out_dir, in::train | in::sample | in::exporting, "folder of the run: checkpoints, model, log");
  t.heading = "Evaluation and logging";
  t.count("eval_interval", &S::eval_interval, in::train | in::of_run, "iterations between evaluations");
  t.count("log_interval", &S::log_interval, in::train | in::of_run, "iterations between log lines");
  t.count("eval_iters", &S::eval_iters, in::train | in::of_run, "batches of an evaluation, for each of the two splits");
  t.flag("eval_only", &S::eval_only, in::train, "stop after the first evaluation");
  t.heading = "Checkpoints";
  t.flag("always_save_checkpoint", &S::always_save_checkpoint, in::train | in::of_run,
         "save at every evaluation, not only at a better one");
  t.count("checkpoint_interval", &S::checkpoint_interval, in::train | in::of_run,
          "iterations between checkpoints; 0: eval_interval", 0);
  t.count("keep_last", &S::keep_last, in::train | in::of_run, "number of checkpoints to keep, besides the best one", 1,
          1'000'000);
  t.flag("async_checkpoint", &S::async_checkpoint, in::train | in::of_run,
         "write checkpoints in the background, from a copy in host memory");
  t.count("snapshot_interval", &S::snapshot_interval, in::train,
          "iterations between snapshots in the memory of the nodes, from which a run resumes if ranks or a node are "
          "lost; 0: none",
          0);
  t.optional_text(
      "snapshot_folder", &S::snapshot_folder, in::train,
      "folder for snapshots in each node's memory, such as /dev/shm/NAME; only its owner may enter it. Give it "
      "again to resume the run");
}

void add_start(SettingsTable& t) {
  t.optional_text(
      "checkpoint", &S::checkpoint, in::train | in::sample | in::exporting,
      "a checkpoint: best, latest, or its folder. train: continue from it (with init_from=resume; default: latest); "
      "sample, export: use its weights instead of out_dir's model.safetensors");
  t.flag("overwrite", &S::overwrite, in::train | in::exporting,
         "train: start a new run in an out_dir that holds one already; the old run is kept until the new run's first "
         "checkpoint is complete. "
         "export: replace the model in the folder --to");
  t.rows.back().may_stand_alone = true;
}

void add_data(SettingsTable& t) {
  t.heading = "Data and batches";
  t.text("dataset", &S::dataset, in::train | in::bench | in::prepare | in::of_run,
         "folder in data/ with train.bin and val.bin");
  t.optional_text(
      "train_data", &S::train_data, in::train | in::bench | in::of_run,
      "token files for training instead of the data set's: a file, a pattern such as 'web_train_*.bin', or a "
      "folder");
  t.rows.back().part_of = "dataset";
  t.optional_text("val_data", &S::val_data, in::train | in::bench | in::prepare | in::of_run,
                  "token files for evaluations: a file, a pattern or a folder (default: beside the training files). "
                  "prepare: separate text or documents for validation, in the forms of --data");
  t.rows.back().part_of = "dataset";
  t.text("data", &S::data, in::prepare,
         "text file to prepare, or documents: lines of JSON objects with a \"text\", or a folder with .txt and .jsonl "
         "files. -: "
         "standard input");
}

void add_batches(SettingsTable& t) {
  t.fraction("val_fraction", &S::val_fraction, in::prepare,
             "fraction of a text's characters, or of the documents, that goes to val.bin. 0: no val.bin is written");
  t.choice("sampling", &S::sampling, in::train | in::bench | in::of_run,
           "order of sequences: epoch uses each block of the text once per epoch; random draws as nanoGPT does",
           {"epoch", "random"});
  t.count("gradient_accumulation_steps", &S::gradient_accumulation_steps, in::training | in::of_run,
          "micro-steps of an iteration, in total over all ranks", 1, 1'000'000);
  t.count("batch_size", &S::batch_size, in::training | in::of_run, "sequences of a micro-step on one rank", 1,
          1'000'000);
  t.count("block_size", &S::block_size, in::training, "tokens of a sequence", 1, 1'000'000);
}

void add_optimizer(SettingsTable& t) {
  t.heading = "Optimizer";
  t.positive("learning_rate", &S::learning_rate, in::train | in::of_run, "highest learning rate");
  t.count("max_iters", &S::max_iters, in::train | in::of_run, "iterations to train");
  t.non_negative("weight_decay", &S::weight_decay, in::train | in::of_run,
                 "AdamW's decay, of tensors with two or more dimensions");
  t.fraction("beta1", &S::beta1, in::train | in::of_run, "AdamW's decay of the first moment");
  t.fraction("beta2", &S::beta2, in::train | in::of_run, "AdamW's decay of the second moment");
  t.non_negative("grad_clip", &S::grad_clip, in::train | in::of_run,
                 "largest gradient norm; 0: no clipping, and the norm is not measured");
  t.count("max_skipped_steps", &S::max_skipped_steps, in::train | in::of_run,
          "training stops with an error after this number of steps in a row that the optimizer skipped, because the "
          "gradient norm was not finite",
          1, 1'000'000'000);
  t.flag("decay_lr", &S::decay_lr, in::train | in::of_run,
         "decay the learning rate by a cosine schedule after warm-up; false: constant");
  t.count("warmup_iters", &S::warmup_iters, in::train | in::of_run, "iterations of linear warm-up", 0);
  t.count("lr_decay_iters", &S::lr_decay_iters, in::train | in::of_run,
          "iteration at which the learning rate reaches min_lr");
  t.non_negative("min_lr", &S::min_lr, in::train | in::of_run, "lowest learning rate");
}

void add_ranks(SettingsTable& t) {
  t.heading = "Ranks and devices";
  t.choice("device", &S::device, in::computing | in::plan,
           "device of the computation (default: cuda if there is a GPU, else cpu)", {"cpu", "cuda"});
  t.choice("dtype", &S::dtype, in::computing | in::exporting | in::plan,
           "element type of the computation. Default: the type of the resumed run, else bfloat16 on cuda and float32 "
           "on cpu. Processors without bf16 instructions compute in float32. fastest: bfloat16 on cuda; on cpu the "
           "type that was faster when measured. export: type of the file (float32)",
           {"float32", "bfloat16", "fastest"});
  t.rows.back().refused_choice = "float16";
  t.flag("measure_dtype", &S::measure_dtype, in::computing,
         "with dtype=fastest: measure again instead of using the rates that an earlier run stored");
  t.count("seed", &S::seed, in::computing | in::of_run, "seed of initial weights, batches, dropout and samples", 0,
          1'000'000'000'000'000);
  t.count("ranks", &S::ranks, in::computing | in::plan, "number of ranks as threads of this process (without mpirun)",
          1, 64);
  t.count("threads", &S::threads, in::computing | in::prepare,
          "threads of each rank on the host, or of prepare; auto or 0: the cores available to this process, divided by "
          "the machine's ranks",
          0, 256);
  t.rows.back().word_for_zero = "auto";
  t.choice("comm", &S::comm, in::computing,
           "communicator between ranks: mpi for processes on the host, nccl for processes with GPUs, local for "
           "threads; auto: by device and launcher",
           {"auto", "nccl", "local", "mpi"});
  t.flag("share_gpu", &S::share_gpu, in::computing, "allow several processes per GPU; slow, for trials");
  t.positive("collective_timeout", &S::collective_timeout, in::computing,
             "seconds that a rank waits for other ranks (default: FSDP_TIMEOUT if it is set)");
  t.non_negative(
      "peak_tflops", &S::peak_tflops, in::train | in::bench,
      "peak to which mfu is relative: TFLOP/s of one GPU, or of one rank on the host; 0: from the data sheet, or "
      "measured at the start (default: FSDP_PEAK_TFLOPS if it is set). A higher rate that is reached replaces "
      "it");
}

void add_sharding(SettingsTable& t) {
  t.heading = "Sharding";
  t.choice("strategy", &S::strategy, in::computing | in::plan | in::of_run,
           "parts of the training state to shard; see docs/strategies.md",
           {"full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "ddp"});
  t.count("shard_group", &S::shard_group, in::computing | in::plan | in::of_run,
          "ranks per shard group of hybrid_shard (default on several machines: the ranks of one machine)");
  t.rows.back().part_of = "strategy";
  t.optional_text("reshard_after_forward", &S::reshard_after_forward, in::training | in::of_run,
                  "after forward, true frees a unit's gathered parameters, false keeps them (as shard_grad_op), and a "
                  "number keeps them sharded over this many ranks (default: as the strategy says)");
  t.rows.back().part_of = "strategy";
  t.choice("wrap", &S::wrap, in::training | in::of_run,
           "parameters of a unit, which is gathered as a whole: block (a transformer block), size "
           "(neighbouring blocks with at least min_params), or model (everything)",
           {"block", "size", "model"});
  t.count("min_params", &S::min_params, in::training | in::of_run, "wrap=size: minimum number of parameters per unit",
          1, 1'000'000'000'000);
  t.count("prefetch", &S::prefetch, in::computing | in::plan | in::of_run,
          "number of units that are gathered ahead of their computation", 0, 1000);
  t.positive("bucket_mb", &S::bucket_mb, in::training | in::of_run, "size of no_shard's gradient buckets in MiB");
  t.text("activation_checkpointing", &S::activation_checkpointing, in::training | in::of_run,
         "compute activations again in backward instead of keeping them: false, true, or a number of layers. bench and "
         "plan also take both: a line for false and one for true");
  t.rows.back().may_stand_alone = true;
  t.rows.back().former_name = "gradient_checkpointing";
  t.count("recompute_segment", &S::recompute_segment, in::training | in::of_run,
          "activation_checkpointing: number of consecutive layers that are computed again together, from the input of "
          "the first",
          1, 100000);
  t.rows.back().part_of = "activation_checkpointing";
  t.choice("reduce_dtype", &S::reduce_dtype, in::training | in::of_run,
           "element type in which ranks sum gradients (default: float32 for every dtype)", {"float32", "bfloat16"});
  t.text("offload", &S::offload, in::training | in::of_run,
         "state kept in host memory; the device holds that of two units: none, or some of moments, masters (with "
         "dtype=bfloat16) and gradients, separated by commas");
  t.flag("cpu_offload", &S::cpu_offload, in::training | in::of_run, "offload=moments, and masters with dtype=bfloat16");
  t.rows.back().listed = false;
}

void add_tuning(SettingsTable& t) {
  t.heading = tuning_heading;
  t.count("lora_rank", &S::lora_rank, in::training | in::of_run,
          "rank of adapters (LoRA) for linear layers of all blocks; everything else is frozen; 0: no adapters", 0,
          65536);
  t.rows.back().former_name = "lora_r";
  t.positive("lora_alpha", &S::lora_alpha, in::training | in::of_run,
             "an adapter's product is multiplied by lora_alpha / lora_rank");
  t.count("freeze_layers", &S::freeze_layers, in::training | in::of_run,
          "freeze the embeddings and this many lowest layers; -N: all layers but the last N; 0: train everything",
          -10'000, 10'000);
  t.rows.back().former_name = "train_layers";
  t.rows.back().former_is_negative = true;
}

void add_logs(SettingsTable& t) {
  t.heading = "Evaluation and logging";
  t.count(
      "sample_interval", &S::sample_interval, in::train | in::of_run,
      "iterations between text samples from the model, which go to the output, the log and the report; 0: no samples",
      0);
  t.count("sample_tokens", &S::sample_tokens, in::train | in::of_run, "tokens of such a sample", 1, 1'000'000);
  t.optional_text("log_json", &S::log_json, in::train, "output file: one JSON object per printed line");
  t.optional_text("trace", &S::trace, in::train, "output file: a Chrome trace of some steps, of all ranks");
  t.count("trace_steps", &S::trace_steps, in::train, "number of traced steps, after two warm-up steps", 1, 10'000);
  t.flag("verbose", &S::verbose, in::train | in::bench,
         "also print when the peak to which mfu is relative is measured again or exceeded");
  t.rows.back().may_stand_alone = true;
}

void add_samples(SettingsTable& t) {
  t.heading = "Samples";
  t.text("start", &S::start, in::sample, "the text to continue, or FILE:path");
  t.count("num_samples", &S::num_samples, in::sample, "samples to draw", 1, 1'000'000);
  t.count("max_new_tokens", &S::max_new_tokens, in::sample, "tokens of a sample", 1, 1'000'000);
  t.non_negative("temperature", &S::temperature, in::sample,
                 "divides the logits: below 1 samples are less random; 0: always the most likely token");
  t.count("top_k", &S::top_k, in::sample, "draw from the k most likely tokens");
  auto& top_p =
      t.add("top_p", &S::top_p, in::sample, "draw from the most likely tokens with this total probability; 1: all");
  top_p.low = 0;
  top_p.low_excluded = true;
  top_p.high = 1;
  t.flag("stop_at_end", &S::stop_at_end, in::sample, "end a sample at <|endoftext|>");
}

void add_measurement(SettingsTable& t) {
  t.heading = "Measurement";
  t.count("burn_in", &S::burn_in, in::bench, "warm-up steps", 0, 1'000'000);
  t.count("timed", &S::timed, in::bench, "timed steps", 1, 1'000'000);
  t.flag("pieces", &S::pieces, in::bench,
         "read a number of steps from each line of standard input, run them, and print a line of JSON (see "
         "benchmarks/peers)");
  t.optional_text(
      "batch_sizes", &S::batch_sizes, in::bench | in::plan,
      "values of batch_size, separated by commas: a line for each. bench skips larger ones once one does not "
      "fit; plan takes 1 to 32 if none is given");
  t.optional_text("json", &S::json, in::bench, "output file: the results as one JSON object");
}

void add_files(SettingsTable& t) {
  t.heading = "Files";
  t.optional_text("to", &S::to, in::exporting | in::report,
                  "export: output folder; report: output file (default: report.html in the first folder)");
  t.optional_text("svg", &S::svg, in::report,
                  "output file: a picture of losses, and of a step if there is a trace, for a README");
  t.optional_text("csv", &S::csv, in::report, "output file: losses, norms and speeds as comma-separated values");
  t.flag("watch", &S::watch, in::report, "rewrite the page whenever the log grows, until Ctrl-C");
  t.rows.back().may_stand_alone = true;
}

}  // namespace transformer
