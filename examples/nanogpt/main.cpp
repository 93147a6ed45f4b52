// SPDX-License-Identifier: Apache-2.0
// nanogpt: prepare a text, train a GPT sharded over ranks, sample from it, give it to other programs, measure it.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "commands.hpp"
#include "config_files.hpp"
#include "fsdp/error.hpp"
#include "launch.hpp"
#include "settings.hpp"

namespace nanogpt {
namespace {

/// A subcommand as CLI11 sees it. Values stay texts: `assign` reads them, so that messages are the same everywhere.
struct Subcommand {
  Command command{};
  CLI::App* app = nullptr;
  std::vector<std::string> configs{};
  std::map<std::string, std::string> values{};
};

std::string shipped_names() {
  std::vector<std::string_view> names;
  for (auto const& file : shipped_configs()) names.push_back(file.name);
  return fsdp::listed(names);
}

void add(CLI::App& app, Subcommand& sub, std::string const& name, std::string const& help) {
  sub.app = app.add_subcommand(name, help);
  sub.app->allow_extras();
  if (sub.command == Command::report)
    sub.app->add_option("runs", sub.configs, "folders that nanogpt train has written to (out_dir)")
        ->type_name("FOLDER");
  else if (sub.command != Command::prepare)
    sub.app->add_option("config", sub.configs, "config files, or shipped configs: " + shipped_names())
        ->type_name("FILE");
  for (auto const& setting : all_settings()) {
    if (!setting.exists_in(sub.command)) continue;
    auto help_text = std::string(setting.help);
    if (auto const otherwise = setting.text_of(defaults(sub.command)); !otherwise.empty())
      help_text += fmt::format(" [{}]", otherwise);
    auto& value = sub.values[std::string(setting.name)];
    auto const name_of_option = fmt::format("--{}", setting.name);
    auto* const option = setting.may_stand_alone ? sub.app->add_flag(name_of_option, value, help_text)
                                                 : sub.app->add_option(name_of_option, value, help_text);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    if (!setting.may_stand_alone) option->type_name(setting.expected());
  }
}

/// CLI11 would take the next argument for the value of "--name=".
void reject_empty_values(int argc, char** argv) {
  for (int index = 1; index < argc; ++index) {
    std::string_view const argument = argv[index];
    if (!argument.starts_with("--") || argument.find('=') != argument.size() - 1) continue;
    auto const name = argument.substr(2, argument.size() - 3);
    auto const* setting = find_setting(name);
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected {}, got nothing", name,
                                  setting == nullptr ? std::string("a setting of that name") : setting->expected());
  }
}

Settings read_settings(Subcommand const& sub) {
  for (auto const& extra : sub.app->remaining()) {
    auto name = extra.substr(extra.find_first_not_of('-') == std::string::npos ? 0 : extra.find_first_not_of('-'));
    name = name.substr(0, name.find('='));
    auto const nearest = nearest_setting(name, sub.command);
    fsdp::fail<fsdp::ConfigError>("'{}': expected a setting of '{}' (see nanogpt {} --help), got '{}'{}", name,
                                  sub.app->get_name(), sub.app->get_name(), extra,
                                  nearest.empty() ? std::string() : fmt::format("; is '--{}' meant?", nearest));
  }
  Settings settings = defaults(sub.command);
  if (sub.command == Command::report)
    settings.runs = sub.configs;
  else
    for (auto const& config : sub.configs) apply_config_file(settings, config);
  for (auto const& [name, text] : sub.values)
    if (sub.app->count("--" + name) != 0) assign(settings, *find_setting(name), text, "command line");
  apply_environment(settings, sub.command);
  return settings;
}

/// Reads the command line. @return nullopt if it asked for nothing but help; then `code` is the exit code
std::optional<Settings> parse(int argc, char** argv, Command& command, int& code) {
  CLI::App app{"Trains a GPT with fsdp: fully sharded data parallel training in C++."};
  app.name("nanogpt");
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text);
  std::vector<Subcommand> subs{{Command::prepare}, {Command::train}, {Command::sample},
                               {Command::export_}, {Command::bench}, {Command::report}};
  add(app, subs[0], "prepare", "turn texts into token files");
  add(app, subs[1], "train", "train a model");
  add(app, subs[2], "sample", "let a trained model write");
  add(app, subs[3], "export", "write a trained model for other programs");
  add(app, subs[4], "bench", "measure training speed and memory");
  add(app, subs[5], "report", "draw runs as a page: losses, memory, a step's timeline");
  reject_empty_values(argc, argv);
  constexpr std::string_view names = "prepare, train, sample, export, bench, report";
  if (argc < 2) fsdp::fail<fsdp::ConfigError>("expected a subcommand ({}), got nothing", names);
  bool const known =
      std::any_of(subs.begin(), subs.end(), [&](Subcommand const& sub) { return sub.app->get_name() == argv[1]; });
  if (argv[1][0] != '-' && !known)
    fsdp::fail<fsdp::ConfigError>("expected a subcommand ({}), got '{}'", names, argv[1]);
  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& error) {
    if (error.get_exit_code() != 0) fsdp::fail<fsdp::ConfigError>("{}", error.what());
    code = app.exit(error);
    return std::nullopt;
  }
  auto const& chosen = *std::find_if(subs.begin(), subs.end(), [](Subcommand const& sub) { return sub.app->parsed(); });
  command = chosen.command;
  return read_settings(chosen);
}

}  // namespace
}  // namespace nanogpt

/// What of standard output has not been written is an error: results would be missing.
int with_output(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  nanogpt::report_error("standard output cannot be written");
  return code == EXIT_SUCCESS ? EXIT_FAILURE : code;
}

int main(int argc, char** argv) {
  using namespace nanogpt;
  std::optional<Settings> settings;
  Command command{};
  int code = guarded([&] {
    int help_code = EXIT_SUCCESS;
    settings = parse(argc, argv, command, help_code);
    return help_code;
  });
  if (!settings) return with_output(code);
  auto const alone = [&](int (*run)(Settings const&)) {
    return is_first_process(launch_variables()) ? with_output(guarded([&] { return run(*settings); })) : EXIT_SUCCESS;
  };
  switch (command) {
    case Command::prepare: return alone(run_prepare);
    case Command::export_: return alone(run_export);
    case Command::report: return alone(run_report);
    case Command::sample: return run_on_ranks(*settings, command, {argc, argv});  // looks at its output itself
    case Command::train:
    case Command::bench: return with_output(run_on_ranks(*settings, command, {argc, argv}));
  }
  return EXIT_FAILURE;
}
