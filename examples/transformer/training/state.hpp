// SPDX-License-Identifier: Apache-2.0
// The state of a run in its checkpoints, beside weights and optimizer state. A resumed run goes on as if it had not
// stopped.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "transformer/run/data_mark.hpp"
#include "transformer/run/settings.hpp"

namespace transformer {

/// The state of a run before one of its iterations. Batches, dropout and learning rate follow from the iteration and
/// the settings.
struct RunState {
  std::string model;            ///< shape of the model: a JSON object, as checked_model() returns it
  std::int64_t iteration = 0;   ///< the next one: the number of optimizer steps so far
  std::int64_t evaluated = -1;  ///< iteration of the last evaluation
  double train_loss = 0, val_loss = 0;
  double best_val_loss = 1e9;
  std::string dtype;                 ///< type of the computation: "float32" or "bfloat16"; empty: not known
  std::int64_t data_vocab_size = 0;  ///< of the data, at most the model's; 0: their meta.json did not say
  std::string base;                  ///< fingerprint of the weights of frozen tensors; empty: the checkpoint has them
  std::string vocabulary;            ///< checksum of the tokens of the vocabulary; empty: not known
  std::string start;                 ///< id, in the log, of the start that saved the state; empty: not known
  std::string origin;                ///< HuggingFace folder of the weights that the run began with; empty: none
  std::string lineage;               ///< id of the run's first start, if it takes snapshots; empty: not known
  RunData data;                      ///< the tokens that the model was trained on
  std::map<std::string, std::string> settings;  ///< by name, as texts; empty: not known
  std::filesystem::path checkpoint;             ///< its folder
};

/// Checks and completes a model's shape. Each program defines it for its models.
/// @param model  the object that a checkpoint has as "model"
/// @param what   the object's name in messages
/// @return the same object as JSON text. Equal models have equal texts
/// @throws fsdp::ConfigError if a field is missing or wrong, or there is no such model
std::string checked_model(nlohmann::ordered_json const& model, std::string_view what);

/// The part of a checkpoint's manifest that describes the run.
/// @param settings  of the run; a setting that the program chose for these ranks is written as its default
nlohmann::ordered_json run_state_json(RunState const& run, Settings const& settings);

/// Reads the state of the run from a checkpoint's folder.
/// @param manifest  its manifest; empty: the folder has it
/// @throws fsdp::ConfigError if another program wrote it, or if it is damaged
RunState read_run(std::filesystem::path const& checkpoint, std::string const& manifest = {});

/// Factor of the run's adapters: see Tuning. 1 if it has none.
float lora_scale_of(RunState const& run);

/// A number as JSON: null if it is infinite or NaN.
nlohmann::ordered_json number_json(double value);

}  // namespace transformer
