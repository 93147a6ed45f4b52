// SPDX-License-Identifier: Apache-2.0
// Adapters as peft writes them: which are read, and which are refused because peft computes something else with them.
//
// links: llama_models
// skip-tsan
#include "llama/formats/adapter_files.hpp"

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "tests/catch.hpp"
#include "tests/support/messages.hpp"
#include "tests/support/temporary_folder.hpp"
#include "transformer/weights/weights_writer.hpp"

namespace {

using fsdp::testing::has;
using fsdp::testing::what;
using Folder = fsdp::testing::TemporaryFolder;
using Json = nlohmann::ordered_json;

llama::LlamaConfig tiny() { return {12, 10, 2, 4, 2, 6, 7, 16}; }

/// adapter_config.json as peft 0.21 writes it.
Json peft_config() {
  return {{"alora_invocation_tokens", nullptr},
          {"alpha_pattern", Json::object()},
          {"arrow_config", nullptr},
          {"auto_mapping", nullptr},
          {"base_model_name_or_path", "base"},
          {"bias", "none"},
          {"corda_config", nullptr},
          {"ensure_weight_tying", false},
          {"eva_config", nullptr},
          {"exclude_modules", nullptr},
          {"fan_in_fan_out", false},
          {"inference_mode", true},
          {"init_lora_weights", true},
          {"kasa_config", nullptr},
          {"layer_replication", nullptr},
          {"layers_pattern", nullptr},
          {"layers_to_transform", nullptr},
          {"loftq_config", Json::object()},
          {"lora_alpha", 4},
          {"lora_bias", false},
          {"lora_dropout", 0.1},
          {"lora_ga_config", nullptr},
          {"megatron_config", nullptr},
          {"megatron_core", "megatron.core"},
          {"modules_to_save", nullptr},
          {"monteclora_config", nullptr},
          {"peft_type", "LORA"},
          {"peft_version", "0.21.2"},
          {"qalora_group_size", 16},
          {"r", 2},
          {"rank_pattern", Json::object()},
          {"revision", nullptr},
          {"target_modules", {"v_proj", "q_proj"}},
          {"target_parameters", nullptr},
          {"task_type", "CAUSAL_LM"},
          {"trainable_token_indices", nullptr},
          {"use_bdlora", nullptr},
          {"use_dora", false},
          {"use_qalora", false},
          {"use_rslora", false},
          {"velora_config", nullptr}};
}

/// Writes adapters of rank 2. @param layers  the layers that have one: "model.layers.0.self_attn.q_proj"
void write(Folder const& folder, std::vector<std::string> const& layers) {
  std::vector<transformer::WeightsWriter::Tensor> tensors;
  for (auto const& layer : layers)
    for (auto const& tensor : llama::llama_tensors(tiny()))
      if (tensor.name == layer + ".weight") {
        tensors.push_back({llama::peft_name(layer + ".lora_A.weight"), {2, tensor.shape[1]}, fsdp::DType::f32});
        tensors.push_back({llama::peft_name(layer + ".lora_B.weight"), {tensor.shape[0], 2}, fsdp::DType::f32});
      }
  transformer::WeightsWriter writer({folder.path / "adapter_model.safetensors"}, tensors);
  for (auto const& tensor : tensors)
    writer.write(tensor.name, std::vector<float>(static_cast<std::size_t>(tensor.shape[0] * tensor.shape[1]), 0.5f));
  writer.finish();
}
/// The layers of tiny() whose names end so.
std::vector<std::string> layers_named(std::vector<std::string> const& ends) {
  std::vector<std::string> layers;
  for (auto const& tensor : llama::llama_tensors(tiny()))
    for (auto const& end : ends)
      if (tensor.name.ends_with("." + end + ".weight")) layers.push_back(tensor.name.substr(0, tensor.name.size() - 7));
  return layers;
}

/// Reads adapters of these layers with a changed adapter_config.json. @return how many there are
std::size_t read(std::vector<std::string> const& layers, Json const& changes = Json::object()) {
  Folder const folder;
  write(folder, layers);
  auto json = peft_config();
  json.update(changes);
  folder.file("adapter_config.json", json.dump());
  return llama::read_adapters(folder.path, tiny()).of.size();
}

/// The error for adapters of q_proj and v_proj with a changed adapter_config.json.
std::string refused(Json const& changes) {
  return what<fsdp::ConfigError>([&] { read(layers_named({"q_proj", "v_proj"}), changes); });
}

}  // namespace

