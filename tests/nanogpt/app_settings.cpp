// SPDX-License-Identifier: Apache-2.0
// nanogpt's settings: defaults, values, config files, and the figures that follow from them.
// links: transformer_data
// skip-sanitizers
#include "transformer/run/table.cpp"  // NOLINT: tests what the program is made of

#include "nanogpt/settings.cpp"             // NOLINT
#include "transformer/report/metrics.cpp"   // NOLINT
#include "transformer/run/checks.cpp"       // NOLINT
#include "transformer/run/choices.cpp"      // NOLINT
#include "transformer/run/common_rows.cpp"  // NOLINT
#include "transformer/run/help.cpp"         // NOLINT
#include "transformer/run/variants.cpp"     // NOLINT

#include <fmt/format.h>
#include <unistd.h>
#include <regex>
#include <string>

#include "tests/catch.hpp"
#include "tests/support/messages.hpp"

namespace transformer {
std::vector<ConfigFile> const& shipped_configs() {
  static std::vector<ConfigFile> const files{
      {"tiny", "n_layer = 3 # three\nout_dir = 'my out'  # quoted\nbias=True\n\n# end"}};
  return files;
}
}  // namespace transformer

namespace {

using namespace transformer;
using fsdp::testing::has;
using fsdp::testing::what;

void set(Settings& settings, std::string_view name, std::string_view text) {
  auto const* setting = find_setting(name);
  REQUIRE(setting != nullptr);
  assign(settings, *setting, text, "test");
}

}  // namespace

TEST_CASE("defaults are nanoGPT's") {
  std::vector<std::pair<char const*, char const*>> const defaults{
      {"out_dir", "out"},
      {"eval_interval", "2000"},
      {"log_interval", "1"},
      {"eval_iters", "200"},
      {"eval_only", "false"},
      {"always_save_checkpoint", "true"},
      {"init_from", "scratch"},
      {"dataset", "openwebtext"},
      {"gradient_accumulation_steps", "40"},
      {"batch_size", "12"},
      {"block_size", "1024"},
      {"n_layer", "12"},
      {"n_head", "12"},
      {"n_embd", "768"},
      {"dropout", "0"},
      {"bias", "false"},
      {"learning_rate", "0.0006"},
      {"max_iters", "600000"},
      {"weight_decay", "0.1"},
      {"beta1", "0.9"},
      {"beta2", "0.95"},
      {"grad_clip", "1"},
      {"decay_lr", "true"},
      {"warmup_iters", "2000"},
      {"lr_decay_iters", "600000"},
      {"min_lr", "6e-05"},
      {"seed", "1337"},
      {"num_samples", "10"},
      {"max_new_tokens", "500"},
      {"temperature", "0.8"},
      {"top_k", "200"},
  };
  for (auto const& [name, text] : defaults) {
    INFO(name);
    auto const* setting = find_setting(name);
    REQUIRE(setting != nullptr);
    CHECK(setting->text_of(transformer::defaults(Command::train)) == text);
  }
  CHECK(transformer::defaults(Command::sample).init_from == "resume");
}

TEST_CASE("threads are a number, or auto") {
  Settings settings;
  auto const& setting = *find_setting("threads");
  CHECK(setting.text_of(settings) == "auto");
  set(settings, "threads", "3");
  CHECK(settings.threads == 3);
  CHECK(setting.text_of(settings) == "3");
  for (char const* const text : {"auto", "0"}) {
    set(settings, "threads", text);
    CHECK(settings.threads == 0);
    CHECK(setting.text_of(settings) == "auto");
  }
  for (char const* const text : {"-1", "257", "many", "", "1.5"})
    CHECK(has(what([&] { set(settings, "threads", text); }),
              fmt::format("setting 'threads': expected auto or a whole number of at least 0 and at most 256, got '{}'",
                          text)));
  CHECK(has(what([&] { set(settings, "ranks", "auto"); }), "expected a whole number"));
}

