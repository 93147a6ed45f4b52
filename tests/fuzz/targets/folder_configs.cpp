// SPDX-License-Identifier: Apache-2.0
// Any bytes, and good ones with changes, as the files of HuggingFace's folders that describe a tokenizer, a model or
// adapters: refused by name, or read.
#include <stdlib.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "llama/formats/adapter_files.hpp"
#include "llama/formats/config_json.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"

namespace {

/// A file of the folder that the fuzzer writes, and a good text of it.
struct GoodFile {
  std::string_view name, text;
};

constexpr std::array good_files = std::to_array<GoodFile>({
    {"tokenizer_config.json",
     R"({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": {"content": "</s>"}, "legacy": false,
         "add_bos_token": true, "add_eos_token": true, "extra_special_tokens": {"x": "<s>"}, "added_tokens_decoder":
         {"1": {"content": "<s>", "special": true}, "261": {"content": "<|x|>", "lstrip": false}}})"},
    {"added_tokens.json", R"({"<|x|>": 261, "<|y|>": 262})"},
    {"special_tokens_map.json", R"({"bos_token": "<s>", "additional_special_tokens": ["</s>", {"content": "<s>"}]})"},
    {"adapter_config.json",
     R"({"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8.5, "target_modules": ["q_proj"],
         "layers_to_transform": [0], "layers_pattern": "layers", "init_lora_weights": true, "bias": "none",
         "base_model_name_or_path": "base", "rank_pattern": {}, "use_dora": false})"},
    {"config.json",
     R"({"model_type": "mistral", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 300,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 32,
         "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192, "rope_theta": 5e5}, "eos_token_id": [1, 2]})"},
});

/// A folder with a good tokenizer.json or tokenizer.model.
class FuzzedFolder {
 public:
  explicit FuzzedFolder(bool json) {
    auto name = (std::filesystem::temp_directory_path() / "fsdp_fuzz_XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
    std::vector<std::string> const pieces{"\xe2\x96\x81", "a"};
    if (json) write("tokenizer.json", fsdp::testing::piece_json(pieces).dump());
    if (!json) write("tokenizer.model", fsdp::testing::PieceFile{.rows = fsdp::testing::piece_rows(pieces)}.bytes());
  }
  FuzzedFolder(FuzzedFolder const&) = delete;
  FuzzedFolder& operator=(FuzzedFolder const&) = delete;
  ~FuzzedFolder() { std::filesystem::remove_all(path_); }
  std::filesystem::path const& path() const { return path_; }
  void write(std::string_view name, std::string const& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
  }

 private:
  std::filesystem::path path_;
};

void read_folder(FuzzedFolder const& folder, std::string_view name, std::string const& text) {
  if (name == "config.json") {
    auto const config = llama::parse_huggingface_config(text, "'it'");
    if (llama::parse_huggingface_config(llama::huggingface_config_text(config, 1, 2, "float32"), "'it'") != config)
      std::abort();
  } else if (name == "adapter_config.json") {
    static_cast<void>(llama::read_adapter_config(folder.path()).adapts("model.layers.0.self_attn.q_proj.weight"));
  } else {
    auto const tokenizer = transformer::open_tokenizer_folder(folder.path(), 1000);
    auto const ids = tokenizer->encode("a<|x|>a <s>", transformer::Marker::token);
    static_cast<void>(tokenizer->decode(ids));
    for (auto const id : tokenizer->text_template().after) static_cast<void>(tokenizer->decode({&id, 1}));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  if (size == 0) return 0;
  static FuzzedFolder const folders[2] = {FuzzedFolder(false), FuzzedFolder(true)};
  auto const& folder = folders[data[0] % 2];
  auto const& [name, good] = good_files[data[0] / 2 % good_files.size()];
  std::string_view const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  auto const text = data[0] >= 224 ? std::string(rest) : fsdp::testing::changed(std::string(good), rest);
  folder.write(name, text);
  try {
    read_folder(folder, name, text);
  } catch (fsdp::ConfigError const&) {
  }
  std::filesystem::remove(folder.path() / name);
  return 0;
}
