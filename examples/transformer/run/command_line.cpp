// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/command_line.hpp"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/launch/environment.hpp"
#include "transformer/launch/process.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/commands.hpp"
#include "transformer/run/help.hpp"
#include "transformer/run/read_number.hpp"
#include "transformer/run/table.hpp"

namespace transformer {
namespace {

/// Prints a text of our own in place of CLI11's.
class Help : public CLI::Formatter {
 public:
  explicit Help(std::string text) : text_(std::move(text)) {}
  std::string make_help(CLI::App const*, std::string, CLI::AppFormatMode) const override { return text_; }

 private:
  std::string text_;
};

/// A subcommand as CLI11 sees it. Values stay texts: `assign` reads them, so that messages are the same everywhere.
struct Subcommand {
  Command command{};
  CLI::App* app = nullptr;
  std::vector<std::string> configs{};
  std::map<std::string, std::string> values{};
};

void add(CLI::App& app, Subcommand& sub, CommandText const& text) {
  sub.app = app.add_subcommand(std::string(text.name));
  sub.app->allow_extras();
  sub.app->formatter(std::make_shared<Help>(help_of(text)));
  if (sub.command == Command::report)
    sub.app->add_option("runs", sub.configs);
  else if (sub.command != Command::prepare)
    sub.app->add_option("config", sub.configs);
  for (auto const& setting : all_settings()) {
    if (!setting.exists_in(sub.command)) continue;
    auto& value = sub.values[std::string(setting.name)];
    auto const name_of_option = fmt::format("--{}", setting.name);
    auto* const option =
        setting.may_stand_alone ? sub.app->add_flag(name_of_option, value) : sub.app->add_option(name_of_option, value);
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
}

/// Arguments with the current names of settings, for CLI11.
struct CurrentArguments {
  std::vector<std::string> arguments;     ///< without the program
  std::vector<std::string> former_names;  ///< that were used
};

/// Whether the argument after --name is its value. @pre `--name` alone means `--name=true`
bool is_value_of_flag(Setting const& setting, std::string_view text) {
  if (text == "true" || text == "True" || text == "false" || text == "False") return true;
  std::int64_t number{};
  return std::holds_alternative<std::string Settings::*>(setting.member) &&
         (text == "both" || read_number(text, number));
}

CurrentArguments current_arguments(int argc, char** argv) {
  CurrentArguments result;
  for (int index = 1; index < argc; ++index) {
    std::string_view const argument = argv[index];
    auto const equals = argument.find('=');
    auto const found = argument.starts_with("--") ? find_named(argument.substr(2, equals - 2)) : NamedSetting{};
    if (found.setting == nullptr) {
      result.arguments.emplace_back(argument);
      continue;
    }
    auto text = fmt::format("--{}", found.setting->name);
    if (found.by_former_name) result.former_names.emplace_back(argument.substr(2, equals - 2));
    if (equals != std::string_view::npos)
      text += "=" + found.current(argument.substr(equals + 1));
    else if (index + 1 < argc && (found.setting->may_stand_alone ? is_value_of_flag(*found.setting, argv[index + 1])
                                                                 : found.by_former_name))
      text += "=" + found.current(argv[++index]);
    else if (index + 1 == argc && !found.setting->may_stand_alone)
      fsdp::fail<fsdp::ConfigError>("setting '{}': expected {}, got nothing", argument.substr(2),
                                    found.setting->expected());
    result.arguments.push_back(std::move(text));
  }
  return result;
}

/// CLI11 would take the next argument for the value of "--name=".
void reject_empty_values(int argc, char** argv) {
  for (int index = 1; index < argc; ++index) {
    std::string_view const argument = argv[index];
    if (!argument.starts_with("--") || argument.find('=') != argument.size() - 1) continue;
    auto const name = argument.substr(2, argument.size() - 3);
    auto const* const setting = find_named(name).setting;
    if (setting == nullptr) fsdp::fail<fsdp::ConfigError>("there is no setting '{}'", name);
    fsdp::fail<fsdp::ConfigError>("setting '{}': expected {}, got nothing", name, setting->expected());
  }
}

Settings read_settings(Subcommand const& sub) {
  for (auto const& extra : sub.app->remaining()) {
    auto name = extra.substr(extra.find_first_not_of('-') == std::string::npos ? 0 : extra.find_first_not_of('-'));
    name = name.substr(0, name.find('='));
    auto const nearest = nearest_setting(name, sub.command);
    fsdp::fail<fsdp::ConfigError>("'{}': expected a setting of '{}' (see {} {} --help), got '{}'{}", name,
                                  sub.app->get_name(), program_name, sub.app->get_name(), extra,
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
  CLI::App app;
  app.name(std::string(program_name));
  app.formatter(std::make_shared<Help>(general_help()));
  app.require_subcommand(1);
  app.set_version_flag("--version", version_text);
  if (argc < 2) {  // one of several processes says so
    if (is_first_process(launch_variables())) fmt::print(stderr, "{}", general_help());
    code = usage_error;
    return std::nullopt;
  }
  std::vector<Subcommand> subs(command_texts().size());
  std::vector<std::string_view> names;
  for (std::size_t i = 0; i < subs.size(); ++i) {
    auto const& text = command_texts()[i];
    subs[i].command = text.command;
    add(app, subs[i], text);
    names.push_back(text.name);
  }
  reject_empty_values(argc, argv);
  bool const known =
      std::any_of(subs.begin(), subs.end(), [&](Subcommand const& sub) { return sub.app->get_name() == argv[1]; });
  std::string_view const first = argv[1];
  if (!first.starts_with('-') && !known)
    fsdp::fail<fsdp::ConfigError>("expected a subcommand ({}), got '{}'", fsdp::listed(names), first);
  if (first.starts_with('-') && first != "-h" && first != "--help" && first != "--version")
    fsdp::fail<fsdp::ConfigError>("unknown option '{}' (see {} --help); settings come after a subcommand ({})", first,
                                  program_name, fsdp::listed(names));
  auto current = current_arguments(argc, argv);
  std::reverse(current.arguments.begin(), current.arguments.end());  // CLI11 takes the last one first
  try {
    app.parse(std::move(current.arguments));
  } catch (CLI::ParseError const& error) {
    if (error.get_exit_code() != 0) fsdp::fail<fsdp::ConfigError>("{}", error.what());
    code = app.exit(error);
    return std::nullopt;
  }
  auto const& chosen = *std::find_if(subs.begin(), subs.end(), [](Subcommand const& sub) { return sub.app->parsed(); });
  command = chosen.command;
  auto settings = read_settings(chosen);
  for (auto const& name : current.former_names) note_former_name(settings, name);
  return settings;
}

/// Ends with an error if standard output could not be written: results would be missing.
int with_output(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  report_error("standard output cannot be written");
  return code == EXIT_SUCCESS ? EXIT_FAILURE : code;
}

}  // namespace

int run_command_line(int argc, char** argv, OwnCommands const& own) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit of the process (ulimit -f) is an error of its write
  std::optional<Settings> settings;
  Command command{};
  int code = guarded([&] {
    int help_code = EXIT_SUCCESS;
    settings = parse(argc, argv, command, help_code);
    return help_code;
  });
  if (!settings) return with_output(code);
  auto const alone = [&](int (*run)(Settings const&)) {
    if (!is_first_process(launch_variables())) return EXIT_SUCCESS;
    print_former_names(*settings);
    return with_output(guarded([&] { return run(*settings); }));
  };
  switch (command) {
    case Command::prepare: return alone(run_prepare);
    case Command::export_: return alone(own.run_export);
    case Command::plan: return alone(own.run_plan);
    case Command::report: return alone(run_report);
    case Command::sample: return run_on_ranks(*settings, command, {argc, argv});  // looks at its output itself
    case Command::train:
    case Command::bench: return with_output(run_on_ranks(*settings, command, {argc, argv}));
  }
  return EXIT_FAILURE;
}

}  // namespace transformer