TEST_CASE("values out of range or of the wrong type are refused by name, with what was expected and what came") {
  std::vector<std::pair<char const*, char const*>> const bad{
      {"batch_size", "0"},
      {"batch_size", "-1"},
      {"batch_size", "1.5"},
      {"batch_size", "many"},
      {"batch_size", ""},
      {"batch_size", "1e3"},
      {"batch_size", "99999999999999999999"},
      {"block_size", "0"},
      {"n_layer", "0"},
      {"n_head", "-2"},
      {"n_head", "0"},
      {"n_embd", "0"},
      {"n_embd", "-4"},
      {"dropout", "1"},
      {"dropout", "1.5"},
      {"dropout", "-0.1"},
      {"dropout", "nan"},
      {"learning_rate", "0"},
      {"learning_rate", "nan"},
      {"learning_rate", "-1e-3"},
      {"learning_rate", "inf"},
      {"learning_rate", "1e999"},
      {"learning_rate", "fast"},
      {"learning_rate", "1e-3x"},
      {"min_lr", "-1"},
      {"beta1", "1"},
      {"beta1", "-0.1"},
      {"beta2", "1.0"},
      {"beta2", "nan"},
      {"weight_decay", "-1"},
      {"grad_clip", "-1"},
      {"grad_clip", "nan"},
      {"max_iters", "0"},
      {"max_iters", "-5"},
      {"eval_iters", "0"},
      {"log_interval", "0"},
      {"eval_interval", "0"},
      {"warmup_iters", "-1"},
      {"lr_decay_iters", "0"},
      {"seed", "-1"},
      {"decay_lr", "maybe"},
      {"decay_lr", ""},
      {"bias", "2"},
      {"device", "tpu"},
      {"dtype", "int8"},
      {"dtype", "float8"},
      {"strategy", "zero3"},
      {"strategy", "zero"},
      {"ranks", "0"},
      {"ranks", "65"},
      {"ranks", "1000"},
      {"comm", "tcp"},
      {"share_gpu", "2"},
      {"prefetch", "-1"},
      {"bucket_mb", "0"},
      {"collective_timeout", "0"},
      {"peak_tflops", "-1"},
      {"shard_group", "0"},
      {"shard_group", "-1"},
      {"recompute_segment", "0"},
      {"recompute_segment", "-2"},
      {"recompute_segment", "all"},
      {"sampling", "uniform"},
      {"wrap", "layer"},
      {"min_params", "0"},
      {"reduce_dtype", "float16"},
      {"cpu_offload", "some"},
      {"temperature", "-0.1"},
      {"temperature", "nan"},
      {"top_p", "0"},
      {"top_p", "1.1"},
      {"top_k", "0"},
      {"num_samples", "0"},
      {"max_new_tokens", "-1"},
      {"val_fraction", "1"},
      {"val_fraction", "-0.1"},
      {"val_fraction", "nan"},
      {"tokenizer", "bpe"},
      {"gradient_accumulation_steps", "0"},
      {"out_dir", ""},
      {"dataset", ""},
  };
  for (auto const& [name, text] : bad) {
    INFO(name << "=" << text);
    Settings settings;
    auto const message = what([&, n = name, t = text] { set(settings, n, t); });
    CHECK(has(message, std::string("setting '") + name + "': expected "));
    CHECK(has(message, std::string("got '") + text + "'"));
  }
  CHECK(find_setting("learning_rat") == nullptr);
}

TEST_CASE("good values are read") {
  Settings settings;
  set(settings, "learning_rate", "1e-3");
  set(settings, "beta1", "0");
  set(settings, "grad_clip", "0");
  set(settings, "decay_lr", "False");
  set(settings, "warmup_iters", "0");
  CHECK(settings.learning_rate == 1e-3);
  CHECK(settings.beta1 == 0.0);
  set(settings, "temperature", "0");
  set(settings, "top_p", "1");
  CHECK(settings.temperature == 0.0);
  CHECK_FALSE(settings.decay_lr);
}

TEST_CASE("config files: comments, quotes, Python's spellings, order; wrong lines name file and line") {
  Settings settings;
  apply_config_file(settings, "tiny");
  CHECK(settings.n_layer == 3);
  CHECK(settings.out_dir == "my out");
  CHECK(settings.bias);
  Settings python;
  apply_config_file(python, "config/tiny.py");
  CHECK(python.n_layer == 3);
  apply_config_text(settings, "n_layer = 4\r\nstart = \"#1\"", "crlf");
  CHECK(settings.n_layer == 4);
  CHECK(settings.start == "#1");
  apply_config_text(settings, R"(start = 'It\'s\n\t"\\"'  # so)", "escapes");
  CHECK(settings.start == "It's\n\t\"\\\"");
  CHECK(has(what([&] { apply_config_text(settings, R"(start = "\q")", "file"); }),
            R"(file, line 1: expected one of the escapes \n)"));
  CHECK(has(what([&] { apply_config_text(settings, R"(start = "a\")", "file"); }), "never closed"));

  CHECK(has(what([&] { apply_config_text(settings, "\nn_layers = 4\n", "file"); }),
            "file, line 2: there is no setting 'n_layers'; is 'n_layer' meant?"));
  CHECK(has(what([&] { apply_config_text(settings, "n_layer 4", "file"); }), "file, line 1: expected 'name = value'"));
  CHECK(has(what([&] { apply_config_text(settings, "\n\nn_layer = four", "file"); }), "got 'four' (file, line 3)"));
  CHECK(has(what([&] { apply_config_text(settings, "out_dir = 'open", "file"); }), "never closed"));
  CHECK(has(what([&] { apply_config_text(settings, "out_dir = 'a' b", "file"); }),
            "expected nothing after the closing quote, got 'b'"));
  CHECK(has(what([&] { apply_config_file(settings, "no_such_config"); }), "tiny"));
}

