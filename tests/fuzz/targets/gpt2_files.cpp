// SPDX-License-Identifier: Apache-2.0
// Any bytes, and good ones with changes, as HuggingFace's config.json, the index of its files, their tensors, and
// llm.c's file of weights: refused by name, or read within their bounds.
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/safetensors.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "transformer/weights/weights_folder.hpp"
// One compile unit: what reads JSON takes long to compile.
#include "nanogpt/formats/gpt2/config_json.cpp"
#include "nanogpt/formats/gpt2/llm_c.cpp"
#include "nanogpt/formats/gpt2/tensor_names.cpp"
#include "nanogpt/formats/model_json.cpp"
#include "transformer/weights/weights_folder.cpp"

namespace {

using namespace nanogpt;
namespace fs = std::filesystem;

void expect(bool holds) {
  if (!holds) std::abort();
}

GptConfig small() { return {1, 1, 2, 3, 5, 0.0f, true, Activation::gelu_new}; }

std::string good_header() {
  std::array<std::int32_t, 256> words{20240326, 3, 3, 5, 1, 1, 2, 6};
  return {reinterpret_cast<char const*>(words.data()), sizeof words};
}
std::string good_tensors() {
  std::vector<fsdp::checkpoint::TensorEntry> entries;
  std::size_t bytes = 0;
  for (auto const& tensor : gpt_tensors(small())) {
    entries.push_back({tensor.name, fsdp::DType::f32, tensor.stored_shape()});
    bytes += static_cast<std::size_t>(tensor.numel()) * sizeof(float);
  }
  return fsdp::checkpoint::safetensors_header(entries, {}, "x") + std::string(bytes, 'x');
}

/// A folder in memory, removed at the end.
struct Folder {
  fs::path path = fs::path("/dev/shm") / ("nanogpt-fuzz-" + std::to_string(::getpid()));
  Folder() { fs::create_directory(path); }
  ~Folder() { fs::remove_all(path); }
  fs::path file(char const* name, std::string const& bytes) const {
    std::ofstream(path / name, std::ios::binary) << bytes;
    return path / name;
  }
};

void read_all(GptConfig const& config, WeightsSource const& weights) {
  std::vector<float> values;
  for (auto const& tensor : gpt_tensors(config)) {
    values.resize(static_cast<std::size_t>(tensor.numel()));
    weights.read(tensor.name, 0, values);
    weights.read(tensor.name, tensor.numel() / 2, std::span(values).first(1));
  }
}

void read_llm_c(Folder const& folder, std::string const& bytes) {
  LlmcFile const file(folder.file("x.bin", bytes));
  expect(static_cast<std::size_t>(file.config().parameters()) * 2 + 1024 <= bytes.size());
  read_all(file.config(), file);
}
void read_config(std::string const& text) {
  auto const config = parse_huggingface_config(text, "it");
  expect(config.n_layer > 0 && config.n_embd % config.n_head == 0 && config.parameters() > 0 && config.bias);
}
void read_folder(Folder const& folder) {
  read_all(small(), WeightsFolder(folder.path, gpt_tensor_list(small(), Orientation::in_out)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static Folder const folder;
  static auto const config = huggingface_config_text(small(), 4, 0.1, "float32"), header = good_header(),
                    tensors = good_tensors();
  static std::string const index = R"({"weight_map": {"transformer.wte.weight": "a.safetensors", "x": "b"}})";
  if (size == 0) return 0;
  std::string const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  using fsdp::testing::changed;
  try {
    switch (data[0] % 6) {
      case 0: read_config(rest); break;
      case 1: read_config(changed(config, rest)); break;
      case 2: read_llm_c(folder, rest); break;
      // A width of 2 and a vocabulary of 5, padded to 6, are 96 elements.
      case 3: read_llm_c(folder, changed(header + std::string(96 * sizeof(float), 'x'), rest)); break;
      case 4:
        folder.file("model.safetensors", changed(tensors, rest));
        read_folder(folder);
        break;
      default:
        fs::remove(folder.path / "model.safetensors");
        folder.file("model.safetensors.index.json", changed(index, rest));
        read_folder(folder);
    }
  } catch (fsdp::ConfigError const&) {
  }
  return 0;
}
