// SPDX-License-Identifier: Apache-2.0
// What a run's checkpoints say beside weights and optimizer state, so that it goes on as if it had not stopped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "gpt2/weights_source.hpp"
#include "gpt_config.hpp"
#include "saved_model.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/data_mark.hpp"
#include "transformer/run/table.hpp"

namespace nanogpt {

/// A run before one of its iterations. Batches, dropout and learning rate follow from the iteration and the settings.
struct RunState {
  GptConfig model;
  std::int64_t iteration = 0;   ///< the next: so many optimizer steps have been taken
  std::int64_t evaluated = -1;  ///< iteration of the last evaluation
  double train_loss = 0, val_loss = 0;
  double best_val_loss = 1e9;
  std::string dtype;  ///< that it computes in: "float32" or "bfloat16"; empty: not known
  std::int64_t data_vocab_size =
      0;                   ///< of the data, which may be less than the model's; 0: their meta.json did not say
  std::string vocabulary;  ///< checksum of what the data's tokens are; empty: not known
  std::string start;       ///< id, in the log, of the start that has saved it; empty: not known
  RunData data;            ///< the tokens that it was trained on
  std::map<std::string, std::string> settings;  ///< by name, as texts; empty: not known
  std::filesystem::path checkpoint;             ///< its folder
};

/// What goes into a checkpoint. @param settings  of the run; those that the program has chosen for these ranks are
/// written as their defaults
nlohmann::ordered_json run_state_json(RunState const& run, Settings const& settings);

/// The run that a checkpoint's folder has saved.
/// @throws fsdp::ConfigError if it is none of nanogpt's, or damaged
RunState read_run(std::filesystem::path const& checkpoint);

/// Factor of the run's adapters: see Tuning. 1 if it has none.
float lora_scale_of(RunState const& run);

/// Takes the model's shape from a run.
/// @throws fsdp::ConfigError if the command line or a config file has asked for another
void adopt_model(Settings& settings, RunState const& run);

/// Takes it from weights. A block that the settings ask for may be shorter than the weights': it then has the first of
/// their positions.
/// @throws fsdp::ConfigError if the command line or a config file has asked for another model
void adopt_model(Settings& settings, GptWeights const& weights);

}  // namespace nanogpt