TEST_CASE("config files of nanoGPT are read as they are: products, an import, a name that Python computes") {
  Settings settings;
  apply_config_text(settings, "import time\nwandb_run_name = 'ft-' + str(time.time())\n", "file");
  apply_config_text(settings, "gradient_accumulation_steps = 5 * 8  # eight GPUs\nblock_size=2*3 *4", "file");
  CHECK(settings.gradient_accumulation_steps == 40);
  CHECK(settings.block_size == 24);
  for (char const* const text : {"5 +8", "5 ** 2", "5 *", "* 8", "5 * n", "5 * 8.0", "9223372036854775807 * 2"})
    CHECK(has(
        what([&] { apply_config_text(settings, fmt::format("batch_size = {}", text), "file"); }),
        fmt::format("'batch_size': expected a whole number of at least 1 and at most 1000000, got '{}' (file, line 1)",
                    text)));
}

TEST_CASE("settings that do not fit together are refused") {
  auto const problem = [](auto&& change, std::int64_t ranks) {
    Settings settings;
    change(settings);
    return what([&] { check_together(settings, Command::train, ranks); });
  };
  for (int const ranks : {1, 3, 8, 64}) CHECK(problem([](Settings&) {}, ranks) == "nothing was thrown");
  CHECK(has(problem([](Settings& s) { s.n_embd = 100; }, 1), "'n_embd': expected a multiple of n_head = 12, got 100"));
  CHECK(has(problem([](Settings& s) { s.strategy = "hybrid_shard"; }, 4), "'shard_group'"));
  CHECK(has(problem([](Settings& s) { s.strategy = "hybrid_shard", s.shard_group = 3; }, 4),
            "divisor of the 4 ranks, got 3"));
  CHECK(problem([](Settings& s) { s.strategy = "hybrid_shard", s.shard_group = 2; }, 4) == "nothing was thrown");
  CHECK(has(problem([](Settings& s) { s.shard_group = 2; }, 4), "'shard_group'"));
  Settings sampled = transformer::defaults(Command::sample);
  CHECK(what([&] { check_together(sampled, Command::sample, 3); }) == "nothing was thrown");
  sampled.strategy = "hybrid_shard";
  sampled.shard_group = 2;
  CHECK(has(what([&] { check_together(sampled, Command::sample, 3); }), "divisor of the 3 ranks, got 2"));
  for (std::string const from : {"resume", "auto", "gpt2", "gpt2-xl", "some/folder"})
    CHECK(problem([&](Settings& s) { s.init_from = from; }, 1) == "nothing was thrown");
}

TEST_CASE("each subcommand begins with what it can") {
  auto const problem = [](Command command, std::string const& from) {
    Settings settings;
    settings.init_from = from;
    settings.to = "somewhere";
    return what([&] { check_together(settings, command, 1); });
  };
  CHECK(has(problem(Command::bench, "gpt2"), "'init_from': bench supports only scratch, got 'gpt2'"));
  for (std::string const from : {"scratch", "auto"})
    CHECK(has(problem(Command::sample, from), "'init_from': expected resume (the model in out_dir) or weights"));
  for (std::string const from : {"resume", "gpt2"}) CHECK(problem(Command::sample, from) == "nothing was thrown");
  CHECK(has(problem(Command::prepare, "scratch"), "setting 'data': expected the text to prepare"));
  Settings sampled = transformer::defaults(Command::sample);
  sampled.init_from = "gpt2";
  sampled.checkpoint = "best";
  CHECK(has(what([&] { check_together(sampled, Command::sample, 1); }),
            "'checkpoint': only a run in out_dir has checkpoints (init_from resume), got 'best' with init_from gpt2"));
}

