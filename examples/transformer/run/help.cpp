// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/help.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/config_files.hpp"

namespace transformer {
namespace {

constexpr std::size_t width = 100, indent = 34;

/// Words of a text in lines that begin at column `indent`; the first line goes on behind `first`.
std::string wrapped(std::string first, std::string_view text) {
  std::string lines, line = std::move(first);
  if (line.size() + 2 > indent) {
    lines = line + "\n";
    line.clear();
  }
  line.resize(indent, ' ');
  bool empty = true;  // no word on the line yet
  while (!text.empty()) {
    auto const end = std::min(text.find(' '), text.size());
    auto const word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!empty && line.size() + 1 + word.size() > width) {
      lines += line + "\n";
      line.assign(indent, ' ');
      empty = true;
    }
    if (!empty) line += ' ';
    line += word;
    empty = false;
  }
  return lines + line + "\n";
}

std::string help_of(Setting const& setting, Settings const& defaults) {
  auto const value = setting.text_of(defaults);
  std::string text(setting.help);
  if (!setting.choices.empty() && std::any_of(setting.choices.begin(), setting.choices.end(), [&](auto choice) {
        return setting.help.find(choice) == std::string_view::npos;
      }))
    text += fmt::format(": {}", fmt::join(setting.choices, ", "));
  auto const shown = !value.empty() ? fmt::format("={}", value) : std::string("=...");
  bool const is_flag = setting.may_stand_alone && std::holds_alternative<bool Settings::*>(setting.member);
  return wrapped(fmt::format("  --{}{}", setting.name, is_flag ? "" : shown), text);
}

/// Where a group stands in a command's help.
std::size_t place_of(std::string_view group) {
  constexpr std::string_view first[] = {"Folders and start",      "Data and batches", "Model",    "Optimizer",
                                        "Evaluation and logging", "Checkpoints",      "Sharding", "Ranks and devices"};
  constexpr std::string_view last = "Settings of nanoGPT (accepted, without effect)";
  auto const found = std::find(std::begin(first), std::end(first), group);
  return static_cast<std::size_t>(found - std::begin(first)) + (group == last ? 1 : 0);
}

}  // namespace

std::span<CommandText const> command_texts() {
  static constexpr CommandText texts[] = {
      {Command::prepare, "prepare", "--dataset=NAME --data=FILE", "tokenize text into token files"},
      {Command::train, "train", "[CONFIG...] [--SETTING=VALUE...]", "train a model"},
      {Command::sample, "sample", "[CONFIG...] [--SETTING=VALUE...]", "sample text from a trained model"},
      {Command::export_, "export", "--out_dir=FOLDER --to=FOLDER", "export a trained model for other programs"},
      {Command::bench, "bench", "[CONFIG...] [--SETTING=VALUE...]", "measure training speed and memory"},
      {Command::plan, "plan", "[CONFIG...] [--SETTING=VALUE...]", "compute memory and time that training needs"},
      {Command::report, "report", "FOLDER...", "write an HTML page: losses, memory, a step's timeline"}};
  return texts;
}

std::string general_help() {
  std::string text = fmt::format("{}\n\nUsage: {} COMMAND ...\n\n", program_text().summary, program_name);
  for (auto const& command : command_texts())
    text += fmt::format("  {:8} {:35}{}\n", command.name, command.arguments, command.what);
  return text + fmt::format(
                    "\nA first run:\n{}\n"
                    "{} COMMAND --help   the command's settings, with their defaults\n"
                    "{} --version        compiler, BLAS, MPI, CUDA and NCCL\n",
                    program_text().first_run, program_name, program_name);
}

std::string help_of(CommandText const& text) {
  auto help = fmt::format("{} {}: {}\n\nUsage: {} {} {}\n", program_name, text.name, text.what, program_name, text.name,
                          text.arguments);
  bool const configs = text.command != Command::report && text.command != Command::prepare;
  if (text.command == Command::report)
    help += "\n" + wrapped("  FOLDER", fmt::format("out_dir of a run of {} train", program_name));
  if (configs) {
    std::vector<std::string_view> names;
    for (auto const& file : shipped_configs()) names.push_back(file.name);
    help += "\n" + wrapped("  CONFIG", fmt::format("a file of `name = value` lines, or a built-in config: {}",
                                                   fmt::join(names, ", ")));
  }
  help += "\nThe value after = is the default. Later settings win over earlier ones and over config files.\n";
  auto const defaults_of_command = defaults(text.command);
  std::vector<std::string_view> groups;
  for (auto const& setting : all_settings())
    if (setting.exists_in(text.command) && setting.listed &&
        std::find(groups.begin(), groups.end(), setting.group) == groups.end())
      groups.push_back(setting.group);
  std::stable_sort(groups.begin(), groups.end(), [](auto a, auto b) { return place_of(a) < place_of(b); });
  for (auto const group : groups) {
    help += fmt::format("\n{}:\n", group);
    for (auto const& setting : all_settings())
      if (setting.exists_in(text.command) && setting.listed && setting.group == group)
        help += help_of(setting, defaults_of_command);
  }
  return help;
}

}  // namespace transformer
