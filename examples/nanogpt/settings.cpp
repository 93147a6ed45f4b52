// SPDX-License-Identifier: Apache-2.0
// The table of settings, and the reading of their values.
#include "settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "config_files.hpp"
#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"

namespace nanogpt {
namespace {

constexpr unsigned train = static_cast<unsigned>(Command::train);
constexpr unsigned sample = static_cast<unsigned>(Command::sample);
constexpr unsigned bench = static_cast<unsigned>(Command::bench);
constexpr unsigned prepare = static_cast<unsigned>(Command::prepare);
constexpr unsigned exporting = static_cast<unsigned>(Command::export_);
constexpr unsigned report = static_cast<unsigned>(Command::report);
constexpr unsigned training = train | bench;
constexpr unsigned computing = train | sample | bench;
/// Beside the commands: resuming takes the setting from the run unless it is given. Others belong to the machine or to
/// this start, or the checkpoint itself says them: the model's shape and the element type.
constexpr unsigned of_run = 1u << 16;

/// Adds one row; the type of the member picks the overload of the table's columns that make sense.
class Table {
 public:
  Setting& add(std::string_view name, Setting::Member member, unsigned commands, std::string_view help) {
    Setting row{};
    row.name = name;
    row.member = member;
    row.commands = commands & ~of_run;
    row.of_run = (commands & of_run) != 0;
    row.help = help;
    row.group = heading;
    rows.push_back(row);
    return rows.back();
  }
  void text(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help);
  }
  void optional_text(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help).may_be_empty = true;
  }
  void choice(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help,
              std::vector<std::string_view> choices) {
    add(name, member, commands, help).choices = std::move(choices);
  }
  void flag(std::string_view name, bool Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help);
  }
  void count(std::string_view name, std::int64_t Settings::*member, unsigned commands, std::string_view help,
             std::int64_t low = 1, std::int64_t high = 1'000'000'000) {
    auto& row = add(name, member, commands, help);
    row.low = static_cast<double>(low);
    row.high = static_cast<double>(high);
  }
  void positive(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    auto& row = add(name, member, commands, help);
    row.low = 0;
    row.low_excluded = true;
  }
  void non_negative(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help).low = 0;
  }
  void fraction(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    auto& row = add(name, member, commands, help);
    row.low = 0;
    row.high = 1;
    row.high_excluded = true;
  }

  std::string_view heading;  ///< of the rows that follow
  std::vector<Setting> rows;
};

constexpr std::string_view auto_or = "auto:";  // weights follow