TEST_CASE("an export says where to and in which of two types") {
  auto const problem = [](std::string const& to, std::string const& dtype, std::string const& encoder) {
    Settings settings;
    settings.to = to;
    settings.dtype = dtype;
    settings.encoder_json = encoder;
    return what([&] { check_together(settings, Command::export_, 1); });
  };
  CHECK(problem("x", "", "") == "nothing was thrown");
  CHECK(problem("x", "bfloat16", "") == "nothing was thrown");
  CHECK(has(problem("", "", ""), "'to': expected the folder to write to"));
  CHECK(has(problem("x", "float16", ""), "'dtype': expected float32 or bfloat16 for an export, got float16"));
  CHECK(has(problem("x", "", "e"), "'vocab_bpe': expected both files of the tokenizer"));
}

TEST_CASE("what becomes of a unit after forward goes with the strategy") {
  auto const of = [](std::string const& strategy, std::string const& text) {
    Settings s;
    s.strategy = strategy;
    s.reshard_after_forward = text;
    return resharding(s);
  };
  CHECK(of("full_shard", "").drops);
  CHECK(of("hybrid_shard", "True").drops);
  CHECK_FALSE(of("full_shard", "false").drops);
  CHECK_FALSE(of("shard_grad_op", "").drops);
  CHECK_FALSE(of("no_shard", "false").drops);
  CHECK(of("full_shard", "2").ranks == 2);
  CHECK(of("full_shard", "2").drops);
  for (auto const* text : {"1", "-2", "some", "2.5"})
    CHECK(has(what([&] { of("full_shard", text); }), "expected true, false or a number of ranks above 1, got '"));
  CHECK(
      has(what([&] { of("shard_grad_op", "true"); }), "expected false, which is what shard_grad_op does, got 'true'"));
  CHECK(has(what([&] { of("ddp", "2"); }), "expected false, which is what ddp does"));

  auto const problem = [](std::string const& text, std::int64_t ranks, std::int64_t group) {
    Settings s;
    s.reshard_after_forward = text;
    s.gradient_accumulation_steps = ranks;
    if (group > 0) s.strategy = "hybrid_shard", s.shard_group = group;
    return what([&] { check_together(s, Command::train, ranks); });
  };
  CHECK(problem("2", 4, 0) == "nothing was thrown");
  CHECK(problem("2", 8, 4) == "nothing was thrown");
  CHECK(has(problem("4", 4, 0), "a smaller divisor of the 4 ranks"));
  CHECK(has(problem("3", 4, 0), "a smaller divisor of the 4 ranks"));
  CHECK(has(problem("4", 8, 4), "a smaller divisor of the 4 ranks"));
}

TEST_CASE("layers in a unit: one, enough of them, or all with the rest") {
  Settings s;
  s.n_layer = 5;
  auto const layers = [&](std::string const& wrap, std::int64_t least) {
    s.wrap = wrap;
    s.min_params = least;
    return layers_in_unit(s, 100);
  };
  CHECK(layers("block", 1000) == 1);
  CHECK(layers("model", 1) == 0);
  CHECK(layers("size", 1) == 1);
  CHECK(layers("size", 100) == 1);
  CHECK(layers("size", 101) == 2);
  CHECK(layers("size", 1'000'000'000'000) == 5);
  Settings given;
  set(given, "min_params", "7");
  CHECK(has(what([&] { check_together(given, Command::train, 1); }),
            "'min_params': only --wrap=size uses min_params, got 7 with --wrap="));
  given.wrap = "size";
  CHECK(what([&] { check_together(given, Command::train, 1); }) == "nothing was thrown");
}

TEST_CASE("offload names moments, masters and gradients; cpu_offload means what fits of the first two") {
  auto const text = [](Settings const& s, bool has_masters = true) {
    auto const found = offloaded(s, has_masters);
    return fmt::format("{}{}{}", found.moments ? "m" : "", found.masters ? "w" : "", found.gradients ? "g" : "");
  };
  Settings s;
  CHECK(text(s).empty());
  set(s, "cpu_offload", "true");
  CHECK(text(s) == "mw");
  CHECK(text(s, false) == "m");
  set(s, "offload", "gradients");
  CHECK(text(s, false) == "mg");
  set(s, "cpu_offload", "false");
  CHECK(text(s) == "g");
  for (auto const& [words, expected] :
       {std::pair("moments", "m"), {"masters,moments", "mw"}, {"none", ""}, {"gradients,masters,moments", "mwg"}}) {
    set(s, "offload", words);
    CHECK(text(s) == expected);
  }
  CHECK(what([&] { check_together(s, Command::train, 1); }) == "nothing was thrown");
  CHECK(has(what([&] { text(s, false); }), "masters only with --dtype=bfloat16"));
  set(s, "dtype", "float32");
  CHECK(has(what([&] { check_together(s, Command::train, 1); }), "masters only with --dtype=bfloat16"));
  set(s, "offload", "moments,parameters");
  CHECK(has(what([&] { check_together(s, Command::train, 1); }), "parameters stay on the device, sharded"));
  CHECK(has(what([&] { set(s, "offload", ""); }), "setting 'offload': expected a text that is not empty"));
  for (auto const* const words : {"moments,", "some", "none,moments"}) {
    set(s, "offload", words);
    CHECK(has(what([&] { check_together(s, Command::train, 1); }), "setting 'offload': expected none, or some of"));
  }
}

