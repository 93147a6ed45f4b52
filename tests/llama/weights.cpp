// SPDX-License-Identifier: Apache-2.0
// A Llama's weights in HuggingFace's folders: every element is read, whatever part a rank asks for; what is written in
// one file or several is read again to the bit; what is missing, cut or of another model is refused by name.
//
// links: llama_models
// skip-tsan
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/safetensors.hpp"
#include "fsdp/tensor.hpp"
#include "llama/formats/config_json.hpp"
#include "llama/formats/weights.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace {

namespace fs = std::filesystem;
using fsdp::bf16;
using fsdp::DType;
using fsdp::testing::has;
using fsdp::testing::what;
using llama::LlamaConfig;
using transformer::WeightsPlace;
using transformer::WeightsWriter;
using transformer::WeightTensor;
using Folder = fsdp::testing::TemporaryFolder;
using Json = nlohmann::ordered_json;

LlamaConfig tiny(bool tied) {
  LlamaConfig config{12, 10, 2, 4, 2, 6, 7, 16};
  config.tie_word_embeddings = tied;
  return config;
}

/// The value of element `index` of a tensor: no two of a tensor, and hardly two of a model, are alike.
float value(std::string_view name, std::int64_t index) {
  std::uint32_t hash = 17;
  for (char const letter : name) hash = hash * 31 + static_cast<unsigned char>(letter);
  hash = (hash + static_cast<std::uint32_t>(index)) * 2654435761u;
  return static_cast<float>(hash >> 8) * 0x1p-24f - 0.5f;
}
std::vector<float> values_of(WeightTensor const& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value(tensor.name, static_cast<std::int64_t>(i));
  return values;
}
float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return static_cast<float>(bf16(x));
  return dtype == DType::f16 ? static_cast<float>(fsdp::fp16(x)) : x;
}

std::vector<WeightsWriter::Tensor> entries(std::vector<WeightTensor> const& tensors, DType dtype) {
  std::vector<WeightsWriter::Tensor> list;
  for (auto const& tensor : tensors) list.push_back({tensor.name, tensor.shape, dtype});
  return list;
}

/// Bytes of tensors that a file of this model in fp32 may have, so that there are several.
constexpr std::int64_t few = 4000;

/// A folder with these tensors and the model's config.json.
void write(Folder const& folder, LlamaConfig const& config, std::vector<WeightTensor> const& tensors,
           std::int64_t largest = INT64_MAX, DType dtype = DType::f32) {
  folder.file("config.json", llama::huggingface_config_text(config, 1, 2, "float32"));
  WeightsWriter writer({folder.path / "model.safetensors", largest}, entries(tensors, dtype));
  for (auto const& tensor : tensors) writer.write(tensor.name, values_of(tensor));
  writer.finish();
}

std::string opening(Folder const& folder) {
  return what<fsdp::ConfigError>([&] { llama::open_folder(folder.path); });
}

/// Reads every tensor in `parts` ranges, as so many ranks would, and compares all elements.
void check_all(llama::OpenedLlama const& model, std::int64_t parts, DType dtype) {
  for (auto const& tensor : llama::llama_tensors(model.config)) {
    std::int64_t wrong = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      auto const begin = tensor.numel() * part / parts, end = tensor.numel() * (part + 1) / parts;
      std::vector<float> out(static_cast<std::size_t>(end - begin));
      model.weights->read(tensor.name, begin, out);
      for (auto i = begin; i < end; ++i)
        wrong += out[static_cast<std::size_t>(i - begin)] != rounded(value(tensor.name, i), dtype);
    }
    INFO(tensor.name << " in " << parts << " parts");
    CHECK(wrong == 0);
  }
}

std::string bytes_of(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
std::set<std::string> names_in(Folder const& folder) {
  std::set<std::string> names;
  for (auto const& item : fs::directory_iterator(folder.path)) names.insert(item.path().filename().string());
  return names;
}

}  // namespace

