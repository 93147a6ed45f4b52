// SPDX-License-Identifier: Apache-2.0
// GPT-2's weights as HuggingFace and llm.c have them: every element is read where the model wants it, whatever part a
// rank asks for; what would compute another model is refused by name.
// skip-tsan
// links: nanogpt_models
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/safetensors.hpp"
#include "fsdp/tensor.hpp"
#include "nanogpt/formats/gpt2/config_json.hpp"
#include "nanogpt/formats/gpt2/llm_c.hpp"
#include "nanogpt/formats/gpt2/open_model.hpp"
#include "nanogpt/formats/gpt2/tensor_names.hpp"
#include "nanogpt/formats/start.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "tests/support/tokenizer_files.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/tokenizer/tokenizer_folder.hpp"

namespace {

using namespace nanogpt;
namespace fs = std::filesystem;
using fsdp::bf16;
using fsdp::DType;
using fsdp::fp16;
using fsdp::checkpoint::SafetensorsWriter;
using fsdp::checkpoint::TensorEntry;
using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;

GptConfig tiny() {
  GptConfig config{2, 2, 4, 6, 10, 0.0f, true};
  config.activation = Activation::gelu_new;
  return config;
}

/// The value of element `index` of our tensor: no two of a tensor, and hardly two of a model, are alike.
float value(std::string_view name, std::int64_t index) {
  std::uint32_t hash = 17;
  for (char const letter : name) hash = hash * 31 + static_cast<unsigned char>(letter);
  hash = (hash + static_cast<std::uint32_t>(index)) * 2654435761u;
  return static_cast<float>(hash >> 8) * 0x1p-24f - 0.5f;
}
template <class T>
float rounded(float x) {
  return static_cast<float>(T(x));
}

/// The tensor in HuggingFace's orientation.
std::vector<float> theirs(GptTensor const& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.numel()));
  auto const cols = tensor.transposed ? tensor.shape[1] : 1, rows = tensor.numel() / cols;
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t col = 0; col < cols; ++col)
      values[static_cast<std::size_t>(col * rows + row)] = value(tensor.name, row * cols + col);
  return values;
}

/// Forms of a HuggingFace folder.
struct Style {
  bool prefix = true, buffers = false, head = false, table = true;
  int files = 1;
};

struct Planned {
  TensorEntry entry;
  std::vector<float> values;
};

std::vector<Planned> plan(GptConfig const& config, Style const& style, DType type) {
  std::vector<Planned> list;
  for (auto const& tensor : gpt_tensors(config)) {
    auto const values = theirs(tensor);
    if (tensor.name == token_table && style.head) list.push_back({{"lm_head.weight", type, tensor.shape}, values});
    if (tensor.name == token_table && !style.table) continue;
    auto const name = style.prefix ? tensor.name : tensor.name.substr(std::string("transformer.").size());
    list.push_back({{name, type, tensor.stored_shape()}, values});
  }
  if (style.buffers) {
    list.push_back({{"transformer.h.0.attn.bias", type, {1, 1, 2, 2}}, {1, 0, 1, 1}});
    list.push_back({{"h.1.attn.masked_bias", type, {}}, {-1e4f}});
  }
  return list;
}

template <class T>
void write_file(fs::path const& path, std::span<Planned const> tensors) {
  std::vector<TensorEntry> entries;
  for (auto const& tensor : tensors) entries.push_back(tensor.entry);
  SafetensorsWriter writer(path, entries, {{"format", "pt"}});
  for (auto const& tensor : tensors) {
    std::vector<T> values;
    for (auto const each : tensor.values) values.push_back(T(each));
    writer.write<T>(tensor.entry.name, values);
  }
  writer.finish();
}

std::string config_text(GptConfig const& config) { return huggingface_config_text(config, 9, 0.1, "float32"); }

