// SPDX-License-Identifier: Apache-2.0
// A run that is resumed: its settings are taken where none are given, and other data are noticed.
// skip-tsan
// links: nanogpt_models
#include "transformer/training/settings_of_run.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/detail/checkpoint/manifest.hpp"
#include "nanogpt/formats/start.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/data_mark.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/state.hpp"

namespace {

using namespace nanogpt;
using fsdp::checkpoint::Json;
using fsdp::testing::has;
using fsdp::testing::what;
using Lines = std::vector<std::string>;

Settings settings_with(std::vector<std::pair<std::string_view, std::string_view>> const& values) {
  auto settings = defaults(Command::train);
  for (auto const& [name, text] : values) assign(settings, *find_setting(name), text, "test");
  return settings;
}

/// A run as a checkpoint brings it back.
RunState read_back(Json const& extra) {
  fsdp::testing::TemporaryFolder const folder;
  fsdp::checkpoint::Manifest manifest;
  manifest.parts = {{"AdamW", 0, {}, {}}};
  manifest.arrays = {{std::string(fsdp::checkpoint::parameters_array)}};
  manifest.files = {{"rank-00000-of-00001.safetensors", 0}};
  manifest.extra = extra;
  std::ofstream(folder.path / fsdp::checkpoint::manifest_name) << to_json_text(manifest);
  auto run = read_run(folder.path);
  run.checkpoint = "out/step-8";
  return run;
}
RunState new_run() {
  RunState run;
  run.model = model_text({.n_layer = 1, .n_head = 1, .n_embd = 8, .block_size = 8});
  return run;
}
RunState run_with(Settings const& settings) { return read_back(run_state_json(new_run(), settings)); }
std::string value(Settings const& settings, std::string_view name) { return find_setting(name)->text_of(settings); }

}  // namespace

TEST_CASE("settings of a run are taken where none are given") {
  auto const run = run_with(settings_with({{"learning_rate", "0.1"},
                                           {"min_lr", "6.000000000000001e-05"},
                                           {"batch_size", "3"},
                                           {"decay_lr", "false"},
                                           {"train_data", "some *.bin"},
                                           {"reduce_dtype", "bfloat16"},
                                           {"device", "cpu"},
                                           {"threads", "3"},
                                           {"out_dir", "elsewhere"}}));
  auto settings = settings_with({{"learning_rate", "0.2"}, {"batch_size", "3"}, {"max_iters", "9"}, {"threads", "2"}});
  auto const lines = adopt_settings(settings, run);
  CHECK(value(settings, "learning_rate") == "0.2");
  CHECK(settings.min_lr == 6.000000000000001e-05);
  CHECK(value(settings, "decay_lr") == "false");
  CHECK(value(settings, "train_data") == "some *.bin");
  CHECK(value(settings, "reduce_dtype") == "bfloat16");
  CHECK(value(settings, "max_iters") == "9");
  CHECK(value(settings, "threads") == "2");
  CHECK(value(settings, "device").empty());
  CHECK(value(settings, "out_dir") == "out");
  CHECK(lines == Lines{"resuming with learning_rate 0.2; the run had 0.1",
                       "resuming with max_iters 9; the run had 600000",
                       "settings of the run: train_data some *.bin, decay_lr false, min_lr 6.000000000000001e-05, "
                       "reduce_dtype bfloat16"});
  CHECK_FALSE(settings.was_given("min_lr"));
  CHECK(settings.is_of_run("min_lr"));
  CHECK(settings.is_of_run("seed"));
  CHECK_FALSE(settings.is_of_run("learning_rate"));
  auto again = settings;
  CHECK(adopt_settings(again, run) == lines);
  CHECK(again.of_run == settings.of_run);
}

TEST_CASE("every setting of train belongs to the run, or is one of these") {
  // Settings of the machine or the start, settings without effect, and settings stored by the checkpoint itself:
  // block_size to bias, and dtype.
  Lines const others{"out_dir",
                     "eval_only",
                     "snapshot_interval",
                     "snapshot_folder",
                     "init_from",
                     "checkpoint",
                     "overwrite",
                     "model_dir",
                     "block_size",
                     "n_layer",
                     "n_head",
                     "n_embd",
                     "bias",
                     "device",
                     "dtype",
                     "measure_dtype",
                     "ranks",
                     "threads",
                     "comm",
                     "share_gpu",
                     "collective_timeout",
                     "peak_tflops",
                     "compile",
                     "backend",
                     "wandb_log",
                     "wandb_project",
                     "wandb_run_name",
                     "log_json",
                     "trace",
                     "trace_steps",
                     "verbose"};
  Lines found;
  for (auto const& setting : all_settings()) {
    if (setting.exists_in(Command::train) && !setting.of_run) found.emplace_back(setting.name);
    if (!setting.part_of.empty()) CHECK(find_setting(setting.part_of)->of_run);
  }
  CHECK(found == others);
}