TEST_CASE("adapters of peft are read, whatever keys without effect their description has", "[llama][adapters]") {
  auto const both = layers_named({"q_proj", "v_proj"});
  CHECK(read(both) == 4);
  for (auto const& changes :
       std::vector<Json>{{{"init_lora_weights", "gaussian"}, {"lora_ga_config", {{"scale", 1}}}},
                         {{"init_lora_weights", "eva"}, {"eva_config", {{"rho", 2.0}}}},
                         {{"init_lora_weights", nullptr}, {"revision", "main"}, {"merge_weights", false}},
                         {{"layer_replication", Json::array()}, {"modules_to_save", Json::array()}},
                         {{"a_key_to_come", nullptr}}})
    CHECK(read(both, changes) == 4);
  CHECK(read(layers_named({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
             {{"target_modules", "all-linear"}}) == 14);
  CHECK(read({"model.layers.1.self_attn.q_proj"}, {{"target_modules", {"q_proj"}}, {"layers_to_transform", {1}}}) == 1);
  CHECK(read({"model.layers.0.self_attn.q_proj"},
             {{"target_modules", {"q_proj"}}, {"layers_to_transform", 0}, {"layers_pattern", "layers"}}) == 1);
  CHECK(read({"model.layers.0.mlp.up_proj", "lm_head"},
             {{"target_modules", {"model.layers.0.mlp.up_proj", "lm_head"}}}) == 2);
}

TEST_CASE("adapters with which peft computes something else are refused by the key that says so", "[llama][adapters]") {
  auto const unknown = "expected supported keys only";
  std::vector<std::pair<Json, std::string>> const cases{
      {{{"init_lora_weights", "pissa"}}, "'init_lora_weights': expected true, false"},
      {{{"init_lora_weights", "pissa_niter_16"}}, "'init_lora_weights': expected true, false"},
      {{{"init_lora_weights", "olora"}}, "'init_lora_weights': expected true, false"},
      {{{"init_lora_weights", "corda"}}, "'init_lora_weights': expected true, false"},
      {{{"init_lora_weights", "loftq"}}, "'init_lora_weights': expected true, false"},
      {{{"init_lora_weights", "lora_ga"}}, "'init_lora_weights': expected true, false"},
      {{{"alora_invocation_tokens", {899, 898}}}, "'alora_invocation_tokens': expected none, got [899,898]"},
      {{{"layer_replication", {{0, 1}, {0, 1}}}}, "'layer_replication': expected none, got [[0,1],[0,1]]"},
      {{{"arrow_config", {{"top_k", 3}}}}, unknown},
      {{{"kasa_config", Json::object()}}, unknown},
      {{{"velora_config", Json::object()}}, unknown},
      {{{"monteclora_config", Json::object()}}, unknown},
      {{{"megatron_config", {{"a", 1}}}}, unknown},
      {{{"use_bdlora", {{"a", 1}}}}, unknown},
      {{{"a_key_to_come", false}}, unknown},
      {{{"use_dora", true}}, "'use_dora': expected false, got true"},
      {{{"use_rslora", true}}, "'use_rslora': expected false, got true"},
      {{{"use_qalora", true}}, "'use_qalora': expected false, got true"},
      {{{"lora_bias", true}}, "'lora_bias': expected false, got true"},
      {{{"bias", "all"}}, "'bias': expected \"none\""},
      {{{"rank_pattern", {{"q_proj", 4}}}}, "'rank_pattern': expected none"},
      {{{"modules_to_save", {"lm_head"}}}, "'modules_to_save': expected none"},
      {{{"exclude_modules", {"v_proj"}}}, "'exclude_modules': expected none"},
      {{{"exclude_modules", ".*v_proj"}}, "'exclude_modules': expected none"},
      {{{"trainable_token_indices", {1}}}, "'trainable_token_indices': expected none"},
      {{{"target_parameters", {"w"}}}, "'target_parameters': expected none"},
      {{{"target_modules", ".*proj"}}, "'target_modules': expected a list of names, or \"all-linear\""},
      {{{"layers_to_transform", {0}}, {"layers_pattern", "blocks"}}, "'layers_pattern': expected \"layers\""},
      {{{"task_type", "SEQ_CLS"}}, "'task_type': expected \"CAUSAL_LM\""},
      {{{"peft_type", "LOHA"}}, "'peft_type': expected \"LORA\", got \"LOHA\""}};
  for (auto const& [changes, expected] : cases) {
    CAPTURE(changes.dump());
    CHECK(has(refused(changes), "adapter_config.json': "));
    CHECK(has(refused(changes), expected));
  }
}

TEST_CASE("the adapters in a file are those that their description names", "[llama][adapters]") {
  CHECK(has(refused({{"target_modules", {"q_proj"}}}),
            "tensor 'base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight': expected adapters of the layers "
            "that adapter_config.json names in target_modules and layers_to_transform, got another one"));
  CHECK(has(refused({{"layers_to_transform", {1}}}), "layers.0.self_attn.q_proj.lora_A.weight': expected adapters of"));
  CHECK(has(refused({{"target_modules", {"q_proj", "v_proj", "o_proj"}}}),
            "the adapter of 'model.layers.0.self_attn.o_proj.weight' is missing, though adapter_config.json names"));
}

TEST_CASE("a pickle of adapters is refused by a sentence that says how to convert it", "[llama][adapters]") {
  Folder const folder;
  folder.file("adapter_config.json", peft_config().dump());
  folder.file("adapter_model.bin", "x");
  CHECK(what<fsdp::ConfigError>([&] { llama::read_adapters(folder.path, tiny()); }) ==
        "'" + folder.path.string() +
            "' has no adapter_model.safetensors (adapter_model.bin is a pickle and is not read; load it with peft and "
            "write safetensors with save_pretrained(...))");
}