TEST_CASE("the tensors of a Llama are as many as it has parameters", "[llama][weights]") {
  LlamaConfig code_llama;
  for (bool const tied : {false, true}) {
    code_llama.tie_word_embeddings = tied;
    std::int64_t elements = 0;
    auto const tensors = llama::llama_tensors(code_llama);
    for (auto const& tensor : tensors) elements += tensor.numel();
    CHECK(elements == code_llama.parameters());
    CHECK(tensors.size() == (tied ? 290u : 291u));
  }
}

TEST_CASE("every element of a folder is read, in one file or several, of every type", "[llama][weights]") {
  for (bool const tied : {false, true}) {
    for (auto const dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (auto const largest : {INT64_MAX, few}) {
        Folder const folder;
        write(folder, tiny(tied), llama::llama_tensors(tiny(tied)), largest, dtype);
        auto const model = llama::open_folder(folder.path);
        CHECK(model.config == tiny(tied));
        for (std::int64_t const parts : {1, 3}) check_all(model, parts, dtype);
        for (auto const& file : fs::directory_iterator(folder.path)) {
          if (file.path().extension() != ".safetensors") continue;
          fsdp::checkpoint::SafetensorsFile const stored(file.path());
          for (auto const& entry : stored.entries()) CHECK(entry.dtype == dtype);
        }
      }
    }
  }
}

TEST_CASE("a tied head's matrix may be there, alone or equal, and frequencies are ignored", "[llama][weights]") {
  auto const config = tiny(true);
  auto const all = llama::llama_tensors(config);
  /// @param table   whether model.embed_tokens.weight is there too
  /// @param change  of one value of the head's matrix
  auto const fill = [&](Folder const& folder, bool table, float change) {
    folder.file("config.json", llama::huggingface_config_text(config, 1, 2, "float32"));
    std::vector<WeightTensor> tensors(all.begin() + (table ? 0 : 1), all.end());
    tensors.push_back({"lm_head.weight", all[0].shape});
    tensors.push_back({"model.layers.1.self_attn.rotary_emb.inv_freq", {3}});
    WeightsWriter writer({folder.path / "model.safetensors"}, entries(tensors, DType::f32));
    for (auto const& tensor : tensors) {
      bool const head = tensor.name == "lm_head.weight";
      auto values = values_of(head ? all[0] : tensor);
      if (head) values.back() += change;
      writer.write(tensor.name, values);
    }
    writer.finish();
  };
  for (bool const table : {false, true}) {
    Folder const folder;
    fill(folder, table, 0.0f);
    check_all(llama::open_folder(folder.path), 2, DType::f32);
  }
  Folder const folder;
  fill(folder, true, 0.25f);
  CHECK(opening(folder) == "'" + folder.path.string() +
                               "': 'lm_head.weight' differs from 'model.embed_tokens.weight': expected equal values, "
                               "for config.json says tie_word_embeddings");
}

TEST_CASE("names without the prefix of LlamaForCausalLM are read", "[llama][weights]") {
  auto const config = tiny(true);
  for (auto const largest : {INT64_MAX, few}) {
    Folder const folder;
    folder.file("config.json", llama::huggingface_config_text(config, 1, 2, "float32"));
    auto tensors = llama::llama_tensors(config);
    for (auto& tensor : tensors) tensor.name = tensor.name.substr(std::string_view("model.").size());
    WeightsWriter writer({folder.path / "model.safetensors", largest}, entries(tensors, DType::f32));
    for (auto const& tensor : llama::llama_tensors(config)) writer.write(tensor.name.substr(6), values_of(tensor));
    writer.finish();
    check_all(llama::open_folder(folder.path), 2, DType::f32);
  }
}