TEST_CASE("checkpoints with former names of settings give the run its settings") {
  auto json = run_state_json(new_run(), settings_with({{"lora_rank", "4"}, {"activation_checkpointing", "true"}}));
  auto& saved = json["settings"];
  for (auto const& [name, former, value] : {std::tuple("lora_rank", "lora_r", "4"),
                                            std::tuple("activation_checkpointing", "gradient_checkpointing", "true"),
                                            std::tuple("freeze_layers", "train_layers", "2")}) {
    REQUIRE(saved.contains(name));
    saved.erase(name);
    saved[former] = value;
  }
  auto const run = read_back(json);
  CHECK(run.settings.at("lora_rank") == "4");
  CHECK(run.settings.at("freeze_layers") == "-2");
  CHECK_FALSE(run.settings.contains("lora_r"));
  CHECK(lora_scale_of(run) == 4.0f);
  auto settings = settings_with({});
  CHECK(adopt_settings(settings, run) ==
        Lines{"settings of the run: activation_checkpointing true, lora_rank 4, freeze_layers -2"});
  CHECK(settings.freeze_layers == -2);
}

TEST_CASE("a checkpoint remembers the folder that its run began with") {
  auto run = new_run();
  CHECK(read_back(run_state_json(run, settings_with({}))).origin.empty());
  run.origin = "models/gpt2";
  CHECK(read_back(run_state_json(run, settings_with({}))).origin == "models/gpt2");
}

TEST_CASE("a part of a setting is not taken where the whole differs from the run's") {
  auto const run = run_with(settings_with({{"strategy", "hybrid_shard"},
                                           {"shard_group", "2"},
                                           {"dataset", "d"},
                                           {"train_data", "x.bin"},
                                           {"val_data", "y"}}));
  auto other = settings_with({{"strategy", "no_shard"}, {"dataset", "e"}});
  CHECK(adopt_settings(other, run) ==
        Lines{"resuming with dataset e; the run had d", "resuming with strategy no_shard; the run had hybrid_shard"});
  CHECK(other.shard_group == 0);
  CHECK(other.train_data.empty());
  CHECK(other.val_data.empty());
  check_together(other, Command::train, 4);
  auto same = settings_with({{"strategy", "hybrid_shard"}, {"dataset", "d"}});
  adopt_settings(same, run);
  CHECK(same.shard_group == 2);
  CHECK(same.train_data == "x.bin");
  CHECK(same.val_data == "y");
  // Settings that do not fit the ranks of this start are named as the run's.
  CHECK(has(
      what([&] { check_together(same, Command::train, 5); }),
      "setting 'shard_group': expected a divisor of the 5 ranks, got 2, as in the run in 'out'; set another value with "
      "--shard_group=N"));
}

TEST_CASE("a setting that the program has chosen for its ranks is neither the run's nor taken from it") {
  auto settings = settings_with({{"strategy", "hybrid_shard"}});
  settings.shard_group = 4;
  settings.chosen.emplace_back("shard_group");
  auto const run = run_with(settings);
  CHECK(run.settings.at("shard_group") == "0");
  settings.shard_group = 2;
  adopt_settings(settings, run);
  CHECK(settings.shard_group == 2);
}

TEST_CASE("a run of another version is resumed; a value that cannot be read is named, and changes nothing") {
  auto run = run_with(settings_with({{"batch_size", "3"}}));
  run.settings["colour"] = "red";
  run.settings["temperature"] = "1";  // exists, but not in train
  run.settings.erase("seed");
  Settings settings;
  CHECK(adopt_settings(settings, run) ==
        Lines{"settings of the run: batch_size 3",
              "note: this nanogpt does not have these settings of the run, and ignores them: colour, temperature"});
  CHECK_FALSE(settings.is_of_run("seed"));
  run.settings["strategy"] = "torus";
  Settings untouched;
  CHECK(what([&] { adopt_settings(untouched, run); }) ==
        "setting 'strategy': expected one of full_shard, shard_grad_op, hybrid_shard, no_shard, ddp, got 'torus' "
        "('out/step-8/checkpoint.json'; --strategy=... replaces it)");
  CHECK(untouched.batch_size == 12);
  CHECK(untouched.of_run.empty());
  auto given = settings_with({{"strategy", "ddp"}});
  CHECK(adopt_settings(given, run).front() == "resuming with strategy ddp; the run had torus");

  auto extra = run_state_json(new_run(), Settings{});
  extra.erase("settings");
  extra.erase("data");
  auto const old = read_back(extra);
  CHECK(old.settings.empty());
  CHECK(old.data.train.tokens == 0);
  Settings as_before;
  CHECK(adopt_settings(as_before, old).empty());
}