TEST_CASE("GPT-2's files are needed for its tokens and refused for others, and a split takes a part") {
  auto const problem = [](std::string const& tokenizer, std::string const& encoder, std::string const& merges,
                          double fraction) {
    Settings s;
    s.data = "text";
    s.tokenizer = tokenizer;
    s.encoder_json = encoder;
    s.vocab_bpe = merges;
    s.val_fraction = fraction;
    return what([&] { check_together(s, Command::prepare, 1); });
  };
  CHECK(problem("char", "", "", 0.1) == "nothing was thrown");
  CHECK(problem("gpt2", "e", "m", 0.1) == "nothing was thrown");
  CHECK(has(problem("gpt2", "", "m", 0.1), "'encoder_json': tokenizer gpt2 needs"));
  CHECK(has(problem("gpt2", "e", "", 0.1), "'vocab_bpe': tokenizer gpt2 needs"));
  CHECK(has(problem("char", "e", "", 0.1),
            "'encoder_json': only --tokenizer=gpt2 reads this file, got 'e' with --tokenizer=char"));
  CHECK(has(problem("char", "", "m", 0.1), "'vocab_bpe': only --tokenizer=gpt2 reads this file"));
  CHECK(problem("char", "", "", 0) == "nothing was thrown");
  auto unnamed = defaults(Command::prepare);  // what train reads by default is not replaced
  unnamed.data = "text";
  CHECK(has(
      what([&] { check_together(unnamed, Command::prepare, 1); }),
      "setting 'dataset': expected the name of the data set to write (--dataset=NAME, for the folder data/NAME), got "
      "nothing"));
  auto both = unnamed;
  set(both, "dataset", "name");
  both.val_data = "other";
  CHECK(what([&] { check_together(both, Command::prepare, 1); }) == "nothing was thrown");
  set(both, "val_fraction", "0.5");
  CHECK(has(what([&] { check_together(both, Command::prepare, 1); }),
            "'val_fraction': with --val_data, all of --data is used for"));
}

TEST_CASE("the learning rate warms up, decays by a cosine, and stays at its end") {
  Settings s;
  s.learning_rate = 1e-3;
  s.min_lr = 1e-4;
  s.warmup_iters = 100;
  s.lr_decay_iters = 5000;
  CHECK(learning_rate_schedule(s).at(0) == Approx(1e-3 / 101).epsilon(1e-14));
  CHECK(learning_rate_schedule(s).at(99) == Approx(1e-3 * 100 / 101).epsilon(1e-14));
  CHECK(learning_rate_schedule(s).at(100) == 1e-3);
  CHECK(learning_rate_schedule(s).at(2550) == Approx(5.5e-4).epsilon(1e-12));  // half way: the mean of both
  CHECK(learning_rate_schedule(s).at(1325) == Approx(1e-4 + 0.5 * (1 + std::sqrt(0.5)) * 9e-4).epsilon(1e-12));
  CHECK(learning_rate_schedule(s).at(5000) == Approx(1e-4).epsilon(1e-12));
  CHECK(learning_rate_schedule(s).at(5001) == 1e-4);
  CHECK(learning_rate_schedule(s).at(1000000) == 1e-4);
  s.decay_lr = false;
  CHECK(learning_rate_schedule(s).at(0) == 1e-3);
  s.decay_lr = true;
  s.warmup_iters = 5000;
  CHECK(learning_rate_schedule(s).at(5000) == 1e-4);  // nothing left to decay over: no division by zero
}

