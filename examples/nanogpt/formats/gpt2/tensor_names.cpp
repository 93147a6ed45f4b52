// SPDX-License-Identifier: Apache-2.0
#include "nanogpt/formats/gpt2/tensor_names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "fsdp/error.hpp"

namespace nanogpt {
namespace {

constexpr std::string_view prefix = "transformer.";

/// "h.12.rest": the part behind the layer's number; "" if the name is no layer's.
std::string_view behind_layer(std::string_view name) {
  if (!name.starts_with("h.")) return {};
  auto const dot = name.find('.', 2);
  if (dot == std::string_view::npos || dot == 2) return {};
  bool const digits = std::all_of(name.begin() + 2, name.begin() + static_cast<std::ptrdiff_t>(dot),
                                  [](char letter) { return letter >= '0' && letter <= '9'; });
  return digits ? name.substr(dot + 1) : std::string_view{};
}

}  // namespace

std::vector<GptTensor> gpt_tensors(GptConfig const& config) {
  auto const width = config.n_embd;
  std::vector<GptTensor> list;
  auto const norm = [&](std::string const& name) {
    list.push_back({name + ".weight", {width}});
    if (config.bias) list.push_back({name + ".bias", {width}});
  };
  auto const linear = [&](std::string const& name, std::int64_t out, std::int64_t in) {
    list.push_back({name + ".weight", {out, in}, true});
    if (config.bias) list.push_back({name + ".bias", {out}});
  };
  list.push_back({std::string(token_table), {config.vocab_size, width}});
  list.push_back({std::string(position_table), {config.block_size, width}});
  for (std::int64_t layer = 0; layer < config.n_layer; ++layer) {
    auto const at = fmt::format("{}h.{}.", prefix, layer);
    norm(at + "ln_1");
    linear(at + "attn.c_attn", 3 * width, width);
    linear(at + "attn.c_proj", width, width);
    norm(at + "ln_2");
    linear(at + "mlp.c_fc", 4 * width, width);
    linear(at + "mlp.c_proj", width, 4 * width);
  }
  norm(std::string(prefix) + "ln_f");
  return list;
}

TensorList gpt_tensor_list(GptConfig const& config, Orientation orientation) {
  TensorList list{gpt_tensors(config), {}, our_name};
  if (orientation == Orientation::out_in)
    for (auto& tensor : list.tensors) tensor.transposed = false;
  list.tied = {{"lm_head.weight", std::string(token_table),
                "nanogpt supports tied embeddings only; this model has a separate lm_head"}};
  return list;
}

std::string our_name(std::string_view theirs) {
  auto name = theirs;
  if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  auto const part = behind_layer(name);
  if (part == "attn.bias" || part == "attn.masked_bias") return "";
  bool const inside =
      !part.empty() || name.starts_with("wte.") || name.starts_with("wpe.") || name.starts_with("ln_f.");
  return inside ? std::string(prefix) + std::string(name) : std::string(theirs);
}

void expect_possible(GptConfig const& config, std::string_view what) {
  struct Extent {
    std::string_view name;
    std::int64_t value, most;
  };
  // The largest product, 12 n_layer n_embd^2, is below 2^57.
  Extent const extents[] = {{"layers", config.n_layer, 10'000},
                            {"heads", config.n_head, 10'000},
                            {"width", config.n_embd, 1'000'000},
                            {"positions", config.block_size, 100'000'000},
                            {"vocabulary", config.vocab_size, 100'000'000}};
  for (auto const& extent : extents)
    if (extent.value < 1 || extent.value > extent.most)
      fsdp::fail<fsdp::ConfigError>("{}: {}: expected 1 to {}, got {}", what, extent.name, extent.most, extent.value);
  if (config.n_embd % config.n_head != 0)
    fsdp::fail<fsdp::ConfigError>("{}: expected n_embd to be a multiple of n_head, got n_embd {} and n_head {}", what,
                                  config.n_embd, config.n_head);
}

}  // namespace nanogpt
