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

#include "llama/config_json.hpp"
#include "llama/weights.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "transformer/data/window_order.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace {

namespace fs = std::filesystem;
using namespace llama;
using Tensors = std::map<std::string, std::vector<float>>;

std::string read(fs::path const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}
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

/// The rows of a head in two halves, where llama2.c has neighbouring pairs.
void to_halves(std::vector<float>& matrix, std::int64_t heads, std::int64_t size, std::int64_t width) {
  auto const from = matrix;
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::int64_t i = 0; i < size; ++i) {
      auto const row = head * size + i % 2 * (size / 2) + i / 2;
      std::copy_n(from.begin() + (head * size + i) * width, width, matrix.begin() + row * width);
    }
}

void write_stories(fs::path const& folder, fs::path const& data) {
  auto const file = read(data / "stories260K.bin");
  std::int32_t header[7]{};
  std::memcpy(header, file.data(), sizeof header);
  LlamaConfig config;
  config.hidden_size = header[0];
  config.intermediate_size = header[1];
  config.num_hidden_layers = header[2];
  config.num_attention_heads = header[3];
  config.num_key_value_heads = header[4];
  config.vocab_size = header[5];
  config.max_position_embeddings = header[6];
  config.head_dim = config.hidden_size / config.num_attention_heads;
  config.rope_theta = 10000;
  config.tie_word_embeddings = true;
  auto const width = config.hidden_size, mlp = config.intermediate_size, queries = config.heads().width();
  auto const keys = config.num_key_value_heads * config.head_dim;
  std::size_t at = sizeof header;
  auto const take = [&](std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    if (at + 4 * values.size() > file.size()) throw std::runtime_error("stories260K.bin is too short");
    std::memcpy(values.data(), file.data() + at, 4 * values.size());
    at += 4 * values.size();
    return values;
  };
  Tensors values;
  values["model.embed_tokens.weight"] = take(config.vocab_size * width);
  // A kind of tensors after the other, of all layers.
  for (auto const& [name, count] : {std::pair<char const*, std::int64_t>{"input_layernorm", width},
                                    {"self_attn.q_proj", queries * width},
                                    {"self_attn.k_proj", keys * width},
                                    {"self_attn.v_proj", keys * width},
                                    {"self_attn.o_proj", width * queries},
                                    {"post_attention_layernorm", width},
                                    {"mlp.gate_proj", mlp * width},
                                    {"mlp.down_proj", width * mlp},
                                    {"mlp.up_proj", mlp * width}}) {
    for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      auto& tensor = values[fsdp::formatted("model.layers.{}.{}.weight", layer, std::string(name))];
      tensor = take(count);
      bool const is_q = std::string_view(name) == "self_attn.q_proj";
      if (is_q || std::string_view(name) == "self_attn.k_proj")
        to_halves(tensor, is_q ? config.num_attention_heads : config.num_key_value_heads, config.head_dim, width);
    }
  }
  values["model.norm.weight"] = take(width);
  write_model(folder, config, values);
  fsdp::testing::PieceFile tokens;
  tokens.rows = fsdp::testing::read_tok512(read(data / "tok512.bin"));
  write(folder / "tokenizer.model", tokens.bytes());
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
