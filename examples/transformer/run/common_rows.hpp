// SPDX-License-Identifier: Apache-2.0
// Rows of the settings table that trainers have in common, by their headings in --help.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transformer/run/table.hpp"

namespace transformer {

/// The commands that have a setting.
namespace in {
inline constexpr unsigned train = static_cast<unsigned>(Command::train);
inline constexpr unsigned sample = static_cast<unsigned>(Command::sample);
inline constexpr unsigned bench = static_cast<unsigned>(Command::bench);
inline constexpr unsigned prepare = static_cast<unsigned>(Command::prepare);
inline constexpr unsigned exporting = static_cast<unsigned>(Command::export_);
inline constexpr unsigned report = static_cast<unsigned>(Command::report);
inline constexpr unsigned plan = static_cast<unsigned>(Command::plan);
inline constexpr unsigned training = train | bench | plan;
inline constexpr unsigned computing = train | sample | bench;
/// Beside the commands: resuming takes the setting from the run unless it is given. Others belong to the machine or to
/// this start, or the checkpoint itself says them: the model's shape and the element type.
inline constexpr unsigned of_run = 1u << 16;
}  // namespace in

/// Adds one row; the type of the member picks the overload of the table's columns that make sense.
class SettingsTable {
 public:
  Setting& add(std::string_view name, Setting::Member member, unsigned commands, std::string_view help) {
    Setting row{};
    row.name = name;
    row.member = member;
    row.commands = commands & ~in::of_run;
    row.of_run = (commands & in::of_run) != 0;
    row.help = help;
    row.group = heading;
    rows.push_back(row);
    return rows.back();
  }
  void text(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help);
  }
  void optional_text(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help).may_be_empty = true;
  }
  void choice(std::string_view name, std::string Settings::*member, unsigned commands, std::string_view help,
              std::vector<std::string_view> choices) {
    add(name, member, commands, help).choices = std::move(choices);
  }
  void flag(std::string_view name, bool Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help);
  }
  void count(std::string_view name, std::int64_t Settings::*member, unsigned commands, std::string_view help,
             std::int64_t low = 1, std::int64_t high = 1'000'000'000) {
    auto& row = add(name, member, commands, help);
    row.low = static_cast<double>(low);
    row.high = static_cast<double>(high);
  }
  void positive(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    auto& row = add(name, member, commands, help);
    row.low = 0;
    row.low_excluded = true;
  }
  void non_negative(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    add(name, member, commands, help).low = 0;
  }
  void fraction(std::string_view name, double Settings::*member, unsigned commands, std::string_view help) {
    auto& row = add(name, member, commands, help);
    row.low = 0;
    row.high = 1;
    row.high_excluded = true;
  }

  std::string_view heading;  ///< of the rows that follow
  std::vector<Setting> rows;
};

/// out_dir, evaluations, and what is saved when.
void add_run(SettingsTable& table);
/// checkpoint and overwrite, of the heading before.
void add_start(SettingsTable& table);
/// Token files, and the text to prepare.
void add_data(SettingsTable& table);
/// How a text is split, and how sequences are drawn; of the heading before.
void add_batches(SettingsTable& table);
/// AdamW and its schedule.
void add_optimizer(SettingsTable& table);
/// Devices, element types, ranks and threads.
void add_ranks(SettingsTable& table);
/// Strategy, units, recomputation, offloading.
void add_sharding(SettingsTable& table);
/// Adapters and frozen layers.
void add_tuning(SettingsTable& table);
/// Samples while training, logs and traces.
void add_logs(SettingsTable& table);
/// Samples of `sample`.
void add_samples(SettingsTable& table);
/// `bench`.
void add_measurement(SettingsTable& table);
/// Output files of `export` and `report`.
void add_files(SettingsTable& table);

}  // namespace transformer