template <class T = float>
void write_folder(
    Folder const& folder, GptConfig const& config, Style const& style = {},
    std::function<void(std::vector<Planned>&)> const& change = [](auto&) {}) {
  auto tensors = plan(config, style, fsdp::dtype_of<T>);
  change(tensors);
  folder.file("config.json", config_text(config));
  if (style.files == 1) return write_file<T>(folder.path / "model.safetensors", tensors);
  auto const half = tensors.size() / 2;
  std::span<Planned const> const all(tensors);
  write_file<T>(folder.path / "model-00001-of-00002.safetensors", all.first(half));
  write_file<T>(folder.path / "model-00002-of-00002.safetensors", all.subspan(half));
  std::string index = R"({"metadata": {"total_size": 1}, "weight_map": {)";
  for (std::size_t i = 0; i < tensors.size(); ++i)
    index += (i == 0 ? "\"" : ", \"") + tensors[i].entry.name + "\": \"model-0000" + (i < half ? "1" : "2") +
             "-of-00002.safetensors\"";
  folder.file("model.safetensors.index.json", index + "}}");
}

Settings from(fs::path const& path) {
  Settings settings;
  settings.init_from = path.string();
  settings.model_dir = "";
  return settings;
}

/// Reads every tensor in `parts` ranges, as so many ranks would, and compares all elements.
template <class T = float>
void check_all(GptConfig const& config, WeightsSource const& weights, std::int64_t parts) {
  for (auto const& tensor : gpt_tensors(config)) {
    std::int64_t wrong = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      auto const begin = tensor.numel() * part / parts, end = tensor.numel() * (part + 1) / parts;
      std::vector<float> out(static_cast<std::size_t>(end - begin));
      weights.read(tensor.name, begin, out);
      for (auto i = begin; i < end; ++i)
        wrong += out[static_cast<std::size_t>(i - begin)] != rounded<T>(value(tensor.name, i));
    }
    INFO(tensor.name << " in " << parts << " parts");
    CHECK(wrong == 0);
  }
}
template <class T = float>
void check_all(OpenedModel const& model, std::int64_t parts) {
  check_all<T>(model.config, *model.weights, parts);
}

using Words = std::array<std::int32_t, 256>;
Words llm_c_header() {
  Words words{};
  std::int32_t const head[] = {20240326, 3, 6, 10, 2, 2, 4, 128};
  std::copy(std::begin(head), std::end(head), words.begin());
  return words;
}
/// A file as llm.c's writers order it, spelled out.
template <class T>
std::string llm_c_file(Words words) {
  if constexpr (std::is_same_v<T, bf16>) words[1] = 5;
  std::string bytes(reinterpret_cast<char const*>(words.data()), sizeof words);
  auto const put = [&](std::string const& name, std::int64_t count, std::int64_t padding = 0) {
    for (std::int64_t i = 0; i < count + padding; ++i) {
      T const each(i < count ? value("transformer." + name, i) : 0.0f);
      bytes.append(reinterpret_cast<char const*>(&each), sizeof each);
    }
  };
  constexpr std::int64_t width = 4;
  put("wte.weight", 10 * width, (128 - 10) * width);
  put("wpe.weight", 6 * width);
  std::pair<char const*, std::int64_t> const kinds[] = {{"ln_1.weight", width},
                                                        {"ln_1.bias", width},
                                                        {"attn.c_attn.weight", 3 * width * width},
                                                        {"attn.c_attn.bias", 3 * width},
                                                        {"attn.c_proj.weight", width * width},
                                                        {"attn.c_proj.bias", width},
                                                        {"ln_2.weight", width},
                                                        {"ln_2.bias", width},
                                                        {"mlp.c_fc.weight", 4 * width * width},
                                                        {"mlp.c_fc.bias", 4 * width},
                                                        {"mlp.c_proj.weight", 4 * width * width},
                                                        {"mlp.c_proj.bias", width}};
  for (auto const& [name, count] : kinds)
    for (auto const* const layer : {"h.0.", "h.1."}) put(std::string(layer) + name, count);
  put("ln_f.weight", width);
  put("ln_f.bias", width);
  return bytes;
}

std::string contents(fs::path const& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// A variable of the environment, until the end of a test.
class Variable {
 public:
  Variable(char const* name, std::string const& value) : name_(name) {
    if (char const* const old = std::getenv(name)) old_ = old;
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_); }
  Variable(Variable const&) = delete;
  Variable& operator=(Variable const&) = delete;

 private:
  char const* name_;
  std::optional<std::string> old_;
};

}  // namespace

TEST_CASE("the list of tensors has all parameters of a model") {
  for (bool const bias : {false, true}) {
    GptConfig const config{3, 2, 8, 6, 10, 0.0f, bias};
    auto const tensors = gpt_tensors(config);
    std::int64_t elements = 0;
    for (auto const& tensor : tensors) elements += tensor.numel();
    CHECK(elements == config.parameters());
    CHECK(static_cast<std::int64_t>(tensors.size()) == config.decayed().tensors + config.not_decayed().tensors);
  }
}

