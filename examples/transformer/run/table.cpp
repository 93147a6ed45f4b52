// SPDX-License-Identifier: Apache-2.0
#include "transformer/run/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/launch/program.hpp"
#include "transformer/run/config_files.hpp"
#include "transformer/run/read_number.hpp"

namespace transformer {
namespace {

std::string number_text(double value) { return fmt::format("{}", value); }

[[noreturn]] void reject(Setting const& setting, std::string_view text, std::string_view origin) {
  fsdp::fail<fsdp::ConfigError>("setting '{}': expected {}, got '{}' ({})", setting.name, setting.expected(), text,
                                origin);
}

bool in_range(Setting const& setting, double value) {
  return std::isfinite(value) && (setting.low_excluded ? value > setting.low : value >= setting.low) &&
         (setting.high_excluded ? value < setting.high : value <= setting.high);
}

struct Reader {
  Settings& settings;
  Setting const& setting;
  std::string_view text, origin;

  void operator()(bool Settings::*member) const {
    bool const yes = text == "true" || text == "True" || text == "1";
    bool const no = text == "false" || text == "False" || text == "0";
    if (!yes && !no) reject(setting, text, origin);
    settings.*member = yes;
  }
  void operator()(std::int64_t Settings::*member) const {
    std::int64_t value{};
    bool const word = !setting.word_for_zero.empty() && text == setting.word_for_zero;
    if ((!word && !read_number(text, value)) || !in_range(setting, static_cast<double>(value)))
      reject(setting, text, origin);
    settings.*member = value;
  }
  void operator()(double Settings::*member) const {
    double value{};
    if (!read_number(text, value) || !in_range(setting, value)) reject(setting, text, origin);
    settings.*member = value;
  }
  void operator()(std::string Settings::*member) const {
    if (text.empty() && !setting.may_be_empty) reject(setting, text, origin);
    if (!setting.choices.empty() && text != setting.refused_choice &&
        std::find(setting.choices.begin(), setting.choices.end(), text) == setting.choices.end())
      reject(setting, text, origin);
    settings.*member = std::string(text);
  }
};

struct Writer {
  Settings const& settings;
  Setting const& setting;
  std::string operator()(bool Settings::*member) const { return settings.*member ? "true" : "false"; }
  std::string operator()(std::int64_t Settings::*member) const {
    return settings.*member == 0 && !setting.word_for_zero.empty() ? std::string(setting.word_for_zero)
                                                                   : fmt::format("{}", settings.*member);
  }
  std::string operator()(double Settings::*member) const { return number_text(settings.*member); }
  std::string operator()(std::string Settings::*member) const {
    auto const& text = settings.*member;
    return text == "\n" ? "newline" : text;
  }
};

/// Letters to insert, drop, change or swap with their neighbour to make `b` of `a` (Damerau 1964, without overlaps).
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view blanks = " \t\r";
  auto const first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

/// A quoted text with Python's escapes; `rest` is what follows the closing quote.
std::string quoted_value(std::string_view text, std::string_view& rest, std::string_view where) {
  constexpr std::string_view names = "nrt0\\'\"", meant{"\n\r\t\0\\'\"", 7};
  std::string value;
  std::size_t at = 1;
  for (; at < text.size() && text[at] != text[0]; ++at) {
    if (text[at] != '\\' || at + 1 == text.size()) {
      value += text[at];
      continue;
    }
    auto const known = names.find(text[++at]);
    if (known == std::string_view::npos)
      fsdp::fail<fsdp::ConfigError>(
          "{}: expected one of the escapes \\n, \\r, \\t, \\0, \\\\, \\' and \\\", got '\\{}'", where, text[at]);
    value += meant[known];
  }
  if (at >= text.size()) fsdp::fail<fsdp::ConfigError>("{}: the quote {} is never closed", where, text.front());
  rest = text.substr(at + 1);
  return value;
}

/// The value of a product of whole numbers, as `5 * 8`; any other text unchanged.
std::string product_value(std::string_view text) {
  if (text.find('*') == std::string_view::npos) return std::string(text);
  std::int64_t product = 1;
  for (auto rest = text;;) {
    auto const star = rest.find('*');
    std::int64_t factor{};
    if (!read_number(trim(rest.substr(0, star)), factor) || __builtin_mul_overflow(product, factor, &product))
      return std::string(text);
    if (star == std::string_view::npos) return fmt::format("{}", product);
    rest.remove_prefix(star + 1);
  }
}

/// The value of a config line: quoted (to the closing quote) or plain (to a comment).
std::string line_value(std::string_view text, std::string_view where) {
  text = trim(text);
  if (text.empty() || (text.front() != '\'' && text.front() != '"'))
    return product_value(trim(text.substr(0, text.find('#'))));
  std::string_view rest;
  auto value = quoted_value(text, rest, where);
  rest = trim(rest);
  if (!rest.empty() && rest.front() != '#')
    fsdp::fail<fsdp::ConfigError>("{}: expected nothing after the closing quote, got '{}'", where, excerpt(rest));
  return value;
}

}  // namespace

std::string Setting::expected() const {
  if (std::holds_alternative<bool Settings::*>(member)) return "true or false";
  if (std::holds_alternative<std::string Settings::*>(member))
    return choices.empty() ? std::string(may_be_empty ? "a text" : "a text that is not empty")
                           : fmt::format("one of {}", fsdp::listed(choices));
  bool const whole = std::holds_alternative<std::int64_t Settings::*>(member);
  std::string words = whole ? "a whole number" : "a finite number";
  if (!word_for_zero.empty()) words = fmt::format("{} or {}", word_for_zero, words);
  if (std::isfinite(low))
    words +=
        low_excluded ? fmt::format(" above {}", number_text(low)) : fmt::format(" of at least {}", number_text(low));
  if (std::isfinite(high) && (!whole || high < 1e9))
    words += high_excluded ? fmt::format(" and below {}", number_text(high))
                           : fmt::format(" and at most {}", number_text(high));
  return words;
}

void Setting::copy(Settings const& from, Settings& to) const {
  std::visit([&](auto one) { to.*one = from.*one; }, member);
}

std::string Setting::text_of(Settings const& settings) const { return std::visit(Writer{settings, *this}, member); }

Setting const* find_setting(std::string_view name) {
  for (auto const& setting : all_settings())
    if (setting.name == name) return &setting;
  return nullptr;
}

NamedSetting find_named(std::string_view name) {
  if (auto const* const setting = find_setting(name)) return {setting, false};
  for (auto const& setting : all_settings())
    if (!name.empty() && setting.former_name == name) return {&setting, true};
  return {};
}

std::string NamedSetting::current(std::string_view value) const {
  std::int64_t number{};
  if (!by_former_name || !setting->former_is_negative || !read_number(value, number) || number == 0)
    return std::string(value);
  if (number < 0)
    fsdp::fail<fsdp::ConfigError>(
        "setting '{}': expected a whole number of at least 0, got '{}'; its present name is '{}'", setting->former_name,
        excerpt(value), setting->name);
  return fmt::format("-{}", number);
}

void note_former_name(Settings& settings, std::string_view name) {
  auto& names = settings.former_names;
  if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
}

std::vector<std::string> notes_on_former_names(Settings const& settings) {
  std::vector<std::string> notes;
  for (auto const& name : settings.former_names) {
    auto const& setting = *find_named(name).setting;
    notes.push_back(fmt::format("note: '{}' is now called '{}'{}", name, setting.name,
                                setting.former_is_negative
                                    ? fmt::format("; {}=N is {}=-N, all layers but the last N", name, setting.name)
                                    : std::string()));
  }
  return notes;
}

std::string_view name_of(Setting::Member member) {
  auto const& table = all_settings();
  return std::find_if(table.begin(), table.end(), [&](auto const& setting) { return setting.member == member; })->name;
}

std::string_view setting_of_weights() {
  auto const* const model = find_setting("model");
  return model != nullptr && model->exists_in(Command::train) ? "model" : "init_from";
}

std::string_view nearest_setting(std::string_view name, Command command) {
  std::string_view nearest;
  if (name.size() > 100) return nearest;  // a file of another kind, given as settings
  auto best = std::max<std::size_t>(1, name.size() / 3) + 1;
  for (auto const& setting : all_settings()) {
    if (!setting.exists_in(command)) continue;
    if (auto const distance = edit_distance(name, setting.name); distance < best)
      best = distance, nearest = setting.name;
  }
  return nearest;
}

void assign(Settings& settings, Setting const& setting, std::string_view text, std::string_view origin) {
  std::visit(Reader{settings, setting, text, origin}, setting.member);
  if (!settings.was_given(setting.name)) settings.given.emplace_back(setting.name);
}

void apply_environment(Settings& settings, Command command) {
  auto const apply = [&](char const* variable, std::string_view name) {
    auto const& setting = *find_setting(name);
    if (!setting.exists_in(command) || settings.was_given(setting.name)) return;
    if (char const* const text = std::getenv(variable); text != nullptr && *text != '\0')
      assign(settings, setting, text, variable);
  };
  apply("FSDP_TIMEOUT", "collective_timeout");
  apply("FSDP_PEAK_TFLOPS", "peak_tflops");
}

void apply_config_text(Settings& settings, std::string_view text, std::string_view label) {
  int number = 0;
  while (!text.empty()) {
    auto const end = std::min(text.find('\n'), text.size());
    auto const line = trim(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    auto const where = fmt::format("{}, line {}", label, ++number);
    if (line.empty() || line.front() == '#') continue;
    if (line.starts_with("import ")) continue;  // nanoGPT's finetune_shakespeare.py imports time for wandb_run_name
    auto const equals = line.find('=');
    if (equals == std::string_view::npos)
      fsdp::fail<fsdp::ConfigError>("{}: expected 'name = value' or a comment, got '{}'", where, excerpt(line));
    auto const name = trim(line.substr(0, equals));
    auto const found = find_named(name);
    if (found.setting == nullptr) {
      auto const nearest = nearest_setting(name, Command::train);
      fsdp::fail<fsdp::ConfigError>("{}: there is no setting '{}'{} (see {} train --help)", where, excerpt(name),
                                    nearest.empty() ? std::string() : fmt::format("; is '{}' meant?", nearest),
                                    program_name);
    }
    auto const text_of_value = line.substr(equals + 1);
    auto const value = name == "wandb_run_name" ? std::string(trim(text_of_value)) : line_value(text_of_value, where);
    if (found.by_former_name) note_former_name(settings, name);
    assign(settings, *found.setting, found.current(value), where);
  }
}

void apply_config_file(Settings& settings, std::string const& file) {
  std::error_code error;
  if (std::filesystem::is_regular_file(file, error)) {
    std::ifstream stream(file, std::ios::binary);
    std::string const text{std::istreambuf_iterator<char>(stream), {}};
    if (!stream) fsdp::fail<fsdp::ConfigError>("config file '{}' cannot be read", file);
    return apply_config_text(settings, text, file);
  }
  std::filesystem::path stem = std::filesystem::path(file).filename();
  if (stem.extension() == ".py") stem = stem.stem();
  std::vector<std::string_view> names;
  for (auto const& shipped : shipped_configs()) {
    if (stem == shipped.name) return apply_config_text(settings, shipped.text, file);
    names.push_back(shipped.name);
  }
  fsdp::fail<fsdp::ConfigError>("config '{}': no such file, and none of the built-in configs ({}) has this name", file,
                                fsdp::listed(names));
}

}  // namespace transformer
