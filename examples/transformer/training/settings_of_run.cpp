// SPDX-License-Identifier: Apache-2.0
// A resumed run keeps its settings unless others are given.
#include "transformer/training/settings_of_run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <utility>

#include "fsdp/checkpoint.hpp"
#include "fsdp/error.hpp"
#include "transformer/launch/job.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/table.hpp"
#include "transformer/training/whole_checkpoints.hpp"

namespace transformer {
namespace {

std::string shown(std::string const& value) { return value.empty() ? "none" : value; }

bool is_taken(Setting const& setting, Settings const& settings, RunState const& run) {
  if (settings.was_given(setting.name) || settings.was_chosen(setting.name)) return false;
  auto const whole = run.settings.find(std::string(setting.part_of));
  return whole == run.settings.end() || !settings.was_given(setting.part_of) ||
         find_setting(setting.part_of)->text_of(settings) == whole->second;
}

}  // namespace

std::vector<std::string> adopt_settings(Settings& settings, RunState const& run) {
  auto const usual = defaults(Command::train);
  auto adopted = settings;
  adopted.of_run.clear();
  auto const manifest = (run.checkpoint / fsdp::checkpoint::manifest_name).string();
  std::vector<std::string> lines, taken, unknown;
  for (auto const& [name, value] : run.settings) {
    auto const* const setting = find_setting(name);
    if (setting == nullptr || !setting->exists_in(Command::train)) unknown.push_back(name);
  }
  for (auto const& setting : all_settings()) {
    auto const found = run.settings.find(std::string(setting.name));
    if (!setting.of_run || found == run.settings.end()) continue;
    auto const& [name, value] = *found;
    if (settings.was_given(name)) {
      if (auto const given = setting.text_of(settings); given != value)
        lines.push_back(fmt::format("resuming with {} {}; the run had {}", name, shown(given), shown(value)));
      continue;
    }
    if (!is_taken(setting, settings, run)) continue;
    bool const is_usual = value == setting.text_of(usual);  // the text of a default may be no value, as ""
    auto theirs = usual;
    if (!is_usual) assign(theirs, setting, value, fmt::format("'{}'; --{}=... replaces it", manifest, name));
    setting.copy(theirs, adopted);
    adopted.of_run.push_back(name);
    if (!is_usual) taken.push_back(fmt::format("{} {}", name, shown(value)));
  }
  if (!taken.empty()) lines.push_back(fmt::format("settings of the run: {}", fmt::join(taken, ", ")));
  if (!unknown.empty())
    lines.push_back(fmt::format("note: this {} does not have these settings of the run, and ignores them: {}",
                                program_name, fmt::join(unknown, ", ")));
  settings = std::move(adopted);
  return lines;
}

std::optional<RunState> adopt_found_run(Settings& settings, Command command) {
  if (command != Command::train || !may_resume(settings)) return std::nullopt;
  try {
    auto run = choose_run(settings, false).run;
    if (run) adopt_settings(settings, *run);
    return run;
  } catch (std::exception const&) {
    return std::nullopt;
  }
}

std::string take_settings_of_run(Settings& settings, Command command) {
  auto const run = adopt_found_run(settings, command);
  return run ? run->dtype : std::string();
}

std::string other_tuning(Settings const& settings, RunState const& run) {
  std::string text;
  for (auto const& setting : all_settings()) {
    if (setting.group != tuning_heading) continue;
    std::string const name(setting.name);
    auto const saved = run.settings.find(name);
    auto const now = setting.text_of(settings);
    if (saved == run.settings.end() || saved->second == now) continue;
    text += fmt::format("{}--{}={} instead of {}", text.empty() ? "" : ", ", name, now, saved->second);
  }
  if (text.empty()) return {};
  return fmt::format(
      ". This start has {}; leave that out to continue the run, or begin another one from its weights, "
      "with --{}={} and another out_dir",
      text, setting_of_weights(), settings.out_dir);
}

}  // namespace transformer
