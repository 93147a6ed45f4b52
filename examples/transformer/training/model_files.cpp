// SPDX-License-Identifier: Apache-2.0
#include "transformer/training/model_files.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "fsdp/error.hpp"
#include "fsdp/files.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"
#include "transformer/training/folder.hpp"

namespace transformer {
namespace {

namespace fs = std::filesystem;

constexpr std::array endings_of_weights =
    std::to_array<std::string_view>({".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml",
                                     ".h5", ".ot", ".msgpack", ".onnx", ".onnx_data", ".npz", ".tflite", ".tmp"});
/// Larger files are weights in a format whose ending is not listed.
constexpr std::uintmax_t largest_file_beside_weights = std::uintmax_t{1} << 28;
constexpr std::array files_of_gpt2_tokenizers =
    std::to_array<std::string_view>({"vocab.json", "merges.txt", "encoder.json", "vocab.bpe"});
constexpr std::string_view chat_templates = "additional_chat_templates";

bool is_file(fs::path const& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

bool goes_with_model(std::string const& name) {
  bool const has_ending = std::any_of(endings_of_weights.begin(), endings_of_weights.end(),
                                      [&](auto const& ending) { return name.ends_with(ending); });
  return !has_ending && !name.starts_with('.') && name != "config.json" && name != "adapter_config.json";
}

/// Adds the files of `folder` / `below` that go with the model.
void add_files(fs::path const& folder, fs::path const& below, std::vector<fs::path>& files) {
  std::error_code error;
  for (auto const& entry : fs::directory_iterator(folder / below, error))
    if (auto const name = entry.path().filename(); is_file(entry.path()) && goes_with_model(name.string()) &&
                                                   fs::file_size(entry.path(), error) <= largest_file_beside_weights)
      files.push_back(below / name);
}

}  // namespace

std::vector<fs::path> files_of_use_in(fs::path const& folder) {
  std::vector<fs::path> files;
  if (folder.empty()) return files;
  for (auto const name : files_of_use)
    if (is_file(folder / name)) files.emplace_back(name);
  std::error_code error;
  if (fs::is_directory(folder / chat_templates, error)) add_files(folder, chat_templates, files);
  return files;
}

std::vector<fs::path> files_beside_weights(fs::path const& folder) {
  if (folder.empty()) return {};
  std::error_code error;
  for (auto const* const name : {"latest", "log.jsonl", "train.bin"})
    if (fs::exists(folder / name, error)) return files_of_use_in(folder);
  std::vector<fs::path> files;
  add_files(folder, {}, files);
  if (fs::is_directory(folder / chat_templates, error)) add_files(folder, chat_templates, files);
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<fs::path> files_for_export(fs::path const& original, bool with_tokenizer) {
  auto files = files_beside_weights(original);
  if (with_tokenizer) return files;
  for (auto const& file : tokenizer_files(original)) std::erase(files, file.filename());
  for (auto const name : files_of_gpt2_tokenizers) std::erase(files, fs::path(name));
  return files;
}

void expect_room_for_files(fs::path const& to, fs::path const& original, std::vector<fs::path> const& files,
                           bool overwrite) {
  std::error_code error;
  if (fs::equivalent(to, original, error))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'to': expected a folder other than that of the model that the run began with, got '{}'", to.string());
  for (auto const& file : files)
    if (!overwrite && fs::exists(to / file, error)) refuse_existing(to, file.string());
}

void copy_files(fs::path const& from, std::vector<fs::path> const& files, fs::path const& to) {
  std::error_code error;
  if (fs::equivalent(from, to, error)) return;
  for (auto const& file : files) {
    fsdp::checkpoint::make_folders((to / file).parent_path());
    fsdp::checkpoint::replace_text_file(to / file, fsdp::checkpoint::read_text_file(from / file));
  }
}

}  // namespace transformer
