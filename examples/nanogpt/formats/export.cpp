// SPDX-License-Identifier: Apache-2.0
// The subcommand `nanogpt export` writes a trained model in the formats of HuggingFace, llm.c and nanogpt.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "fsdp/files.hpp"
#include "nanogpt/commands.hpp"
#include "nanogpt/formats/gpt2/config_json.hpp"
#include "nanogpt/formats/gpt2/llm_c.hpp"
#include "nanogpt/formats/gpt2/open_model.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"
#include "nanogpt/formats/saved_model.hpp"
#include "transformer/data/new_file.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/model_files.hpp"
#include "transformer/training/vocabulary.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace nanogpt {
namespace {

namespace fs = std::filesystem;

constexpr double unknown = std::numeric_limits<double>::quiet_NaN();  // null in config.json

/// `to` (cols, rows) = `from` (rows, cols), both row-major, in tiles that the cache holds.
void transpose(std::vector<float> const& from, std::vector<float>& to, std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t tile = 32;
  to.resize(from.size());
  for (std::int64_t row = 0; row < rows; row += tile)
    for (std::int64_t col = 0; col < cols; col += tile)
      for (auto c = col; c < std::min(col + tile, cols); ++c)
        for (auto r = row; r < std::min(row + tile, rows); ++r)
          to[static_cast<std::size_t>(c * rows + r)] = from[static_cast<std::size_t>(r * cols + c)];
}

/// Writes model.safetensors, a tensor at a time.
/// @param huggingface  Conv1D's orientation, and biases whether the model has them or not; else as ours
/// @param before_name  called when all tensors are written, before the file has its name
void write_safetensors(fs::path const& path, OpenedModel const& model, bool huggingface, bool bf16,
                       std::function<void()> const& before_name) {
  auto config = model.config;
  bool const has_biases = config.bias;
  config.bias = has_biases || huggingface;
  auto const tensors = gpt_tensors(config);
  std::vector<fsdp::TensorInfo> infos(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    infos[i].name = tensors[i].name;
    infos[i].shape = huggingface ? tensors[i].stored_shape() : tensors[i].shape;
  }
  RemovedOnSignal const removed(path.string() + ".tmp");
  WeightsWriter file(path, infos, bf16);
  std::vector<float> values, turned;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto const& tensor = tensors[i];
    values.assign(static_cast<std::size_t>(tensor.numel()), 0.0f);
    if (has_biases || !tensor.is_bias()) model.weights->read(tensor.name, 0, values);
    bool const turn = huggingface && tensor.transposed;
    if (turn) transpose(values, turned, tensor.shape[0], tensor.shape[1]);
    file.write(infos[i], turn ? turned : values);
  }
  before_name();
  file.finish();
}

/// GPT-2's files that the model's data name, or that lie beside the weights.
TokenizerFiles tokenizer_of(OpenedModel const& model, Settings const& settings) {
  if (!settings.encoder_json.empty()) return {settings.encoder_json, settings.vocab_bpe};
  auto const& names = model.meta.tokenizer_files;
  if (names.empty()) return model.tokenizer;
  auto const folder = model.meta.path.parent_path();
  return {folder / names.at(0), folder / names.at(1)};
}

/// Whether the tokens of a folder's tokenizer are the model's.
/// @param own  the model's; null: not known, and then they may differ
bool has_tokenizer_of(fs::path const& folder, GptConfig const& config, Tokenizer const* own) {
  if (own == nullptr) return false;
  auto const theirs = open_tokenizer_in(folder, config);
  return theirs != nullptr && vocabulary_checksum(*theirs) == vocabulary_checksum(*own);
}

void print_notes(GptConfig const& config, std::string const& format) {
  bool const adds_biases = format != "nanogpt" && !config.bias;
  if (adds_biases) fmt::print("note: the model has no biases, but the format needs them: they are written as zeros\n");
  if (format == "llm.c" && config.activation == Activation::gelu)
    fmt::print(
        "warning: the model uses the exact GELU, but llm.c computes the tanh approximation: losses and sampled texts "
        "will differ a little\n");
}

}  // namespace

int run_export(Settings const& settings) {
  check_together(settings, Command::export_, 1);
  auto const [model, note] = open_run(settings);
  if (!note.empty()) fmt::print("{}\n", report::printable(note));
  auto const& config = model.config;
  fs::path const to(settings.to);
  expect_folder_for_export(settings);
  std::error_code error;
  auto const tokenizer = open_tokenizer(model, settings);  // before anything is written
  auto const files = tokenizer_of(model, settings);
  bool const huggingface = settings.format == "huggingface";
  auto const others = huggingface
                          ? files_for_export(model.original, has_tokenizer_of(model.original, config, tokenizer.get()))
                          : std::vector<fs::path>();
  expect_room_for_files(to, model.original, others, settings.overwrite);
  fsdp::checkpoint::make_folders(to);
  remove_on_signals();
  std::optional<SignalsWait> wait;
  std::vector<std::string> removed;
  auto const replace = [&] {  // from here on the folder has neither the old model nor the new one, until all is written
    wait.emplace();
    for (auto const name : files_of_a_model)
      if (fs::remove(to / name)) removed.emplace_back(name);
  };

  bool const bf16 = settings.dtype == "bfloat16";
  print_notes(config, settings.format);
  auto written = to / weights_name;
  if (settings.format == "llm.c") {
    written = to / "model.bin";
    write_llm_c(written, config, *model.weights, bf16, replace);
  } else {
    write_safetensors(written, model, huggingface, bf16, replace);
  }
  copy_files(model.original, others, to);
  if (settings.format == "nanogpt") {
    save_model_config(to, config, {model.iteration, unknown, unknown, unknown}, nullptr, model.meta);
  } else if (huggingface) {
    auto const end = tokenizer != nullptr ? tokenizer->end_of_text() : std::nullopt;
    fsdp::checkpoint::replace_text_file(
        to / "config.json",
        huggingface_config_text(config, end, static_cast<double>(config.dropout), bf16 ? "bfloat16" : "float32"));
  }
  // nanogpt's own folder has the files of its meta.json.
  if (!files.none() && (settings.format != "nanogpt" || model.meta.path.empty())) copy_tokenizer(files, to);
  if (files.none() && settings.format != "nanogpt")
    fmt::print(
        "note: vocab.json and merges.txt were not written, because the model's folder has no tokenizer of GPT-2\n");
  std::erase_if(removed, [&](std::string const& name) { return fs::exists(to / name, error); });
  if (!removed.empty())
    fmt::print("removed from '{}', with the model that was there: {}\n", to.string(), fsdp::listed(removed));
  fmt::print("wrote {} parameters of '{}' to '{}'\n", with_commas(config.parameters()), model.path().string(),
             written.string());
  return 0;
}

}  // namespace nanogpt
