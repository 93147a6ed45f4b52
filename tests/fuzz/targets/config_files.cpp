// SPDX-License-Identifier: Apache-2.0
// Any bytes as a config file, or as values of settings: refused with the place, or values that their own texts give
// again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.hpp"
#include "transformer/run/choices.hpp"
#include "transformer/run/config_files.hpp"
#include "transformer/run/table.hpp"

namespace transformer {
std::vector<ConfigFile> const& shipped_configs() {
  static std::vector<ConfigFile> const none;
  return none;
}
}  // namespace transformer

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  using namespace transformer;
  if (size == 0) return 0;
  std::string_view const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  auto const& settings = all_settings();
  auto const choice = data[0] % (settings.size() + 1);
  auto const text =
      choice == settings.size() ? std::string(rest) : std::string(settings[choice].name) + " = " + std::string(rest);
  Settings read;
  try {
    apply_config_text(read, text, "fuzz");
  } catch (fsdp::ConfigError const& error) {
    if (!std::string_view(error.what()).starts_with("fuzz, line ") &&
        !std::string_view(error.what()).starts_with("setting '"))
      std::abort();
    return 0;
  }
  for (auto const& name : read.given) {
    auto const& setting = *find_setting(name);
    auto const written = setting.text_of(read);
    if (written.empty() || written == "newline") continue;
    Settings again;
    assign(again, setting, written, "again");
    if (setting.text_of(again) != written) std::abort();
  }
  for (auto const command : {Command::train, Command::sample, Command::bench, Command::prepare}) {
    try {
      check_together(read, command, 2);
    } catch (fsdp::ConfigError const&) {
    }
  }
  return 0;
}