TEST_CASE("several files have an index of all tensors, and none is larger than asked", "[llama][weights]") {
  Folder const folder;
  auto const tensors = llama::llama_tensors(tiny(false));
  write(folder, tiny(false), tensors, few);
  auto const index = Json::parse(bytes_of(folder.path / "model.safetensors.index.json"));
  std::int64_t total = 0;
  std::set<std::string> files;
  for (auto const& tensor : tensors) {
    total += tensor.numel() * 4;
    auto const name = index["weight_map"][tensor.name].get<std::string>();
    files.insert(name);
    CHECK(fsdp::checkpoint::SafetensorsFile(folder.path / name).contains(tensor.name));
  }
  CHECK(index["weight_map"].size() == tensors.size());
  CHECK(index["metadata"]["total_size"] == total);
  CHECK(files.size() == 3);
  CHECK(files.contains("model-00001-of-00003.safetensors"));
  for (auto const& name : files) {
    std::int64_t bytes = 0;
    auto const file = fsdp::checkpoint::SafetensorsFile(folder.path / name);
    CHECK(file.metadata().at("format") == "pt");
    for (auto const& entry : file.entries()) bytes += entry.numel() * 4;
    CHECK(bytes <= few);
  }
  // A tensor that is larger than a file has one of its own.
  Folder const small;
  write(small, tiny(false), tensors, 1);
  CHECK(names_in(small).size() == tensors.size() + 2);
  check_all(llama::open_folder(small.path), 1, DType::f32);
}

TEST_CASE("bf16 values are written with their bits", "[llama][weights]") {
  Folder const folder;
  // Two NaN with bits of their own, which arithmetic might change; both zeros; a subnormal; infinity.
  std::vector<std::uint16_t> const bits{0x7f81, 0xffd5, 0x0000, 0x8000, 0x0001, 0x7f80};
  std::vector<bf16> raw(bits.size());
  for (std::size_t i = 0; i < bits.size(); ++i) raw[i].bits = bits[i];
  WeightsWriter writer({folder.path / "model.safetensors"}, {{"raw", {6}, DType::bf16}, {"wide", {6}, DType::f32}});
  writer.write("raw", std::span<bf16 const>(raw));
  writer.write("wide", std::span<bf16 const>(raw));
  writer.finish();
  auto const bytes = bytes_of(folder.path / "model.safetensors");
  REQUIRE(bytes.size() > 36);
  CHECK(std::memcmp(bytes.data() + bytes.size() - 36, bits.data(), 12) == 0);
  float wide[6];
  std::memcpy(wide, bytes.data() + bytes.size() - 24, 24);
  CHECK(wide[4] == 0x1p-133f);
}

TEST_CASE("bf16 values that were read as fp32 are written with their bits", "[llama][weights]") {
  Folder const folder;
  std::vector<float> values;
  std::vector<std::uint16_t> bits;
  for (std::uint32_t each = 0; each <= 0xffff; ++each) {
    bf16 narrow;
    narrow.bits = static_cast<std::uint16_t>(each);
    if (each % 0x8000 > 0x7f80) continue;  // NaN
    bits.push_back(narrow.bits);
    values.push_back(static_cast<float>(narrow));
  }
  auto const count = static_cast<std::int64_t>(values.size());
  WeightsWriter writer({folder.path / "model.safetensors"}, {{"all", {count}, DType::bf16}});
  writer.write("all", values);
  writer.finish();
  auto const bytes = bytes_of(folder.path / "model.safetensors");
  REQUIRE(bytes.size() > 2 * bits.size());
  CHECK(std::memcmp(bytes.data() + bytes.size() - 2 * bits.size(), bits.data(), 2 * bits.size()) == 0);
}

TEST_CASE("files get their names when all is written, and what readers would take instead is gone",
          "[llama][weights]") {
  Folder const folder;
  auto const tensors = llama::llama_tensors(tiny(false));
  write(folder, tiny(false), tensors);
  auto const before = bytes_of(folder.path / "model.safetensors");
  {
    WeightsWriter writer({folder.path / "model.safetensors", few}, entries(tensors, DType::f32));
    writer.write(tensors[0].name, values_of(tensors[0]));
    CHECK_THROWS_AS(writer.finish(), fsdp::UsageError);
  }
  CHECK(names_in(folder) == std::set<std::string>{"config.json", "model.safetensors"});
  CHECK(bytes_of(folder.path / "model.safetensors") == before);
  write(folder, tiny(false), tensors, few);
  CHECK_FALSE(fs::exists(folder.path / "model.safetensors"));
  check_all(llama::open_folder(folder.path), 1, DType::f32);
  write(folder, tiny(false), tensors, few + few);  // other files, another index
  check_all(llama::open_folder(folder.path), 1, DType::f32);
}

