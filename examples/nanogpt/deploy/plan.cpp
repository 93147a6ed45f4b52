// SPDX-License-Identifier: Apache-2.0
// The subcommand `nanogpt plan` computes memory, and time on described hardware.
#include "transformer/training/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"
#include "nanogpt/commands.hpp"
#include "nanogpt/formats/gpt2/config_json.hpp"
#include "nanogpt/formats/saved_model.hpp"
#include "nanogpt/program.hpp"
#include "transformer/data/dataset.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/plan_search.hpp"
#include "transformer/training/planned_bytes.hpp"

namespace nanogpt {

namespace {

/// The words of LAYERSxHEADSxWIDTH, which are digits; none where `text` is something else.
std::vector<std::string_view> shape_words(std::string_view text) {
  std::vector<std::string_view> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    auto const end = std::min(text.find('x', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    if (words.back().empty() || words.back().find_first_not_of("0123456789") != std::string_view::npos) return {};
    begin = end + 1;
  }
  return words.size() == 3 ? words : std::vector<std::string_view>{};
}

/// The model of a folder: config.json alone is read. @throws fsdp::ConfigError if it is none, or no GPT-2
GptConfig config_in(std::string const& folder) {
  auto const file = std::filesystem::path(folder) / "config.json";
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored))
    fsdp::fail<fsdp::ConfigError>(
        "setting 'model': expected gpt2, gpt2-medium, gpt2-large, gpt2-xl, LAYERSxHEADSxWIDTH, or a folder with "
        "config.json (of a HuggingFace GPT-2, or an out_dir with weights), got '{}'",
        folder);
  try {
    return kind_of_config(file) == ConfigKind::huggingface ? read_huggingface_config(file) : read_saved_config(file);
  } catch (fsdp::ConfigError const& error) {
    fsdp::fail<fsdp::ConfigError>("setting 'model': {}. This program plans GPT-2 models only", error.what());
  }
}

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
  if (auto const shape = shape_words(settings.model); !shape.empty()) {
    constexpr std::array names{"n_layer", "n_head", "n_embd"};
    for (std::size_t i = 0; i < names.size(); ++i)
      assign(settings, *find_setting(names[i]), shape[i], fmt::format("--model={}", settings.model));
    return model_config(settings, Meta{}.vocab_size);
  }
  auto config = config_in(settings.model);
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
  auto const number = [](std::int64_t value) { return static_cast<double>(value); };
  auto const width = number(config.n_embd), layers = number(config.n_layer);
  expect_countable(settings,
                   {.parameters = (12 * layers * width + number(config.vocab_size) + number(config.block_size)) * width,
                    .layers = layers,
                    .width = width,
                    .vocabulary = number(config.vocab_size)});
  if (!settings.hardware.empty()) return print_plan_on_hardware<Program>(settings, config);
  check_together(settings, Command::plan, settings.ranks);
  expect_tuning(settings);
  return print_plan<Program>(settings, config);
}

}  // namespace nanogpt

std::int64_t transformer::planned_bytes(Settings const& settings) {
  return plan_memory<nanogpt::Program>(settings, nanogpt::model_config(settings, Meta{}.vocab_size)).total();
}