TEST_CASE("data are told apart by their tokens, not by their files' names") {
  fsdp::testing::TemporaryFolder const folder;
  auto const path = [&](std::string const& name) { return folder.path / name; };
  auto const write = [&](std::string const& name, std::size_t tokens, std::size_t changed) {
    std::string bytes;
    for (std::size_t i = 0; i < tokens; ++i) {
      bytes += static_cast<char>(i % 50 + (i == changed ? 1 : 0));
      bytes += '\0';
    }
    std::ofstream(path(name), std::ios::binary) << bytes;
  };
  constexpr std::size_t none = ~std::size_t{0}, many = 150'000;  // more than three blocks
  write("train.bin", many, none);
  write("val.bin", 100, none);
  auto const marks = [&](std::string const& train) {
    return mark_of(open_dataset({"", path(train).string(), path("val.bin").string()}));
  };
  auto const had = marks("train.bin");
  CHECK(had.train.tokens == many);
  CHECK(had.val.tokens == 100);
  std::filesystem::copy(path("train.bin"), path("copy.bin"));
  CHECK(marks("copy.bin").train == had.train);
  CHECK(marks("copy.bin").val == had.val);
  for (std::size_t const changed : {std::size_t{0}, many / 2, many - 1}) {
    write("changed.bin", many, changed);
    CHECK_FALSE(marks("changed.bin").train == had.train);
  }
  for (std::size_t changed = 0; changed < 100; ++changed) {  // a small file is read whole
    write("val.bin", 100, changed);
    CHECK_FALSE(marks("train.bin").val == had.val);
  }
  // Tokens in two files are drawn in another order than in one.
  std::filesystem::create_directory(path("two"));
  write("two/train_1.bin", many - 50, none);
  write("two/train_2.bin", 50, none);
  write("val.bin", 100, none);
  auto const two = marks("two");
  CHECK(two.train.tokens == had.train.tokens);
  CHECK_FALSE(two.train == had.train);

  auto const run = [&](RunData const& data) {
    auto state = new_run();
    state.data = data;
    return read_back(run_state_json(state, Settings{})).data;
  };
  CHECK(run(had).train == had.train);
  CHECK(run(had).val == had.val);
  CHECK(compare_data(Settings{}, run(had), had, "out/step-8").empty());
  CHECK(compare_data(Settings{}, RunData{}, had, "out/step-8").empty());  // of a version that did not know
  CHECK(
      what([&] { compare_data(Settings{}, had, two, "out/step-8"); }) ==
      "setting 'dataset': the training data are not those of the run in 'out/step-8': it had 150000 tokens in 1 file, "
      "now there are 150000 tokens in 2 files. Restore the old data, or name the data with which to continue: "
      "--dataset=NAME, --train_data=FILES");
  auto other_val = had;
  other_val.val.checksum = "0000000000000000";
  CHECK(what([&] { compare_data(Settings{}, had, other_val, "out/step-8"); }) ==
        "setting 'dataset': the validation data are not those of the run in 'out/step-8': it had 100 tokens in 1 file, "
        "now there are as many, with other contents. Restore the old data, or name the data with which to continue: "
        "--dataset=NAME, --train_data=FILES or --val_data=FILES");
  auto const given = settings_with({{"val_data", "val.bin"}});
  CHECK(compare_data(given, had, other_val, "out/step-8") ==
        Lines{"warning: the validation data are not those of the run in 'out/step-8': it had 100 tokens in 1 file, now "
              "there are as many, with other contents; do not compare validation losses with earlier ones"});
  CHECK(has(what([&] { compare_data(given, had, two, "out/step-8"); }), "the training data are not those"));
  for (auto const* const name : {"dataset", "train_data"})
    CHECK(compare_data(settings_with({{name, "x"}}), had, two, "out/step-8") ==
          Lines{"warning: the training data are not those of the run in 'out/step-8': it had 150000 tokens in 1 file, "
                "now there are 150000 tokens in 2 files; batches are drawn from the new data from here on"});
}