TEST_CASE("every element of HuggingFace's files is read where the model has it") {
  Style const styles[] = {{},
                          {.prefix = false},
                          {.buffers = true},
                          {.head = true},
                          {.head = true, .table = false},
                          {.prefix = false, .buffers = true, .head = true, .files = 2}};
  for (auto const& style : styles) {
    Folder const folder;
    write_folder(folder, tiny(), style);
    auto const model = open_pretrained(from(folder.path));
    CHECK(model.config.bias);
    CHECK(model.config.activation == Activation::gelu_new);
    for (auto const parts : {1, 3, 1000}) check_all(model, parts);
  }
  Folder const halves, brains;
  write_folder<fp16>(halves, tiny());
  check_all<fp16>(open_pretrained(from(halves.path)), 3);
  write_folder<bf16>(brains, tiny());
  check_all<bf16>(open_pretrained(from(brains.path)), 3);
}

TEST_CASE("matrices larger than a block are read in bands") {
  GptConfig config{1, 2, 272, 6, 10, 0.0f, true};  // 1088 rows of 272
  Folder const folder;
  write_folder(folder, config);
  for (auto const parts : {1, 3, 1000}) check_all(open_pretrained(from(folder.path)), parts);
}

TEST_CASE("masks of any type are no weights") {
  Folder const folder;
  write_folder(folder, tiny(), {.buffers = true});
  auto bytes = contents(folder.path / "model.safetensors");
  // Uses the same 16 bytes as a mask of other types, in a header of the same length.
  std::string const mask = R"("dtype":"F32","shape":[1,1,2,2])";
  for (std::string other : {R"("dtype":"I32","shape":[1,1,2,2])", R"("dtype":"BOOL","shape":[4,4])"}) {
    other.resize(mask.size(), ' ');
    auto changed = bytes;
    changed.replace(changed.find(mask), mask.size(), other);
    folder.file("model.safetensors", changed);
    check_all(open_pretrained(from(folder.path)), 1);
  }
  // But no weight may have one.
  std::string const weight = R"("dtype":"F32","shape":[12])";
  bytes.replace(bytes.find(weight), weight.size(), R"("dtype":"I32","shape":[12])");
  folder.file("model.safetensors", bytes);
  CHECK(has(what([&] { open_pretrained(from(folder.path)); }), "expected dtype F32, BF16 or F16, got I32"));
}

TEST_CASE("weights that are missing, strange or not tied are refused by name") {
  struct Case {
    char const* message;
    std::function<void(std::vector<Planned>&)> change;
  };
  auto const named = [](std::vector<Planned>& all, std::string const& name) -> Planned& {
    return *std::find_if(all.begin(), all.end(), [&](auto const& each) { return each.entry.name == name; });
  };
  Case const cases[] = {
      {"tensor 'transformer.h.1.mlp.c_fc.bias' is missing",
       [&](auto& all) { all.erase(all.begin() + (&named(all, "transformer.h.1.mlp.c_fc.bias") - all.data())); }},
      {"has a tensor 'transformer.h.2.ln_1.weight' that the model of config.json does not have",
       [&](auto& all) {
         all.push_back({{"transformer.h.2.ln_1.weight", DType::f32, {1}}, {0}});
       }},
      {"has a tensor 'score.weight' that the model of config.json does not have",
       [&](auto& all) {
         all.push_back({{"score.weight", DType::f32, {1}}, {0}});
       }},
      {"tensor 'transformer.h.0.attn.c_attn.weight': expected shape (4, 12) by config.json, got (12, 4)",
       [&](auto& all) {
         named(all, "transformer.h.0.attn.c_attn.weight").entry.shape = {12, 4};
       }},
      {"'transformer.wpe.weight' and 'wpe.weight' name the same tensor of the model",
       [&](auto& all) {
         auto again = named(all, "transformer.wpe.weight");
         again.entry.name = "wpe.weight";
         all.push_back(again);
       }},
      {"'lm_head.weight' differs from 'transformer.wte.weight'",
       [&](auto& all) {
         auto head = named(all, "transformer.wte.weight");
         head.entry.name = "lm_head.weight";
         head.values[39] += 0x1p-20f;
         all.push_back(head);
       }},
  };
  for (auto const& each : cases) {
    Folder const folder;
    write_folder(folder, tiny(), {}, each.change);
    auto const text = what([&] { open_pretrained(from(folder.path)); });
    INFO(text);
    CHECK(has(text, each.message));
  }
}