TEST_CASE("help has every setting of a command under a heading, but for those that are always refused") {
  for (auto const& command : command_texts()) {
    auto const help = help_of(command);
    for (auto const& setting : all_settings()) {
      INFO(command.name << " " << setting.name);
      CHECK(!setting.group.empty());
      bool const wanted = setting.exists_in(command.command) && setting.listed;
      bool const there = std::regex_search(help, std::regex(fmt::format("\n  --{}[=\n ]", setting.name)));
      CHECK(there == wanted);
      if (wanted) CHECK(has(help, fmt::format("\n{}:\n", setting.group)));
    }
    CHECK(!has(help, "cpu_offload"));
    CHECK(!has(help, " float16"));
    for (std::size_t at = 0; at < help.size(); at = std::min(help.find('\n', at), help.size() - 1) + 1)
      CHECK(std::min(help.find('\n', at), help.size()) - at <= 100);
    CHECK(has(general_help(), fmt::format("\n  {} ", command.name)));
  }
  auto const train = help_of(command_texts()[1]);
  CHECK(has(train, "\n  --n_layer=12                    transformer blocks\n"));
  CHECK(train.find("\nModel:\n") < train.find("\nOptimizer:\n"));
  CHECK(train.find("\nSharding:\n") < train.find("\nnanoGPT's"));
  Settings settings;
  assign(settings, *find_setting("dtype"), "float16", "test");  // refused later, with a reason
  CHECK(!has(find_setting("dtype")->expected(), " float16"));
}

TEST_CASE("log lines have nanoGPT's form") {
  IterationReport const report{10, 3.13321, 0.0273, 0.0341, 6e-4, 1.524, 302000.4, 480000000};
  CHECK(line(report) ==
        "iter 10: loss 3.1332, time 27.30ms, mfu 3.41%, lr 6.00e-04, total time 1.52s, tokens/s 302,000, mem 0.48GB");
  CHECK(line(EvaluationReport{0, 4.28741, 4.28234, 1e-3, -1}) == "step 0: train loss 4.2874, val loss 4.2823");
  IterationReport first{};
  CHECK(has(line(first), "ms, mfu -, lr "));  // not known yet
  CHECK(has(json(first), R"("mfu":null,"grad_norm":null,)"));
  CHECK(has(json(EvaluationReport{}), R"("mfu":null})"));
  first.gradient_norm = 0.97214;
  CHECK(has(line(first), "mfu -, norm 0.9721, lr "));
  CHECK(has(json(first), R"("grad_norm":0.97214)"));
  double const nan = std::copysign(std::nan(""), -1.0);  // as 0 * infinity gives it
  CHECK(has(line(IterationReport{10, nan, 1, 1, 1, 1, 1, 1}), "iter 10: loss nan, "));
  CHECK(line(EvaluationReport{0, nan, nan, 1e-3, -1}) == "step 0: train loss nan, val loss nan");
  CHECK(loss_text(std::numeric_limits<double>::infinity()) == "inf");
}

TEST_CASE("JSON lines parse and keep every digit") {
  double const loss = 3.1332000000000123;
  auto const object = json(IterationReport{10, loss, 0.0273, 0.0341, 6e-4, 1.5, 302000, 1234567890123});
  CHECK(has(object, fmt::format("\"loss\":{:.17g},", loss)));
  CHECK(has(object, "\"mem_bytes\":1234567890123}"));
  CHECK(has(json(EvaluationReport{3, std::nan(""), 1.5, 0, -1}), "\"train_loss\":null,\"val_loss\":1.5,"));
}

TEST_CASE("settings are read by their former names, and a line says so once") {
  Settings settings;
  apply_config_text(settings, "lora_r = 8\nlora_r = 4\ngradient_checkpointing = 2\ntrain_layers = 3\n", "file");
  CHECK(settings.lora_rank == 4);
  CHECK(settings.activation_checkpointing == "2");
  CHECK(settings.freeze_layers == -3);
  CHECK(settings.was_given("lora_rank"));
  CHECK_FALSE(settings.was_given("lora_r"));
  CHECK(notes_on_former_names(settings) ==
        std::vector<std::string>{
            "note: 'lora_r' is now called 'lora_rank'",
            "note: 'gradient_checkpointing' is now called 'activation_checkpointing'",
            "note: 'train_layers' is now called 'freeze_layers'; train_layers=N is freeze_layers=-N, "
            "all layers but the last N"});
  settings.lora_rank = 0;
  CHECK(tuning_of(settings).layers_below(12) == 9);
  CHECK(find_named("train_layers").current("0") == "0");
  CHECK(what([] { static_cast<void>(find_named("train_layers").current("-2")); }) ==
        "setting 'train_layers': expected a whole number of at least 0, got '-2'; its present name is 'freeze_layers'");
  CHECK(find_named("freeze_layers").current("2") == "2");
  CHECK(find_named("").setting == nullptr);
  for (auto const& setting : all_settings())
    if (!setting.former_name.empty()) CHECK(find_setting(setting.former_name) == nullptr);
  CHECK(has(what([&] { apply_config_text(settings, "lora_r = many", "file"); }),
            "setting 'lora_rank': expected a whole number of at least 0 and at most 65536, got 'many' (file, line 1)"));
}

