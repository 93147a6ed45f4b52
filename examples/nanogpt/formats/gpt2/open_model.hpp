// SPDX-License-Identifier: Apache-2.0
// Models to begin with: GPT-2 by name, folders of HuggingFace's and of our own, llm.c's files, a run's checkpoints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "nanogpt/gpt_config.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/state.hpp"
#include "transformer/weights/weights_source.hpp"

namespace nanogpt {

/// GPT-2's tokenizer, as two files or as the tokenizer.json of a folder; none where all are empty.
struct TokenizerFiles {
  std::filesystem::path encoder_json;  ///< tokens and their ids: OpenAI's encoder.json, HuggingFace's vocab.json
  std::filesystem::path vocab_bpe;     ///< merges: OpenAI's vocab.bpe, HuggingFace's merges.txt
  std::filesystem::path folder{};      ///< with tokenizer.json, as transformers 5 writes it, instead of both

  bool none() const { return encoder_json.empty() && folder.empty(); }
};

/// A model whose weights were found and checked, but not read.
struct OpenedModel {
  GptConfig config;  ///< as it is stored; its dropout is 0
  std::shared_ptr<WeightsSource const> weights;
  Meta meta;                         ///< of a model of ours: what its data were
  TokenizerFiles tokenizer;          ///< beside the weights
  std::int64_t iteration = 0;        ///< of a model of ours: steps that it was trained
  std::filesystem::path original{};  ///< HuggingFace folder of the weights that training began with; empty: none

  std::filesystem::path const& path() const { return weights->path(); }
};

/// The model that first_start(settings) names: gpt2, gpt2-medium, gpt2-large or gpt2-xl, in model_dir or HuggingFace's
/// cache; a folder with config.json and safetensors files; llm.c's file.
/// @throws fsdp::ConfigError saying what is missing or wrong, or where it was looked for
OpenedModel open_pretrained(Settings const& settings);

/// A model that training has saved. @throws fsdp::ConfigError
OpenedModel open_saved(std::filesystem::path const& folder);

/// A run's checkpoint: "best", "latest", or its folder. @throws fsdp::ConfigError
OpenedModel open_checkpoint(std::filesystem::path const& out_dir, std::string const& name);

/// The model of a run, and what the user should know of the choice; "": nothing.
struct OpenedRun {
  OpenedModel model;
  std::string note;
};
/// The model in out_dir: the checkpoint that the settings name, else model.safetensors, else the latest checkpoint.
/// @throws fsdp::ConfigError
OpenedRun open_run(Settings const& settings);

/// The HuggingFace folder of the weights that a run began with. @return empty if it began with none, or the folder is
/// no longer there
std::filesystem::path original_folder(RunState const& run);

/// The tokenizer of encoder_json and vocab_bpe, if these were given; else the model's.
/// @return null if there is none
/// @throws fsdp::ConfigError if its files cannot be read, or have more tokens than the model
std::shared_ptr<Tokenizer const> open_tokenizer(OpenedModel const& model, Settings const& settings);

/// The tokenizer in a folder. @return null if there is none, or none for the model
std::shared_ptr<Tokenizer const> open_tokenizer_in(std::filesystem::path const& folder, GptConfig const& config);

/// Copies the files into a folder, under the names that HuggingFace has for them. @throws fsdp::Error if they cannot be
/// read or written
void copy_tokenizer(TokenizerFiles const& files, std::filesystem::path const& folder);

/// See transformer::fingerprint.
std::string fingerprint(OpenedModel const& model);

}  // namespace nanogpt