TEST_CASE("files and folders that do not hold together are refused") {
  auto const problem = [](auto const& damage, Style const& style = {}) {
    Folder const folder;
    write_folder(folder, tiny(), style);
    damage(folder);
    return what([&] { open_pretrained(from(folder.path)); });
  };
  auto const cut = [](fs::path const& path) { fs::resize_file(path, fs::file_size(path) - 1); };
  CHECK(has(problem([](auto& f) { fs::remove(f.path / "model.safetensors"); }), "has no weights"));
  CHECK(has(problem([](auto& f) { fs::remove(f.path / "config.json"); }), "has no config.json"));
  CHECK(has(problem([&](auto& f) { cut(f.path / "model.safetensors"); }), "outside the"));
  CHECK(has(problem([](auto& f) { f.file("config.json", "[]"); }), "does not begin with '{'"));
  CHECK(has(problem([](auto& f) { f.file("config.json", "{}"); }), "got neither"));
  Style const two{.files = 2};
  auto const index = "model.safetensors.index.json";
  CHECK(
      has(problem([](auto& f) { fs::remove(f.path / "model-00002-of-00002.safetensors"); }, two), "cannot be opened"));
  CHECK(has(problem([&](auto& f) { f.file(index, R"({"weight_map": {"a": "../b"}})"); }, two), "the name of a file"));
  CHECK(has(problem([&](auto& f) { f.file(index, R"({"weight_map": {}})"); }, two), "names no tensor"));
  auto const renamed = [&](auto& f, std::string const& from_text, std::string const& to_text) {
    auto text = contents(f.path / index);
    text.replace(text.find(from_text), from_text.size(), to_text);
    f.file(index, text);
  };
  CHECK(has(problem([&](auto& f) { renamed(f, "transformer.wpe.weight", "wpe"); }, two), "does not list"));
  CHECK(has(problem(
                [&](auto& f) {
                  renamed(f, "\"transformer.wpe", "\"x\": \"model-00002-of-00002.safetensors\", \"transformer.wpe");
                },
                two),
            "tensor 'x' is missing"));
}

TEST_CASE("config.json says what model it is, and what nanogpt does not compute is refused") {
  auto const good = config_text(tiny());
  auto const config = parse_huggingface_config(good, "it");
  CHECK(config.n_layer == 2);
  CHECK(config.n_head == 2);
  CHECK(config.n_embd == 4);
  CHECK(config.block_size == 6);
  CHECK(config.vocab_size == 10);
  auto const with = [&](std::string const& field, std::string const& text) {
    auto changed = good;
    auto const at = changed.find("\"" + field + "\":");
    if (at == std::string::npos) return changed.insert(1, "\"" + field + "\": " + text + ",");
    auto const end = changed.find_first_of(",\n", at);
    return changed.replace(at, end - at, "\"" + field + "\": " + text);
  };
  for (auto const& [field, text] :
       {std::pair("activation_function", "\"gelu_pytorch_tanh\""), std::pair("n_inner", "16"),
        std::pair("reorder_and_upcast_attn", "true"), std::pair("summary_type", "\"cls_index\""),
        std::pair("resid_pdrop", "0.5"), std::pair("pruned_heads", "{}"), std::pair("n_ctx", "null"),
        std::pair("eos_token_id", "[0, 9]"), std::pair("eos_token_id", "50256")})
    CHECK(parse_huggingface_config(with(field, text), "it").activation == Activation::gelu_new);
  CHECK(parse_huggingface_config(with("activation_function", "\"gelu\""), "it").activation == Activation::gelu);
  CHECK(parse_huggingface_config(R"({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 4, "n_positions": 6,
                                     "vocab_size": 10})",
                                 "it")
            .activation == Activation::gelu_new);
  for (auto const& [field, text] : {std::pair("model_type", "\"llama\""),
                                    std::pair("layer_norm_epsilon", "1e-6"),
                                    std::pair("activation_function", "\"relu\""),
                                    std::pair("activation_function", "7"),
                                    std::pair("scale_attn_weights", "false"),
                                    std::pair("scale_attn_by_inverse_layer_idx", "true"),
                                    std::pair("add_cross_attention", "true"),
                                    std::pair("tie_word_embeddings", "false"),
                                    std::pair("tie_word_embeddings", "1"),
                                    std::pair("n_inner", "17"),
                                    std::pair("n_ctx", "5"),
                                    std::pair("pruned_heads", "{\"0\": [1]}"),
                                    std::pair("quantization_config", "{\"bits\": 4}"),
                                    std::pair("eos_token_id", "10"),
                                    std::pair("bos_token_id", "[9, 10]"),
                                    std::pair("auto_map", "{\"AutoModel\": \"m.M\"}"),
                                    std::pair("is_encoder_decoder", "true"),
                                    std::pair("alibi", "true"),
                                    std::pair("n_layer", "-1"),
                                    std::pair("n_layer", "2.5"),
                                    std::pair("vocab_size", "18446744073709551615")}) {
    auto const message = what([&, f = field, t = text] { parse_huggingface_config(with(f, t), "it"); });
    INFO(field << " " << text << ": " << message);
    CHECK(has(message, "it: '" + std::string(field) + "': expected"));
  }
  CHECK(
      has(what([&] { parse_huggingface_config(with("n_embd", "1000000000000"), "it"); }), "it: width: expected 1 to"));
  CHECK(has(what([&] { parse_huggingface_config(with("n_head", "3"), "it"); }),
            "expected n_embd to be a multiple of n_head, got n_embd "));
}