std::vector<Setting> make_table() {
  using S = Settings;
  Table t;
  t.heading = "Folders and start";
  t.text("out_dir", &S::out_dir, train | sample | exporting, "folder of the run: checkpoints, model, log");
  t.heading = "Evaluation and logging";
  t.count("eval_interval", &S::eval_interval, train | of_run, "iterations between evaluations");
  t.count("log_interval", &S::log_interval, train | of_run, "iterations between log lines");
  t.count("eval_iters", &S::eval_iters, train | of_run, "batches of an evaluation, for each of the two splits");
  t.flag("eval_only", &S::eval_only, train, "stop after the first evaluation");
  t.heading = "Checkpoints";
  t.flag("always_save_checkpoint", &S::always_save_checkpoint, train | of_run,
         "save at every evaluation, not only at a better one");
  t.count("checkpoint_interval", &S::checkpoint_interval, train | of_run,
          "iterations between checkpoints; 0: eval_interval", 0);
  t.count("keep_last", &S::keep_last, train | of_run, "number of checkpoints to keep, besides the best one", 1,
          1'000'000);
  t.flag("async_checkpoint", &S::async_checkpoint, train | of_run,
         "write checkpoints in the background, from a copy in host memory");
  t.heading = "Folders and start";
  t.text(
      "init_from", &S::init_from, train | sample,
      "initial weights. scratch: random; resume: the run in out_dir (train keeps each of its settings that is not "
      "given here); auto: resume if out_dir has a checkpoint, else scratch; gpt2, gpt2-medium, gpt2-large, gpt2-xl; a "
      "folder with safetensors and config.json; a model file of llm.c; auto:WEIGHTS: resume if out_dir has a "
      "checkpoint, else these weights. sample takes neither scratch nor auto");
  t.optional_text(
      "checkpoint", &S::checkpoint, train | sample | exporting,
      "a checkpoint: best, latest, or its folder. train: continue from it (with init_from=resume; default: latest); "
      "sample, export: use its weights instead of out_dir's model.safetensors");
  t.flag(
      "overwrite", &S::overwrite, train | exporting,
      "train: start a new run in an out_dir that holds one already: its first whole checkpoint replaces the old run; "
      "export: replace the model in the folder --to");
  t.rows.back().may_stand_alone = true;
  t.optional_text("model_dir", &S::model_dir, train | sample,
                  "folder with the subfolders gpt2, gpt2-medium, ...; searched before HuggingFace's cache");
  t.heading = "Data and batches";
  t.text("dataset", &S::dataset, train | bench | prepare | of_run, "folder in data/ with train.bin and val.bin");
  t.optional_text(
      "train_data", &S::train_data, training | of_run,
      "token files for training instead of the data set's: a file, a pattern such as 'web_train_*.bin', or a "
      "folder");
  t.rows.back().part_of = "dataset";
  t.optional_text("val_data", &S::val_data, training | prepare | of_run,
                  "token files for evaluations: a file, a pattern or a folder (default: beside the training files). "
                  "prepare: separate text or documents for validation, in the forms of --data");
  t.rows.back().part_of = "dataset";
  t.text(
      "data", &S::data, prepare,
      "text file to prepare, or documents: a .jsonl file, or a folder with .txt and .jsonl files. -: standard input");
  t.choice("tokenizer", &S::tokenizer, prepare, "tokens: characters, or GPT-2's byte pairs", {"char", "gpt2"});
  t.optional_text("encoder_json", &S::encoder_json, prepare | sample | exporting,
                  "file of GPT-2's tokens: encoder.json, or HuggingFace's vocab.json");
  t.optional_text("vocab_bpe", &S::vocab_bpe, prepare | sample | exporting,
                  "file of GPT-2's merges: vocab.bpe, or HuggingFace's merges.txt");
  t.fraction("val_fraction", &S::val_fraction, prepare,
             "fraction of a text's characters, or of the documents, that goes to val.bin. 0: no val.bin is written");
  t.choice("sampling", &S::sampling, training | of_run,
           "how sequences are drawn: epoch uses each block of the text once per epoch; random draws as nanoGPT does",
           {"epoch", "random"});
  t.count("gradient_accumulation_steps", &S::gradient_accumulation_steps, training | of_run,
          "micro-steps of an iteration, in total over all ranks", 1, 1'000'000);
  t.count("batch_size", &S::batch_size, training | of_run, "sequences of a micro-step on one rank", 1, 1'000'000);
  t.count("block_size", &S::block_size, training, "tokens of a sequence", 1, 1'000'000);
  t.heading = "Model";
  t.count("n_layer", &S::n_layer, training, "transformer blocks", 1, 10'000);
  t.count("n_head", &S::n_head, training, "attention heads of a block", 1, 10'000);
  t.count("n_embd", &S::n_embd, training, "width of the model", 1, 1'000'000);
  t.fraction("dropout", &S::dropout, training | of_run, "probability of dropping an activation");
  t.flag("bias", &S::bias, training, "biases in linear layers and norms");
  t.heading = "Optimizer";
  t.positive("learning_rate", &S::learning_rate, train | of_run, "highest learning rate");
  t.count("max_iters", &S::max_iters, train | of_run, "iterations to train");
  t.non_negative("weight_decay", &S::weight_decay, train | of_run,
                 "AdamW's decay, of tensors with two or more dimensions");
  t.fraction("beta1", &S::beta1, train | of_run, "AdamW's decay of the first moment");
  t.fraction("beta2", &S::beta2, train | of_run, "AdamW's decay of the second moment");
  t.non_negative("grad_clip", &S::grad_clip, train | of_run,
                 "largest gradient norm; 0: no clipping, and the norm is not measured");
  t.flag("decay_lr", &S::decay_lr, train | of_run,
         "decay the learning rate by a cosine schedule after warm-up; false: keep it constant");
  t.count("warmup_iters", &S::warmup_iters, train | of_run, "iterations of linear warm-up", 0);
  t.count("lr_decay_iters", &S::lr_decay_iters, train | of_run, "iteration at which the learning rate reaches min_lr");
  t.non_negative("min_lr", &S::min_lr, train | of_run, "lowest learning rate");
  t.heading = "Ranks and devices";
  t.choice("device", &S::device, computing, "where to compute (default: cuda if there is one, else cpu)",
           {"cpu", "cuda"});
  t.choice("dtype", &S::dtype, computing | exporting,
           "element type of the computation. Default: the type of the resumed run, else bfloat16 on cuda and float32 "
           "on cpu. Processors without bf16 instructions compute in float32. fastest: bfloat16 on cuda; on cpu the "
           "type that was faster when measured. export: type of the file (float32)",
           {"float32", "bfloat16", "fastest"});
  t.rows.back().refused_choice = "float16";
  t.flag("measure_dtype", &S::measure_dtype, computing,
         "with dtype=fastest: measure again instead of using the rates that an earlier run stored");
  t.count("seed", &S::seed, computing | of_run, "seed of initial weights, batches, dropout and samples", 0,
          1'000'000'000'000'000);
  t.count("ranks", &S::ranks, computing, "number of ranks as threads of this process (without mpirun)", 1, 64);
  t.count("threads", &S::threads, computing | prepare,
          "threads of each rank on the host, or of prepare; auto or 0: the cores available to this process, divided by "
          "the machine's ranks",
          0, 256);
  t.rows.back().word_for_zero = "auto";
  t.choice("comm", &S::comm, computing,
           "communicator between ranks: mpi for processes on the host, nccl for processes with GPUs, local for "
           "threads; auto: by device and launcher",
           {"auto", "nccl", "local", "mpi"});
  t.flag("share_gpu", &S::share_gpu, computing, "allow several processes per GPU; slow, for trials");
  t.positive("collective_timeout", &S::collective_timeout, computing,
             "seconds that a rank waits for other ranks (default: FSDP_TIMEOUT if it is set)");
  t.heading = "Sharding";
  t.choice("strategy", &S::strategy, computing | of_run, "what is sharded",
           {"full_shard", "shard_grad_op", "hybrid_shard", "no_shard", "ddp"});
  t.count("shard_group", &S::shard_group, computing | of_run,
          "ranks per shard group of hybrid_shard (default on several machines: the ranks of one machine)");
  t.rows.back().part_of = "strategy";
  t.optional_text("reshard_after_forward", &S::reshard_after_forward, training | of_run,
                  "after forward, true frees a unit's gathered parameters, false keeps them (as shard_grad_op), and a "
                  "number keeps them sharded over this many ranks (default: as the strategy says)");
  t.rows.back().part_of = "strategy";
  t.choice("wrap", &S::wrap, training | of_run,
           "which parameters form a unit, which is gathered as a whole: block (a transformer block), size "
           "(neighbouring blocks with at least min_params), or model (everything)",
           {"block", "size", "model"});
  t.count("min_params", &S::min_params, training | of_run, "wrap=size: minimum number of parameters per unit", 1,
          1'000'000'000'000);
  t.count("prefetch", &S::prefetch, computing | of_run, "number of units that are gathered ahead of their computation",
          0, 1000);
  t.positive("bucket_mb", &S::bucket_mb, training | of_run, "size of no_shard's gradient buckets in MiB");
  t.text("activation_checkpointing", &S::activation_checkpointing, training | of_run,
         "compute activations again in backward instead of keeping them: false, true, or a number of layers");
  t.count("recompute_segment", &S::recompute_segment, training | of_run,
          "activation_checkpointing: number of consecutive layers that are computed again together, from the input of "
          "the first",
          1, 100000);
  t.rows.back().part_of = "activation_checkpointing";
  t.choice("reduce_dtype", &S::reduce_dtype, training | of_run,
           "element type in which ranks sum gradients (default: float32 for every dtype)", {"float32", "bfloat16"});
  t.text("offload", &S::offload, training | of_run,
         "what lies in host memory instead of the device's: none, or some of moments, masters (with "
         "dtype=bfloat16) and gradients, separated by commas");
  t.flag("cpu_offload", &S::cpu_offload, training | of_run, "offload=moments, and masters with dtype=bfloat16");
  t.rows.back().listed = false;
  t.heading = "Fine-tuning";
  t.count("lora_rank", &S::lora_rank, training | of_run,
          "rank of adapters (LoRA) for the matrices of all blocks; everything else is frozen; 0: no adapters", 0,
          65536);
  t.positive("lora_alpha", &S::lora_alpha, training | of_run,
             "an adapter's product is multiplied by lora_alpha / lora_rank");
  t.count("train_layers", &S::train_layers, training | of_run,
          "train only this many last blocks and the final norm, and freeze the rest; 0: train everything", 0, 100000);
  t.heading = "Settings of nanoGPT (accepted, without effect)";
  t.flag("compile", &S::compile, computing, "nanoGPT's; there is nothing to compile");
  t.text("backend", &S::backend, training, "nanoGPT's; use --comm");
  t.flag("wandb_log", &S::wandb_log, train, "nanoGPT's; use --log_json=FILE");
  t.text("wandb_project", &S::wandb_project, train, "nanoGPT's, unused");
  t.text("wandb_run_name", &S::wandb_run_name, train, "nanoGPT's, unused");
  t.heading = "Evaluation and logging";
  t.count(
      "sample_interval", &S::sample_interval, train | of_run,
      "iterations between text samples from the model, which go to the output, the log and the report; 0: no samples",
      0);
  t.count("sample_tokens", &S::sample_tokens, train | of_run, "tokens of such a sample", 1, 1'000'000);
  t.optional_text("log_json", &S::log_json, train, "output file: one JSON object per printed line");
  t.optional_text("trace", &S::trace, train, "output file: a Chrome trace of some steps, of all ranks");
  t.count("trace_steps", &S::trace_steps, train, "number of traced steps, after two warm-up steps", 1, 10'000);
  t.heading = "Samples";
  t.text("start", &S::start, sample, "the text to continue, or FILE:path");
  t.count("num_samples", &S::num_samples, sample, "samples to draw", 1, 1'000'000);
  t.count("max_new_tokens", &S::max_new_tokens, sample, "tokens of a sample", 1, 1'000'000);
  t.non_negative("temperature", &S::temperature, sample, "below 1: less random; 0: always the most likely token");
  t.count("top_k", &S::top_k, sample, "draw from the k most likely tokens");
  auto& top_p =
      t.add("top_p", &S::top_p, sample, "draw from the most likely tokens with this total probability; 1: all");
  top_p.low = 0;
  top_p.low_excluded = true;
  top_p.high = 1;
  t.flag("stop_at_end", &S::stop_at_end, sample, "end a sample at <|endoftext|>");
  t.heading = "Export";
  t.choice("format", &S::format, exporting,
           "format of the export: huggingface, llm.c, or nanogpt (a folder as training writes it)",
           {"huggingface", "llm.c", "nanogpt"});
  t.heading = "Measurement";
  t.count("burn_in", &S::burn_in, bench, "warm-up steps", 0, 1'000'000);
  t.count("timed", &S::timed, bench, "timed steps", 1, 1'000'000);
  t.flag("pieces", &S::pieces, bench,
         "read a number of steps from each line of standard input, run them, and print a line of JSON (see "
         "benchmarks/peers)");
  t.optional_text("json", &S::json, bench, "output file: the results as one JSON object");
  t.heading = "Files";
  t.optional_text("to", &S::to, exporting | report,
                  "export: output folder; report: output file (default: report.html in the first folder)");
  t.optional_text("svg", &S::svg, report,
                  "output file: a picture of losses, and of a step if there is a trace, for a README");
  t.optional_text("csv", &S::csv, report, "output file: losses, norms and speeds as comma-separated values");
  t.flag("watch", &S::watch, report, "rewrite the page whenever the log grows, until Ctrl-C");
  t.rows.back().may_stand_alone = true;
  return t.rows;
}

std::string number_text(double value) { return fmt::format("{}", value); }

[[noreturn]] void reject(Setting const& setting, std::string_view text, std::string_view origin) {
  fsdp::fail<fsdp::ConfigError>("setting '{}': expected {}, got '{}' ({})", setting.name, setting.expected(), text,
                                origin);
}

bool in_range(Setting const& setting, double value) {
  return std::isfinite(value) && (setting.low_excluded ? value > setting.low : value >= setting.low) &&
         (setting.high_excluded ? value < setting.high : value <= setting.high);
}

template <class Number>
bool read_number(std::string_view text, Number& value) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size();
}

struct Reader {
  Settings& settings;
  Setting const& setting;
  std::string_view text, origin;

  void operator()(bool Settings::*member) const {
    bool const yes = text == "true" || text == "True" || text == "1";
    bool const no = text == "false" || text == "False" || text == "0";
    if (!yes && !no) reject(setting, text, origin);
    settings.*member = yes;
  }
  void operator()(std::int64_t Settings::*member) const {
    std::int64_t value{};
    bool const word = !setting.word_for_zero.empty() && text == setting.word_for_zero;
    if ((!word && !read_number(text, value)) || !in_range(setting, static_cast<double>(value)))
      reject(setting, text, origin);
    settings.*member = value;
  }
  void operator()(double Settings::*member) const {
    double value{};
    if (!read_number(text, value) || !in_range(setting, value)) reject(setting, text, origin);
    settings.*member = value;
  }
  void operator()(std::string Settings::*member) const {
    if (text.empty() && !setting.may_be_empty) reject(setting, text, origin);
    if (!setting.choices.empty() && text != setting.refused_choice &&
        std::find(setting.choices.begin(), setting.choices.end(), text) == setting.choices.end())
      reject(setting, text, origin);
    settings.*member = std::string(text);
  }
};

struct Writer {
  Settings const& settings;
  Setting const& setting;
  std::string operator()(bool Settings::*member) const { return settings.*member ? "true" : "false"; }
  std::string operator()(std::int64_t Settings::*member) const {
    return settings.*member == 0 && !setting.word_for_zero.empty() ? std::string(setting.word_for_zero)
                                                                   : fmt::format("{}", settings.*member);
  }
  std::string operator()(double Settings::*member) const { return number_text(settings.*member); }
  std::string operator()(std::string Settings::*member) const {
    auto const& text = settings.*member;
    return text == "\n" ? "newline" : text;
  }
};

/// Letters to insert, drop, change or swap with their neighbour to make `b` of `a` (Damerau 1964, without overlaps).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view blanks = " \t\r";
  auto const first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

/// A quoted text with Python's escapes; `rest` is what follows the closing quote.
std::string quoted_value(std::string_view text, std::string_view& rest, std::string_view where) {
  constexpr std::string_view names = "nrt0\\'\"", meant{"\n\r\t\0\\'\"", 7};
  std::string value;
  std::size_t at = 1;
  for (; at < text.size() && text[at] != text[0]; ++at) {
    if (text[at] != '\\' || at + 1 == text.size()) {
      value += text[at];
      continue;
    }
    auto const known = names.find(text[++at]);
    if (known == std::string_view::npos)
      fsdp::fail<fsdp::ConfigError>(
          "{}: expected one of the escapes \\n, \\r, \\t, \\0, \\\\, \\' and \\\", got '\\{}'", where, text[at]);
    value += meant[known];
  }
  if (at >= text.size()) fsdp::fail<fsdp::ConfigError>("{}: the quote {} is never closed", where, text.front());
  rest = text.substr(at + 1);
  return value;
}

/// The value of a product of whole numbers, as `5 * 8`; any other text unchanged.
std::string product_value(std::string_view text) {
  if (text.find('*') == std::string_view::npos) return std::string(text);
  std::int64_t product = 1;
  for (auto rest = text;;) {
    auto const star = rest.find('*');
    std::int64_t factor{};
    if (!read_number(trim(rest.substr(0, star)), factor) || __builtin_mul_overflow(product, factor, &product))
      return std::string(text);
    if (star == std::string_view::npos) return fmt::format("{}", product);
    rest.remove_prefix(star + 1);
  }
}

/// The value of a config line: quoted (to the closing quote) or plain (to a comment).
std::string line_value(std::string_view text, std::string_view where) {
  text = trim(text);
  if (text.empty() || (text.front() != '\'' && text.front() != '"'))
    return product_value(trim(text.substr(0, text.find('#'))));
  std::string_view rest;
  auto value = quoted_value(text, rest, where);
  rest = trim(rest);
  if (!rest.empty() && rest.front() != '#')
    fsdp::fail<fsdp::ConfigError>("{}: expected nothing after the closing quote, got '{}'", where, excerpt(rest));
  return value;
}

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

std::string Setting::expected() const {
  if (std::holds_alternative<bool Settings::*>(member)) return "true or false";
  if (std::holds_alternative<std::string Settings::*>(member))
    return choices.empty() ? std::string(may_be_empty ? "a text" : "a text that is not empty")
                           : fmt::format("one of {}", fsdp::listed(choices));
  bool const whole = std::holds_alternative<std::int64_t Settings::*>(member);
  std::string words = whole ? "a whole number" : "a finite number";
  if (!word_for_zero.empty()) words = fmt::format("{} or {}", word_for_zero, words);
  if (std::isfinite(low))
    words +=
        low_excluded ? fmt::format(" above {}", number_text(low)) : fmt::format(" of at least {}", number_text(low));
  if (std::isfinite(high) && (!whole || high < 1e9))
    words += high_excluded ? fmt::format(" and below {}", number_text(high))
                           : fmt::format(" and at most {}", number_text(high));
  return words;
}

void Setting::copy(Settings const& from, Settings& to) const {
  std::visit([&](auto one) { to.*one = from.*one; }, member);
}

std::string Setting::text_of(Settings const& settings) const { return std::visit(Writer{settings, *this}, member); }

bool is_auto(Settings const& settings) {
  return settings.init_from == "auto" || settings.init_from.starts_with(auto_or);
}

bool may_resume(Settings const& settings) { return settings.init_from == "resume" || is_auto(settings); }

std::string first_start(Settings const& settings) {
  if (settings.init_from == "auto") return "scratch";
  return is_auto(settings) ? settings.init_from.substr(auto_or.size()) : settings.init_from;
}

Settings defaults(Command command) {
  Settings settings;
  if (command == Command::sample) settings.init_from = "resume";
  return settings;
}

std::vector<Setting> const& all_settings() {
  static std::vector<Setting> const table = make_table();
  return table;
}

Setting const* find_setting(std::string_view name) {
  for (auto const& setting : all_settings())
    if (setting.name == name) return &setting;
  return nullptr;
}

std::string_view nearest_setting(std::string_view name, Command command) {
  std::string_view nearest;
  if (name.size() > 100) return nearest;  // a file of another kind, given as settings
  auto best = std::max<std::size_t>(1, name.size() / 3) + 1;
  for (auto const& setting : all_settings()) {
    if (!setting.exists_in(command)) continue;
    if (auto const distance = edit_distance(name, setting.name); distance < best)
      best = distance, nearest = setting.name;
  }
  return nearest;
}

Tuning tuning_of(Settings const& settings) {
  Tuning tuning;
  tuning.lora_rank = settings.lora_rank;
  if (tuning.adapts())
    tuning.lora_scale = static_cast<float>(settings.lora_alpha / static_cast<double>(tuning.lora_rank));
  tuning.last_layers = settings.train_layers;
  return tuning;
}

std::int64_t checkpointed_layers(Settings const& settings) {
  auto const& text = settings.activation_checkpointing;
  if (text == "false" || text == "False") return 0;
  if (text == "true" || text == "True") return settings.n_layer;
  std::int64_t layers{};
  if (!read_number(text, layers) || layers < 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'activation_checkpointing': expected true, false or a number of layers, got '{}'", text);
  if (layers > settings.n_layer)
    fsdp::fail<fsdp::ConfigError>("setting 'activation_checkpointing': expected at most the {} layers, got {}",
                                  settings.n_layer, layers);
  return layers;
}

fsdp::Offloaded offloaded(Settings const& settings, bool has_masters) {
  fsdp::Offloaded parsed;
  if (settings.cpu_offload) parsed = {.moments = true, .masters = has_masters};
  if (settings.offload == "none") return parsed;
  std::string_view rest = settings.offload;
  for (bool more = true; more;) {
    auto const comma = rest.find(',');
    auto const word = rest.substr(0, comma);
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
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
        "setting 'recompute_segment': only layers that are computed again form segments; expected "
        "--activation_checkpointing too");
  if (segment > layers)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'recompute_segment': expected at most the {} layers of activation_checkpointing, got {}", layers,
        segment);
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
  note("compile", "there is nothing to compile here");
  note("backend", "device and launcher decide what moves data (see --comm)");
  if (settings.was_given("bucket_mb") && settings.strategy != "no_shard")
    notes.push_back(
        fmt::format("note: 'bucket_mb' has no effect: only no_shard has buckets, and {} reduces each unit by itself",
                    settings.strategy));
  if (settings.was_given("reduce_dtype") && ranks == 1)
    notes.emplace_back("note: 'reduce_dtype' has no effect with one rank, which has no gradients of others to sum");
  if (auto const segment = settings.recompute_segment; segment > 1 && segment == checkpointed_layers(settings))
    notes.push_back(fmt::format(
        "note: the last segment is not computed again, and one segment of all {} layers of 'activation_checkpointing' "
        "is the last: nothing is computed again",
        segment));
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

void assign(Settings& settings, Setting const& setting, std::string_view text, std::string_view origin) {
  std::visit(Reader{settings, setting, text, origin}, setting.member);
  if (!settings.was_given(setting.name)) settings.given.emplace_back(setting.name);
}

void apply_environment(Settings& settings, Command command) {
  auto const& setting = *find_setting("collective_timeout");
  if (!setting.exists_in(command) || settings.was_given(setting.name)) return;
  if (char const* const text = std::getenv("FSDP_TIMEOUT"); text != nullptr && *text != '\0')
    assign(settings, setting, text, "FSDP_TIMEOUT");
}

void apply_config_text(Settings& settings, std::string_view text, std::string_view label) {
  int number = 0;
  while (!text.empty()) {
    auto const end = std::min(text.find('\n'), text.size());
    auto const line = trim(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    auto const where = fmt::format("{}, line {}", label, ++number);
    if (line.empty() || line.front() == '#') continue;
    if (line.starts_with("import ")) continue;  // nanoGPT's finetune_shakespeare.py imports time for wandb_run_name
    auto const equals = line.find('=');
    if (equals == std::string_view::npos)
      fsdp::fail<fsdp::ConfigError>("{}: expected 'name = value' or a comment, got '{}'", where, excerpt(line));
    auto const name = trim(line.substr(0, equals));
    auto const* setting = find_setting(name);
    if (setting == nullptr) {
      auto const nearest = nearest_setting(name, Command::train);
      fsdp::fail<fsdp::ConfigError>("{}: there is no setting '{}'{} (see nanogpt train --help)", where, excerpt(name),
                                    nearest.empty() ? std::string() : fmt::format("; is '{}' meant?", nearest));
    }
    auto const value = line.substr(equals + 1);
    assign(settings, *setting, name == "wandb_run_name" ? std::string(trim(value)) : line_value(value, where), where);
  }
}

void apply_config_file(Settings& settings, std::string const& file) {
  std::error_code error;
  if (std::filesystem::is_regular_file(file, error)) {
    std::ifstream stream(file, std::ios::binary);
    std::string const text{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) fsdp::fail<fsdp::ConfigError>("config file '{}' cannot be read", file);
    return apply_config_text(settings, text, file);
  }
  std::filesystem::path stem = std::filesystem::path(file).filename();
  if (stem.extension() == ".py") stem = stem.stem();
  std::vector<std::string_view> names;
  for (auto const& shipped : shipped_configs()) {
    if (stem == shipped.name) return apply_config_text(settings, shipped.text, file);
    names.push_back(shipped.name);
  }
  fsdp::fail<fsdp::ConfigError>("config '{}': no such file, and none of the built-in configs ({}) has this name", file,
                                fsdp::listed(names));
}

void check_together(Settings const& s, Command command, std::int64_t ranks) {
  if (command == Command::prepare) {
    if (s.data.empty())
      fsdp::fail<fsdp::ConfigError>(
          "setting 'data': expected the text to prepare (--data=FILE, or --data=- for standard input), got nothing");
    if (!s.val_data.empty() && s.was_given("val_fraction") && s.val_fraction != 0)
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_fraction': with --val_data, all of --data is used for training: expected 0 or no val_fraction, "
          "got {}",
          s.val_fraction);
    if (s.data == "-" && s.val_data == "-")
      fsdp::fail<fsdp::ConfigError>(
          "setting 'val_data': --data reads standard input already: expected a file, got '-'");
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
  if (command == Command::report) return;
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
  if (s.init_from != "scratch" && command == Command::bench)
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
  if (s.gradient_accumulation_steps % ranks != 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting 'gradient_accumulation_steps': expected a multiple of the {} ranks (it is the total over ranks), got "
        "{}{}",
        ranks, s.gradient_accumulation_steps, whose(s, "gradient_accumulation_steps"));
  static_cast<void>(offloaded(s, s.dtype != "float32"));
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
  if (s.lora_rank > 0 && s.train_layers > 0)
    fsdp::fail<fsdp::ConfigError>(
        "settings 'lora_rank' and 'train_layers': expected at most one of the two, got {}{} and {}{}", s.lora_rank,
        whose(s, "lora_rank"), s.train_layers, whose(s, "train_layers"));
  if (s.train_layers > s.n_layer)
    fsdp::fail<fsdp::ConfigError>("setting 'train_layers': expected at most n_layer = {}, got {}", s.n_layer,
                                  s.train_layers);
  if (s.was_given("lora_alpha") && s.lora_rank == 0)
    fsdp::fail<fsdp::ConfigError>("setting 'lora_alpha': only adapters use it; expected --lora_rank too");
  if (s.n_embd % s.n_head != 0)
    fsdp::fail<fsdp::ConfigError>("setting 'n_embd': expected a multiple of n_head = {}, got {}", s.n_head, s.n_embd);
  check_strategy(s, ranks);
}

}  // namespace nanogpt