TEST_CASE("utilisation is at most 1: a higher rate that is reached is the peak from the fifth iteration on") {
  MfuMeter meter(100.0, 1000.0);
  CHECK(meter.of(0.05) == 1.0);
  meter.add(4, 0.05);
  CHECK(meter.peak() == Approx(1000.0));
  CHECK(meter.of(0.2) == Approx(0.5));
  meter.add(5, 0.025);
  CHECK(meter.value() == Approx(1.0));
  CHECK(meter.peak() == Approx(4000.0));
  meter.set_peak(3000.0);  // a peak does not fall
  CHECK(meter.peak() == Approx(4000.0));
}

TEST_CASE("utilisation is smoothed from the fifth iteration on") {
  MfuMeter meter(100.0, 1000.0);
  meter.add(4, 1.0);
  CHECK(meter.value() == -1.0);
  meter.add(5, 1.0);
  CHECK(meter.value() == Approx(0.1));
  meter.add(6, 0.5);
  CHECK(meter.value() == Approx(0.9 * 0.1 + 0.1 * 0.2));
  meter.set_peak(2000.0);
  CHECK(meter.value() == Approx((0.9 * 0.1 + 0.1 * 0.2) / 2));
  CHECK(meter.of(0.5) == Approx(0.1));
  meter.add(7, 1.0);
  CHECK(meter.value() == Approx(0.9 * (0.9 * 0.1 + 0.1 * 0.2) / 2 + 0.1 * 0.05));
}

TEST_CASE("numbers with commas") {
  CHECK(with_commas(0) == "0");
  CHECK(with_commas(999) == "999");
  CHECK(with_commas(1000) == "1,000");
  CHECK(with_commas(491520) == "491,520");
  CHECK(with_commas(10740096) == "10,740,096");
  CHECK(with_commas(-1234) == "-1,234");
}

TEST_CASE("the nearest name, and none where nothing is near") {
  using transformer::Command;
  CHECK(transformer::nearest_setting("learning_rat", Command::train) == "learning_rate");
  CHECK(transformer::nearest_setting("lerning_rate", Command::train) == "learning_rate");
  CHECK(transformer::nearest_setting("btach_size", Command::train) == "batch_size");
  CHECK(transformer::nearest_setting("beta3", Command::train).starts_with("beta"));
  CHECK(transformer::nearest_setting("top_k", Command::sample) == "top_k");
  CHECK(transformer::nearest_setting("top_k", Command::train).empty());  // it is not one of train's
  CHECK(transformer::nearest_setting("xyzzy", Command::train).empty());
}

TEST_CASE("layers whose activations are computed again") {
  transformer::Settings settings;
  settings.n_layer = 5;
  auto const layers = [&](char const* text) {
    settings.activation_checkpointing = text;
    return transformer::checkpointed_layers(settings);
  };
  CHECK(layers("false") == 0);
  CHECK(layers("True") == 5);
  CHECK(layers("3") == 3);
  CHECK(layers("5") == 5);
  CHECK(has(what([&] { layers("6"); }), "expected at most the 5 layers, got 6"));
  for (auto const* text : {"-1", "some", "2.5", "3x"})
    CHECK(has(what([&] { layers(text); }), "expected true, false or a number of layers, got '"));
}

TEST_CASE("layers that are computed again together") {
  transformer::Settings settings;
  settings.n_layer = 12;
  auto const segment = [&](std::int64_t layers, char const* checkpointed, std::int64_t unit_layers = 1) {
    settings.recompute_segment = layers;
    settings.activation_checkpointing = checkpointed;
    return transformer::segment_layers(settings, unit_layers);
  };
  CHECK(segment(1, "false") == 1);
  CHECK(segment(1, "true", 0) == 1);
  CHECK(segment(3, "true") == 3);
  CHECK(segment(12, "true") == 12);
  CHECK(segment(5, "7") == 5);
  CHECK(segment(4, "true", 2) == 4);
  CHECK(has(what([&] { segment(2, "false"); }),
            "setting 'recompute_segment': only layers that are computed again form segments; expected "
            "--activation_checkpointing too"));
  CHECK(has(what([&] { segment(8, "7"); }),
            "setting 'recompute_segment': expected at most the 7 layers of activation_checkpointing, got 8"));
  CHECK(has(what([&] { segment(2, "true", 0); }),
            "setting 'recompute_segment': --wrap=model has all layers in one unit: expected 1, got 2"));
  CHECK(
      has(what([&] { segment(3, "true", 2); }),
          "setting 'recompute_segment': a segment has whole units: expected 1 or a multiple of their 2 layers, got 3"));
  segment(3, "true");
  CHECK(transformer::notes_on(settings, 2, false).empty());
  segment(12, "true");
  REQUIRE(transformer::notes_on(settings, 2, false).size() == 1);
  CHECK(has(transformer::notes_on(settings, 2, false)[0], "nothing is computed again"));
}

