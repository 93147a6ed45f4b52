// SPDX-License-Identifier: Apache-2.0
// A trainer's table of settings, and the reading of their values.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "transformer/run/settings.hpp"

namespace transformer {

/// One row of the table of settings.
struct Setting {
  using Member = std::variant<bool Settings::*, std::int64_t Settings::*, double Settings::*, std::string Settings::*>;

  std::string_view name;
  Member member;
  unsigned commands = 0;  ///< the Commands that have it, or-ed
  std::string_view help;
  std::string_view group{};  ///< its heading in --help
  bool listed = true;        ///< false: its other value is always refused, so --help leaves it out
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_excluded = false;
  bool high_excluded = false;
  bool may_be_empty = false;              ///< texts only
  std::vector<std::string_view> choices;  ///< texts only: the values allowed
  std::string_view refused_choice{};      ///< texts only: read, and refused later with a reason of its own
  std::string_view word_for_zero{};       ///< whole numbers only: how 0 is written
  bool may_stand_alone = false;           ///< flags only: `--name` means `--name=true`
  bool of_run = false;                    ///< resuming takes the run's value, unless this start gives one
  std::string_view part_of{};  ///< a setting's name; if that differs from the run's, this one is not taken from the run

  std::string_view former_name{};   ///< read as `name`, everywhere
  bool former_is_negative = false;  ///< whole numbers only: the value N under the former name is -N

  bool exists_in(Command command) const { return (commands & static_cast<unsigned>(command)) != 0; }
  /// The allowed values, in words.
  std::string expected() const;
  /// The value in `settings`, as it would be written.
  std::string text_of(Settings const& settings) const;
  /// Gives `to` the value that `from` has.
  void copy(Settings const& from, Settings& to) const;
};

/// Heading of the settings that say which tensors train.
inline constexpr std::string_view tuning_heading = "Fine-tuning";

/// The program's table, in the order of --help within each group. Each program defines it.
std::vector<Setting> const& all_settings();
/// @return nullptr if there is no setting of that name
Setting const* find_setting(std::string_view name);
/// A setting that is called by its name or by its former name.
struct NamedSetting {
  Setting const* setting = nullptr;  ///< nullptr: no setting has or had that name
  bool by_former_name = false;
  /// The value under the current name.
  std::string current(std::string_view value) const;
};
NamedSetting find_named(std::string_view name);
/// Remembers that a former name was used. @param name  the former name
void note_former_name(Settings& settings, std::string_view name);
/// "note: 'lora_r' is now called 'lora_rank'", a line for each former name that was used.
std::vector<std::string> notes_on_former_names(Settings const& settings);
/// The name of the setting that has this member. @pre the program has one
std::string_view name_of(Setting::Member member);
/// The setting that names initial weights: `model` if the program trains with it, else init_from.
std::string_view setting_of_weights();
/// The setting whose name is most like `name`, for messages. @return "" if none is like it
std::string_view nearest_setting(std::string_view name, Command command);
/// Reads `text` into the setting. @param origin where the text comes from, for the message
/// @throws fsdp::ConfigError naming the setting, what was expected and what came
void assign(Settings& settings, Setting const& setting, std::string_view text, std::string_view origin);

/// Takes collective_timeout from FSDP_TIMEOUT, the library's variable, and peak_tflops from FSDP_PEAK_TFLOPS, unless a
/// config file or the command line has set them.
/// @throws fsdp::ConfigError as `assign`
void apply_environment(Settings& settings, Command command);

/// Applies the `name = value` lines of a config file; `#` begins a comment, quotes around a value are dropped.
/// One file serves all subcommands, so it may set what only another of them reads.
/// @param label  what messages call the file
/// @throws fsdp::ConfigError naming file and line
void apply_config_text(Settings& settings, std::string_view text, std::string_view label);

/// Applies a config file: a path, or the name of a shipped config (with or without ".py").
/// @throws fsdp::ConfigError if neither exists
void apply_config_file(Settings& settings, std::string const& file);

}  // namespace transformer
