// SPDX-License-Identifier: Apache-2.0
// nanogpt plan.
#include "transformer/training/plan.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include "commands.hpp"
#include "fsdp/error.hpp"
#include "gpt2/config_json.hpp"
#include "program.hpp"
#include "saved_model.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/read_number.hpp"
#include "transformer/training/plan_search.hpp"
#include "transformer/training/planned_bytes.hpp"

namespace nanogpt {

namespace {

/// The model that `settings.model` names. @param settings  get its shape
/// @throws fsdp::ConfigError if it names none
GptConfig adopt_planned_model(Settings& settings) {
  struct Published {
    std::string_view name;
    std::int64_t layers, heads, width;
  };
  static constexpr Published published[]{
      {"gpt2", 12, 12, 768}, {"gpt2-medium", 24, 16, 1024}, {"gpt2-large", 36, 20, 1280}, {"gpt2-xl", 48, 25, 1600}};
  auto const adopt = [&](std::int64_t layers, std::int64_t heads, std::int64_t width) {
    settings.n_layer = layers, settings.n_head = heads, settings.n_embd = width;
    return model_config(settings, Meta{}.vocab_size);
  };
  for (auto const& model : published) {
    if (model.name != settings.model) continue;
    settings.bias = true;
    return adopt(model.layers, model.heads, model.width);
  }
  std::array<std::int64_t, 3> shape{};
  std::string_view rest = settings.model;
  std::size_t numbers = 0;
  for (auto& number : shape) {
    auto const end = std::min(rest.find('x'), rest.size());
    if (read_number(rest.substr(0, end), number) && number > 0) ++numbers;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (numbers == shape.size() && rest.empty()) return adopt(shape[0], shape[1], shape[2]);
  std::filesystem::path const file = std::filesystem::path(settings.model) / "config.json";
  if (!std::filesystem::is_regular_file(file))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'model': expected gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder with config.json, or "
        "LAYERSxHEADSxWIDTH, got '{}'",
        settings.model);
  auto config = kind_of_config(file) == ConfigKind::huggingface ? read_huggingface_config(file)
                                                                : open_saved_model(settings.model).config;
  settings.n_layer = config.n_layer, settings.n_head = config.n_head, settings.n_embd = config.n_embd;
  settings.bias = config.bias;
  if (!settings.was_given("block_size")) settings.block_size = config.block_size;
  config.dropout = static_cast<float>(settings.dropout);
  return config;
}

/// @throws fsdp::ConfigError if a setting that was given is not the model's
void expect_model_as_given(Settings const& given, Settings const& of_model) {
  auto const expect = [&](auto member) {
    auto const name = name_of(member);
    if (given.was_given(name) && given.*member != of_model.*member)
      fsdp::fail<fsdp::ConfigError>("setting '{}': model {} has {}: expected nothing else, got {}", name, given.model,
                                    of_model.*member, given.*member);
  };
  expect(&Settings::n_layer), expect(&Settings::n_head), expect(&Settings::n_embd), expect(&Settings::bias);
}

}  // namespace

int run_plan(Settings const& given) {
  auto settings = given;
  if (settings.gpus > 0) {
    if (settings.was_given("ranks") && settings.ranks != settings.gpus)
      fsdp::fail<fsdp::ConfigError>("setting 'gpus': expected ranks, {}, or no ranks, got {}", settings.ranks,
                                    settings.gpus);
    settings.ranks = settings.gpus;
  }
  auto const config =
      settings.model.empty() ? model_config(settings, Meta{}.vocab_size) : adopt_planned_model(settings);
  if (!settings.model.empty()) expect_model_as_given(given, settings);
  if (!settings.hardware.empty()) return print_plan_on_hardware<Program>(settings, config);
  check_together(settings, Command::plan, settings.ranks);
  return print_plan<Program>(settings, config);
}

}  // namespace nanogpt

std::int64_t transformer::planned_bytes(Settings const& settings) {
  return plan_memory<nanogpt::Program>(settings, nanogpt::model_config(settings, Meta{}.vocab_size)).total();
}