TEST_CASE("what nanoGPT has and fsdp needs not is taken with a note; a setting knows whether it was given") {
  transformer::Settings settings;
  CHECK(transformer::notes_on(settings, 2, false).empty());
  transformer::apply_config_text(settings, "compile = False\nbackend = 'gloo'\nwandb_log = True\nwandb_project = 'x'\n",
                                 "file");
  transformer::Settings buckets;
  transformer::apply_config_text(buckets, "bucket_mb = 4\n", "file");
  REQUIRE(transformer::notes_on(buckets, 2, false).size() == 1);
  CHECK(has(transformer::notes_on(buckets, 2, false)[0], "'bucket_mb' has no effect: only no_shard has buckets"));
  buckets.strategy = "no_shard";
  CHECK(transformer::notes_on(buckets, 2, false).empty());
  auto const notes = transformer::notes_on(settings, 2, false);
  REQUIRE(notes.size() == 3);
  CHECK(has(notes[0], "'compile'"));
  CHECK(has(notes[2], "nothing is sent anywhere"));
  CHECK(settings.was_given("backend"));
  CHECK_FALSE(settings.was_given("n_layer"));
}

TEST_CASE("settings that change nothing, or not what they say, get a note") {
  auto const note = [](std::string_view name, std::string_view value, std::int64_t ranks, bool shares_gpus = false) {
    transformer::Settings settings;
    set(settings, "strategy", "hybrid_shard");
    settings.shard_group = 2;
    set(settings, name, value);
    auto const notes = transformer::notes_on(settings, ranks, shares_gpus);
    CHECK(notes.size() <= 1);
    return notes.empty() ? std::string() : notes.front();
  };
  CHECK(note("shard_group", "2", 4) == "");
  CHECK(has(note("shard_group", "1", 4), "note: shard groups of one rank do not shard"));
  CHECK(has(note("shard_group", "4", 4),
            "note: one shard group of all 4 ranks has no replicas, so this equals full_shard"));
  CHECK(note("reduce_dtype", "bfloat16", 4) == "");
  CHECK(has(note("reduce_dtype", "bfloat16", 1), "note: 'reduce_dtype' has no effect with one rank"));
  CHECK(note("share_gpu", "true", 4, true) == "");
  CHECK(has(note("share_gpu", "true", 4), "note: 'share_gpu' has no effect: no machine has more processes than GPUs"));
}

TEST_CASE("how long ranks wait comes from FSDP_TIMEOUT, and the peak from FSDP_PEAK_TFLOPS, unless a setting says it") {
  auto const timeout = [](char const* variable, std::string_view given = "", Command command = Command::train) {
    transformer::Settings settings;
    if (!given.empty()) set(settings, "collective_timeout", given);
    REQUIRE(::setenv("FSDP_TIMEOUT", variable, 1) == 0);
    transformer::apply_environment(settings, command);
    REQUIRE(::unsetenv("FSDP_TIMEOUT") == 0);
    return settings.collective_timeout;
  };
  CHECK(timeout("") == 600.0);
  CHECK(timeout("30") == 30.0);
  CHECK(timeout("30", "", Command::bench) == 30.0);
  CHECK(timeout("30", "7") == 7.0);
  CHECK(timeout("30", "", Command::prepare) == 600.0);
  CHECK(has(what([&] { timeout("soon"); }),
            "setting 'collective_timeout': expected a finite number above 0, got 'soon' (FSDP_TIMEOUT)"));
  ::unsetenv("FSDP_TIMEOUT");
  auto const peak = [](char const* variable, std::string_view given = "") {
    transformer::Settings settings;
    if (!given.empty()) set(settings, "peak_tflops", given);
    REQUIRE(::setenv("FSDP_PEAK_TFLOPS", variable, 1) == 0);
    transformer::apply_environment(settings, Command::train);
    REQUIRE(::unsetenv("FSDP_PEAK_TFLOPS") == 0);
    return settings.peak_tflops;
  };
  CHECK(peak("") == 0);
  CHECK(peak("989.4") == 989.4);
  CHECK(peak("989.4", "0.1") == 0.1);
}
