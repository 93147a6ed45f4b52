// SPDX-License-Identifier: Apache-2.0
// Every setting of the trainer: its name, its default, what it may be, and where its value came from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fsdp/step/step_input.hpp"
#include "transformer/run/learning_rate.hpp"
#include "transformer/tuning/tuning.hpp"

namespace nanogpt {

using namespace transformer;

/// The subcommands; a setting says in which of them it exists.
enum class Command : unsigned { train = 1, sample = 2, bench = 4, prepare = 8, export_ = 16, report = 32 };

/// All settings with their defaults. Names are nanoGPT's where nanoGPT has one.
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
  std::string init_from = "scratch";
  bool overwrite = false;
  std::string model_dir = "models";
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
  bool decay_lr = true;
  std::int64_t warmup_iters = 2000;
  std::int64_t lr_decay_iters = 600000;
  double min_lr = 6e-5;
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
  std::int64_t train_layers = 0;  ///< 0: everything trains
  // nanoGPT's that mean nothing here
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
  // bench
  std::int64_t burn_in = 10;
  std::int64_t timed = 20;
  bool pieces = false;
  std::string json;
  // report
  std::vector<std::string> runs;  ///< folders; not a setting of its own
  std::string to, svg, csv;       ///< files; `to` empty: report.html in the first folder. export: a folder
  bool watch = false;

  std::vector<std::string> given;   ///< settings that a config file or the command line has set
  std::vector<std::string> of_run;  ///< settings that were not given and come from the run that is resumed
  std::vector<std::string> chosen;  ///< settings that the program has chosen for these ranks, because nothing set them
  bool was_given(std::string_view name) const { return contains(given, name); }
  bool is_of_run(std::string_view name) const { return contains(of_run, name); }
  bool was_chosen(std::string_view name) const { return contains(chosen, name); }

 private:
  static bool contains(std::vector<std::string> const& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
};

/// One row of the table of settings.
struct Setting {
  using Member = std::variant<bool Settings::*, std::int64_t Settings::*, double Settings::*, std::string Settings::*>;

  std::string_view name;
  Member member;
  unsigned commands = 0;  ///< the Commands that have it, or-ed
  std::string_view help;
  std::string_view group{};  ///< its heading in --help
  bool listed = true;        ///< false: its other value is always refused, so --help leaves it out
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_excluded = false;
  bool high_excluded = false;
  bool may_be_empty = false;              ///< texts only
  std::vector<std::string_view> choices;  ///< texts only: the values allowed
  std::string_view refused_choice{};      ///< texts only: read, and refused later with a reason of its own
  std::string_view word_for_zero{};       ///< whole numbers only: how 0 is written
  bool may_stand_alone = false;           ///< flags only: `--name` means `--name=true`
  bool of_run = false;                    ///< resuming takes the run's value, unless this start gives one
  std::string_view part_of{};  ///< a setting's name; if that differs from the run's, this one is not taken from the run

  bool exists_in(Command command) const { return (commands & static_cast<unsigned>(command)) != 0; }
  /// What a value must be, in words.
  std::string expected() const;
  /// The value in `settings`, as it would be written.
  std::string text_of(Settings const& settings) const;
  /// Gives `to` the value that `from` has.
  void copy(Settings const& from, Settings& to) const;
};

/// Whether training continues a run if there is one in out_dir.
bool may_resume(Settings const& settings);
/// init_from is auto or auto:WEIGHTS: training that finds no checkpoint in out_dir starts without one.
bool is_auto(Settings const& settings);
/// What training starts from if it resumes no run: scratch, or what names weights. With resume: "resume".
std::string first_start(Settings const& settings);

/// The defaults of a subcommand: those of Settings, but `sample` resumes.
Settings defaults(Command command);

/// The table, in the order of --help within each group.
std::vector<Setting> const& all_settings();
/// @return nullptr if there is no setting of that name
Setting const* find_setting(std::string_view name);
/// The setting whose name is most like `name`, for messages. @return "" if none is like it
std::string_view nearest_setting(std::string_view name, Command command);
/// Layers whose activations backward computes again: n_layer, 0, or as many as the setting says.
std::int64_t checkpointed_layers(Settings const& settings);
/// @param has_masters  parameters are narrower than fp32
/// @throws fsdp::ConfigError if `offload` names something else, or masters that there are not
fsdp::Offloaded offloaded(Settings const& settings, bool has_masters);
/// recompute_segment: so many of those are computed again together, from the input of the first.
/// @param unit_layers  see layers_in_unit
/// @throws fsdp::ConfigError if there are no such layers, or fewer, or if segments would cut units
std::int64_t segment_layers(Settings const& settings, std::int64_t unit_layers);
/// learning_rate, min_lr, warmup_iters, lr_decay_iters and decay_lr.
inline LearningRate learning_rate(Settings const& settings) {
  return {settings.learning_rate, settings.min_lr, settings.warmup_iters, settings.lr_decay_iters, settings.decay_lr};
}
/// lora_rank, lora_alpha and train_layers: what trains.
Tuning tuning_of(Settings const& settings);
/// reshard_after_forward: what becomes of a unit when its forward has ended.
struct Resharding {
  bool drops = true;       ///< false: it stays until after backward
  std::int64_t ranks = 0;  ///< above 0: it stays sharded over so many ranks
};
/// @throws fsdp::ConfigError if the setting says nothing, or does not go with the strategy
Resharding resharding(Settings const& settings);
/// Neighbouring layers that share a unit, as wrap and min_params say; 0: all, with embeddings and head.
/// @param layer_parameters  parameters of a layer
std::int64_t layers_in_unit(Settings const& settings, std::int64_t layer_parameters);
/// reduce_dtype: what ranks sum gradients in.
inline std::string_view summed_in(Settings const& settings) {
  return settings.reduce_dtype.empty() ? "float32" : std::string_view(settings.reduce_dtype);
}
/// What of the settings that were given nothing will be done with, or not what their names say, as lines to be printed.
/// @param ranks        in the world
/// @param shares_gpus  there are fewer GPUs than processes
std::vector<std::string> notes_on(Settings const& settings, std::int64_t ranks, bool shares_gpus);

/// Reads `text` into the setting. @param origin where the text comes from, for the message
/// @throws fsdp::ConfigError naming the setting, what was expected and what came
void assign(Settings& settings, Setting const& setting, std::string_view text, std::string_view origin);

/// Takes collective_timeout from FSDP_TIMEOUT, the library's variable, unless a config file or the command line has set
/// it.
/// @throws fsdp::ConfigError as `assign`
void apply_environment(Settings& settings, Command command);

/// Applies the `name = value` lines of a config file; `#` begins a comment, quotes around a value are dropped.
/// One file serves all subcommands, so it may set what only another of them reads.
/// @param label  what messages call the file
/// @throws fsdp::ConfigError naming file and line
void apply_config_text(Settings& settings, std::string_view text, std::string_view label);

/// Applies a config file: a path, or the name of a shipped config (with or without ".py").
/// @throws fsdp::ConfigError if neither exists
void apply_config_file(Settings& settings, std::string const& file);

/// Checks what needs more than one setting at a time.
/// @param ranks  ranks in the world
/// @throws fsdp::ConfigError naming the settings
void check_together(Settings const& settings, Command command, std::int64_t ranks);

}  // namespace nanogpt
