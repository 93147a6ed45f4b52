// SPDX-License-Identifier: Apache-2.0
// llama2.c's model stories260K.bin, with its tokens tok512.bin.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "llama/llama_config.hpp"
#include "tests/support/tokenizer_files.hpp"

namespace llama_stories {

struct Model {
  llama::LlamaConfig config;
  std::map<std::string, std::vector<float>> tensors;  ///< by HuggingFace's names
  std::string tokenizer;                              ///< a tokenizer.model
};

inline std::string read(std::filesystem::path const& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The rows of a head in two halves, where llama2.c has neighbouring pairs.
inline void to_halves(std::vector<float>& matrix, std::int64_t heads, std::int64_t size, std::int64_t width) {
  auto const from = matrix;
  for (std::int64_t head = 0; head < heads; ++head)
    for (std::int64_t i = 0; i < size; ++i) {
      auto const row = head * size + i % 2 * (size / 2) + i / 2;
      std::copy_n(from.begin() + (head * size + i) * width, width, matrix.begin() + row * width);
    }
}

/// @param data  the folder of both files
inline Model read_stories(std::filesystem::path const& data) {
  Model model;
  auto& config = model.config;
  auto const file = read(data / "stories260K.bin");
  std::int32_t header[7]{};
  std::memcpy(header, file.data(), sizeof header);
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
  auto& values = model.tensors;
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
  fsdp::testing::PieceFile tokens;
  tokens.rows = fsdp::testing::read_tok512(read(data / "tok512.bin"));
  model.tokenizer = tokens.bytes();
  return model;
}

}  // namespace llama_stories