TEST_CASE("llm.c's files are read and written, in both precisions") {
  Folder const folder;
  LlmcFile const fp32(folder.file("fp32.bin", llm_c_file<float>(llm_c_header())));
  LlmcFile const brain(folder.file("bf16.bin", llm_c_file<bf16>(llm_c_header())));
  CHECK(fp32.config().activation == Activation::gelu_new);
  CHECK(fp32.config().bias);
  for (auto const parts : {1, 3, 50}) {
    check_all(fp32.config(), fp32, parts);
    check_all<bf16>(brain.config(), brain, parts);
  }
  CHECK(is_llm_c(folder.path / "bf16.bin"));
  CHECK_FALSE(is_llm_c(folder.path));
  write_llm_c(folder.path / "a", fp32.config(), fp32, false);
  write_llm_c(folder.path / "b", fp32.config(), fp32, true);
  CHECK(contents(folder.path / "a") == contents(folder.path / "fp32.bin"));
  CHECK(contents(folder.path / "b") == contents(folder.path / "bf16.bin"));
}

TEST_CASE("llm.c's files that are not what their headers say are refused") {
  Folder const folder;
  auto const good = llm_c_file<float>(llm_c_header());
  auto const problem = [&](std::string const& bytes) {
    auto const path = folder.file("x.bin", bytes);
    return what([&] { LlmcFile const file(path); });
  };
  CHECK(has(problem(good), "nothing was thrown"));
  CHECK(has(problem(good.substr(0, good.size() - 1)), "it is truncated"));
  CHECK(has(problem(good.substr(0, 1000)), "fewer than the 1024 bytes of llm.c's header"));
  CHECK(has(problem(good + "x"), "there are bytes after the weights"));
  auto const changed = [&](std::size_t word, std::int32_t number) {
    auto words = llm_c_header();
    words[word] = number;
    return problem(std::string(reinterpret_cast<char const*>(words.data()), sizeof words) + good.substr(sizeof words));
  };
  CHECK(has(changed(0, 20240520), "which begins with 20240326, got 20240520"));
  for (auto const version : {0, 1, 4, 6}) CHECK(has(changed(1, version), "expected llm.c's version 3"));
  for (std::size_t word = 2; word < 8; ++word)
    for (auto const number : {0, -1, INT32_MIN, INT32_MAX}) CHECK(has(changed(word, number), ": expected 1 to"));
  CHECK(has(changed(5, 3), "expected n_embd to be a multiple of n_head, got n_embd "));
  CHECK(has(changed(7, 9), "smaller than its vocabulary size"));
  CHECK(has(changed(4, 10'000), "it is truncated"));  // layers
  CHECK(has(changed(6, 1'000'000), "it is truncated"));
}

TEST_CASE("settings follow the weights; a shorter block takes their first positions") {
  Folder const folder;
  write_folder(folder, tiny());
  auto const model = open_pretrained(from(folder.path));
  Settings settings;
  adopt_model(settings, model);
  CHECK(settings.n_layer == 2);
  CHECK(settings.block_size == 6);
  CHECK(settings.bias);
  auto const with = [&](char const* name, char const* text) {
    Settings asked;
    assign(asked, *find_setting(name), text, "test");
    adopt_model(asked, model);
    return asked;
  };
  CHECK(with("block_size", "5").block_size == 5);
  for (auto const& [name, text] : {std::pair("block_size", "7"), std::pair("n_layer", "3"), std::pair("n_head", "1"),
                                   std::pair("n_embd", "8"), std::pair("bias", "false")})
    CHECK(has(what([&, n = name, t = text] { with(n, t); }), "setting '" + std::string(name) + "': "));
}

TEST_CASE("GPT-2 is found by name: in model_dir, then where HuggingFace keeps it") {
  Folder const cache, models;
  Variable const hub("HF_HUB_CACHE", cache.path.string());
  auto settings = from("gpt2");
  auto const missing = what([&] { open_pretrained(settings); });
  CHECK(has(missing, (cache.path / "models--gpt2").string()));
  CHECK(has(missing, "hf download openai-community/gpt2"));
  auto const repository = cache.path / "models--openai-community--gpt2";
  auto const snapshot = repository / "snapshots" / "607a30d";
  fs::create_directories(repository / "refs");
  fs::create_directories(snapshot);
  Folder const made;
  write_folder(made, tiny());
  fs::copy(made.path, snapshot);
  CHECK(has(what([&] { open_pretrained(settings); }), "were not found in any of"));
  fs::copy(made.path, repository / "607a30d");  // outside of the snapshots
  for (auto const* const wrong : {"../607a30d", "", "main"}) {
    std::ofstream(repository / "refs" / "main") << wrong;
    CHECK(has(what([&] { open_pretrained(settings); }), "were not found in any of"));
  }
  std::ofstream(repository / "refs" / "main") << "607a30d\n";
  CHECK(open_pretrained(settings).weights->path() == snapshot);
  settings.model_dir = models.path.string();
  CHECK(open_pretrained(settings).weights->path() == snapshot);
  fs::copy(made.path, models.path / "gpt2");
  CHECK(open_pretrained(settings).weights->path() == models.path / "gpt2");
  settings.init_from = "gpt2-small";
  CHECK(has(what([&] { open_pretrained(settings); }), "expected scratch, resume, auto, gpt2"));
  settings.init_from = models.file("x", "no weights").string();
  CHECK(has(what([&] { open_pretrained(settings); }), "is none of these"));
}

TEST_CASE("the tokenizer beside the weights may be a tokenizer.json alone, as transformers 5 writes it") {
  auto config = tiny();
  config.vocab_size = 260;
  Folder const folder, copy;
  write_folder(folder, config);
  folder.file("tokenizer.json", fsdp::testing::byte_json({"ab"}, "gpt2").dump());
  folder.file("tokenizer_config.json", R"({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})");
  auto const model = open_pretrained(from(folder.path));
  auto const tokenizer = open_tokenizer(model, Settings{});
  REQUIRE(tokenizer != nullptr);
  CHECK(tokenizer->size() == 260);
  CHECK(tokenizer->end_of_text() == 257);
  CHECK(tokenizer->decode(tokenizer->encode("ab b")) == "ab b");
  CHECK(tokenizer->encode("ab").size() == 1);
  copy_tokenizer(model.tokenizer, copy.path);
  CHECK(transformer::open_tokenizer_folder(copy.path, 260)->encode("ab") == tokenizer->encode("ab"));
  CHECK(fs::exists(copy.path / "tokenizer_config.json"));
}

TEST_CASE("ranks that read other weights notice") {
  Folder const one, other;
  write_folder(one, tiny());
  write_folder(other, tiny(), {}, [](auto& all) { all.back().values[2] += 1; });
  auto const print = [](Folder const& folder) { return fingerprint(open_pretrained(from(folder.path))); };
  CHECK(print(one) == print(one));
  CHECK(print(one) != print(other));
}
