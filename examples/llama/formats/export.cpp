// SPDX-License-Identifier: Apache-2.0
// The subcommand `llama export` writes a trained model in HuggingFace's format, or its adapters in peft's.
#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "fsdp/safetensors.hpp"
#include "llama/commands.hpp"
#include "llama/formats/adapter_files.hpp"
#include "llama/formats/config_json.hpp"
#include "llama/formats/start.hpp"
#include "transformer/data/new_file.hpp"
#include "transformer/report/escape.hpp"
#include "transformer/report/metrics.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/training/folder.hpp"
#include "transformer/training/model_files.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;

/// Writes the weights, adapters merged, a tensor at a time.
void write_weights(WeightsPlace const& place, OpenedLlama const& model, bool bf16) {
  std::vector<WeightsWriter::Tensor> tensors;
  auto const list = llama_tensors(model.config);
  for (auto const& tensor : list)
    tensors.push_back({tensor.name, tensor.shape, bf16 ? fsdp::DType::bf16 : fsdp::DType::f32});
  WeightsWriter writer(place, tensors);
  std::vector<float> values;
  for (auto const& tensor : list) {
    values.resize(static_cast<std::size_t>(tensor.numel()));
    model.weights->read(tensor.name, 0, values);
    writer.write(tensor.name, values);
  }
  writer.finish();
}

/// Writes the tensors of a file of adapters. @param dtype  of the new file; empty: as before
void write_adapters(fs::path const& to, fs::path const& from, std::string const& dtype) {
  fsdp::checkpoint::SafetensorsFile const file(from);
  std::vector<WeightsWriter::Tensor> tensors;
  for (auto const& entry : file.entries())
    tensors.push_back({entry.name, entry.shape,
                       dtype.empty()         ? entry.dtype
                       : dtype == "bfloat16" ? fsdp::DType::bf16
                                             : fsdp::DType::f32});
  WeightsWriter writer({to}, tensors);
  std::vector<float> values;
  for (auto const& entry : file.entries()) {
    values.resize(static_cast<std::size_t>(entry.numel()));
    file.read(entry.name, entry.shape, 0, values);
    writer.write(entry.name, values);
  }
  writer.finish();
}

}  // namespace

int run_export(Settings const& settings) {
  check_together(settings, Command::export_, 1);
  fs::path const to(settings.to), out_dir(settings.out_dir);
  expect_folder_for_export(settings);
  bool const peft = settings.format == "peft";
  std::string note;
  auto const model = open_run(settings, note);
  if (!note.empty()) fmt::print("{}\n", report::printable(note));
  if (peft && !settings.checkpoint.empty())
    fsdp::fail<fsdp::ConfigError>(
        "setting 'checkpoint': --format=peft exports the adapters in out_dir; expected no checkpoint, got '{}'",
        settings.checkpoint);
  if (peft && !is_adapter_folder(out_dir))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'format': expected huggingface, for '{}' has no adapters (a file {}); got peft", model.path().string(),
        adapter_config_name);
  auto const tokenizer = has_tokenizer(model.tokenizer) ? open_tokenizer(model) : nullptr;
  auto const originals =
      peft ? std::vector<fs::path>() : files_for_export(model.original, model.tokenizer == model.original);
  auto const others = peft ? files_beside_weights(out_dir) : std::vector<fs::path>();
  auto const of_tokenizer = files_of_use_in(model.tokenizer);
  std::error_code error;
  expect_room_for_files(to, model.original, peft ? others : originals, settings.overwrite);
  fsdp::checkpoint::make_folders(to);
  remove_on_signals();
  for (auto const name : files_of_a_model) fs::remove(to / name, error);
  for (auto const& entry : fs::directory_iterator(to, error))
    if (is_part_of_weights(entry.path().filename().string())) fs::remove(entry.path(), error);
  copy_files(model.original, originals, to);
  copy_files(out_dir, others, to);
  copy_files(model.tokenizer, of_tokenizer, to);
  if (peft) {
    write_adapters(to / adapter_weights_name, out_dir / adapter_weights_name, settings.dtype);
    copy_files(out_dir, {adapter_config_name}, to);
    fmt::print("wrote the adapters of '{}' to '{}'\n", out_dir.string(), (to / adapter_weights_name).string());
    return 0;
  }
  bool const bf16 = settings.dtype == "bfloat16";
  std::string_view const dtype = bf16 ? "bfloat16" : "float32";
  auto const& config = model.config;
  write_weights({to / weights_name, static_cast<std::int64_t>(settings.max_shard_gb * 1e9)}, model, bf16);
  auto text = changed_config_text({model.tokenizer, model.original}, config, dtype);
  if (text.empty())
    text = huggingface_config_text(config, std::nullopt, tokenizer ? tokenizer->end_of_text() : std::nullopt, dtype);
  fsdp::checkpoint::replace_text_file(to / "config.json", text);
  fmt::print("wrote {} parameters of '{}' to '{}'\n", with_commas(config.parameters()), model.path().string(),
             to.string());
  return 0;
}

}  // namespace llama