TEST_CASE("folders that are not whole are refused by name", "[llama][weights]") {
  auto const config = tiny(false);
  auto const all = llama::llama_tensors(config);
  auto const in = [](Folder const& folder, std::string const& name) { return (folder.path / name).string(); };
  SECTION("no config.json") {
    Folder const folder;
    CHECK(opening(folder) == "'" + folder.path.string() + "' has no config.json, which describes the model");
  }
  SECTION("pickles alone") {
    for (std::string const name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
      Folder const folder;
      folder.file("config.json", llama::huggingface_config_text(config, 1, 2, "float32"));
      folder.file(name, "x");
      CHECK(opening(folder) == "'" + folder.path.string() +
                                   "' has no weights: expected model.safetensors or model.safetensors.index.json (" +
                                   name +
                                   " is a pickle and is not read; write safetensors with save_pretrained(..., "
                                   "safe_serialization=True))");
    }
  }
  SECTION("a part that the index names is missing, or cut") {
    Folder const folder;
    write(folder, config, all, few);
    auto const part = folder.path / "model-00002-of-00003.safetensors";
    fs::resize_file(part, fs::file_size(part) - 1);
    CHECK(has(opening(folder), "'" + part.string() + "': "));
    CHECK(has(opening(folder), "the file is truncated or damaged"));
    fs::remove(part);
    CHECK(has(opening(folder), "'" + part.string() + "': cannot be opened: "));
  }
  SECTION("a tensor that the index lists is missing in its file, or lies in a file that the index does not name") {
    Folder const folder;
    write(folder, config, all, few);
    auto index = Json::parse(bytes_of(folder.path / "model.safetensors.index.json"));
    index["weight_map"]["model.layers.2.mlp.up_proj.weight"] = "model-00003-of-00003.safetensors";
    folder.file("model.safetensors.index.json", index.dump());
    CHECK(opening(folder) == "'" + in(folder, "model-00003-of-00003.safetensors") +
                                 "': tensor 'model.layers.2.mlp.up_proj.weight' is missing, though "
                                 "model.safetensors.index.json lists it");
    auto const first = in(folder, "model-00001-of-00003.safetensors");
    fs::copy_file(in(folder, "model-00002-of-00003.safetensors"), first, fs::copy_options::overwrite_existing);
    CHECK(has(opening(folder), "'" + first + "' has a tensor "));
    CHECK(has(opening(folder), "that model.safetensors.index.json does not list"));
  }
  SECTION("a tensor is missing, of another shape, or more than the model has") {
    auto const changed = [&](auto const& change) {
      Folder const folder;
      auto tensors = all;
      change(tensors);
      write(folder, config, tensors);
      auto const text = opening(folder), file = in(folder, "model.safetensors");
      REQUIRE(text.starts_with("'" + file + "'"));
      return text.substr(file.size() + 2);
    };
    CHECK(changed([](auto& tensors) { tensors.pop_back(); }) == ": tensor 'lm_head.weight' is missing");
    CHECK(changed([](auto& tensors) {
            tensors[3].shape = {24, 12};
          }) ==
          ": tensor 'model.layers.0.self_attn.k_proj.weight': expected shape (12, 12) by config.json, got (24, 12)");
    CHECK(changed([](auto& tensors) {
            tensors.push_back({"model.layers.0.self_attn.q_proj.bias", {24}});
          }) == " has a tensor 'model.layers.0.self_attn.q_proj.bias' that the model of config.json does not have");
    CHECK(changed([](auto& tensors) {
            tensors.push_back({"model.layers.2.input_layernorm.weight", {12}});
          }) == " has a tensor 'model.layers.2.input_layernorm.weight' that the model of config.json does not have");
  }
  SECTION("a type that is no weight's") {
    Folder const folder;
    write(folder, config, all);
    auto const path = folder.path / "model.safetensors";
    fsdp::checkpoint::SafetensorsWriter writer(path, {{"model.norm.weight", DType::i64, {12}}});
    writer.write<std::int64_t>("model.norm.weight", std::vector<std::int64_t>(12));
    writer.finish();
    CHECK(has(opening(folder), "'" + path.string() + "': tensor "));
  }
}
