// SPDX-License-Identifier: Apache-2.0
// Writes folders of Llamas as HuggingFace has them, for scripts.
//   write_folder random FOLDER [SEED]      two layers of random weights, grouped keys, an own head; tokens are bytes
//   write_folder stories FOLDER DATA       llama2.c's stories260K.bin and tok512.bin, in the folder DATA
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llama/formats/config_json.hpp"
#include "llama/formats/weights.hpp"
#include "tests/llama/folders/stories.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "transformer/data/window_order.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace {

namespace fs = std::filesystem;
using namespace llama;
using Tensors = std::map<std::string, std::vector<float>>;

void write(fs::path const& path, std::string const& text) { std::ofstream(path, std::ios::binary) << text; }

void write_model(fs::path const& folder, LlamaConfig const& config, Tensors const& values) {
  fs::create_directories(folder);
  write(folder / "config.json", huggingface_config_text(config, 1, 2, "float32"));
  std::vector<WeightsWriter::Tensor> tensors;
  for (auto const& tensor : llama_tensors(config)) tensors.push_back({tensor.name, tensor.shape, fsdp::DType::f32});
  WeightsWriter writer({folder / "model.safetensors"}, tensors);
  for (auto const& tensor : tensors) writer.write(tensor.name, values.at(tensor.name));
  writer.finish();
}

void write_random(fs::path const& folder, std::uint64_t seed) {
  LlamaConfig config;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.vocab_size = 264;
  config.max_position_embeddings = 128;
  config.rope_theta = 10000;
  Tensors values;
  std::uint64_t word = seed;
  for (auto const& tensor : llama_tensors(config)) {
    auto& to = values[tensor.name];
    to.resize(static_cast<std::size_t>(tensor.numel()));
    for (auto& value : to) {
      word = mix(word);
      value = tensor.shape.size() == 1 ? 1.0f : static_cast<float>(word >> 40) * 0x1p-24f * 0.2f - 0.1f;
    }
  }
  write_model(folder, config, values);
  fsdp::testing::PieceFile tokens;
  tokens.rows = fsdp::testing::piece_rows({"\xe2\x96\x81"});
  write(folder / "tokenizer.model", tokens.bytes());
}

void write_stories(fs::path const& folder, fs::path const& data) {
  auto const model = llama_stories::read_stories(data);
  write_model(folder, model.config, model.tensors);
  write(folder / "tokenizer.model", model.tokenizer);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::string const kind = argc > 2 ? argv[1] : "";
    if (kind == "random") {
      write_random(argv[2], argc > 3 ? std::stoull(argv[3]) : 1);
    } else if (kind == "stories" && argc == 4) {
      write_stories(argv[2], argv[3]);
    } else {
      std::fputs("usage: write_folder random FOLDER [SEED] | stories FOLDER DATA\n", stderr);
      return 2;
    }
  } catch (std::exception const& error) {
    std::fprintf(stderr, "write_folder: %s\n", error.what());
    return 1;
  }
  return 0;
}
