// SPDX-License-Identifier: Apache-2.0
// Reads and writes hardware descriptions: lines `name = value`, where # begins a comment.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/kernels/math.hpp"
#include "fsdp/plan/hardware.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan {

namespace detail {

/// Range of a kind of values. Values outside of it would make times infinite or zero.
struct HardwareRange {
  double lowest, highest;
  std::string_view expected;
};
inline constexpr HardwareRange hardware_amount{1, 1e30, "a number from 1 to 1e30"};
inline constexpr HardwareRange hardware_fraction{1e-6, 1, "a number from 1e-6 to 1"};
inline constexpr HardwareRange hardware_seconds{0, 1e6, "a number from 0 to 1e6"};

/// A value of a hardware file: name, kind, range.
struct HardwareField {
  std::string_view name;
  double Hardware::*member;
  bool required;
  HardwareRange range;
};
inline constexpr std::array hardware_fields{
    HardwareField{"memory", &Hardware::memory, true, hardware_amount},
    HardwareField{"flops", &Hardware::flops, true, hardware_amount},
    HardwareField{"efficiency", &Hardware::efficiency, true, hardware_fraction},
    HardwareField{"memory_bandwidth", &Hardware::memory_bandwidth, true, hardware_amount},
    HardwareField{"node_bandwidth", &Hardware::node_bandwidth, true, hardware_amount},
    HardwareField{"network_bandwidth", &Hardware::network_bandwidth, true, hardware_amount},
    HardwareField{"node_latency", &Hardware::node_latency, true, hardware_seconds},
    HardwareField{"network_latency", &Hardware::network_latency, true, hardware_seconds},
    HardwareField{"launch", &Hardware::launch, true, hardware_seconds},
    HardwareField{"step_overhead", &Hardware::step_overhead, false, hardware_seconds},
    HardwareField{"jitter", &Hardware::jitter, false, hardware_seconds},
};
struct AlgorithmField {
  std::string_view name;
  Algorithm Hardware::*member;
};
inline constexpr std::array algorithm_fields{AlgorithmField{"all_gather", &Hardware::all_gather},
                                             AlgorithmField{"reduce_scatter", &Hardware::reduce_scatter},
                                             AlgorithmField{"all_reduce", &Hardware::all_reduce}};

constexpr std::string_view trimmed(std::string_view text) {
  constexpr std::string_view blanks = " \t\r";
  auto const first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

/// Reads a hardware file.
class HardwareReader {
 public:
  explicit HardwareReader(std::string_view label) : label_(label) {}

  Hardware read(std::string_view text) {
    while (!text.empty()) {
      auto const end = text.find('\n');
      ++line_;
      line(trimmed(text.substr(0, std::min(end, text.find('#')))));
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    if (!has_node_) missing("gpus_per_node");
    for (std::size_t i = 0; i < hardware_fields.size(); ++i)
      if (hardware_fields[i].required && !seen_[i]) missing(hardware_fields[i].name);
    return hardware_;
  }

 private:
  [[noreturn]] void missing(std::string_view what) const {
    fail<ConfigError>("{}: ends at line {} without a line '{} = VALUE'", label_, line_, what);
  }
  [[noreturn]] void refuse(std::string_view what, std::string_view expected, std::string_view got) const {
    fail<ConfigError>("{}: line {}: '{}': expected {}, got '{}'", label_, line_, what, expected, got);
  }
  void line(std::string_view text) {
    if (text.empty()) return;
    auto const equals = text.find('=');
    if (equals == std::string_view::npos)
      fail<ConfigError>("{}: line {}: expected 'name = value', got '{}'", label_, line_, text);
    auto const key = trimmed(text.substr(0, equals)), value = trimmed(text.substr(equals + 1));
    if (key == "gpus_per_node") return node(key, value);
    if (key == "shared_link") return link(key, value);
    for (auto const& field : algorithm_fields)
      if (key == field.name) return algorithm(field, value);
    for (std::size_t i = 0; i < hardware_fields.size(); ++i)
      if (key == hardware_fields[i].name) return number(i, value);
    fail<ConfigError>("{}: line {}: there is no value called '{}'", label_, line_, key);
  }
  void once(std::string_view key, bool& seen) const {
    if (seen) fail<ConfigError>("{}: line {}: '{}' is given twice", label_, line_, key);
    seen = true;
  }
  double parsed(std::string_view key, std::string_view expected, std::string_view value) const {
    double number{};
    auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc{} || end != value.data() + value.size() || !math::is_finite(number))
      refuse(key, expected, value);
    return number;
  }
  void number(std::size_t i, std::string_view value) {
    auto const& field = hardware_fields[i];
    auto const& range = field.range;
    once(field.name, seen_[i]);
    auto const number = parsed(field.name, range.expected, value);
    if (number < range.lowest || number > range.highest) refuse(field.name, range.expected, value);
    hardware_.*field.member = number;
  }
  void node(std::string_view key, std::string_view value) {
    once(key, has_node_);
    constexpr std::string_view expected = "a whole number from 1 to 1024";
    auto const number = parsed(key, expected, value);
    if (number < 1 || number > 1024 || number != std::floor(number)) refuse(key, expected, value);
    hardware_.gpus_per_node = static_cast<int>(number);
  }
  void link(std::string_view key, std::string_view value) {
    once(key, has_link_);
    if (value != "true" && value != "false") refuse(key, "true or false", value);
    hardware_.shared_link = value == "true";
  }
  void algorithm(AlgorithmField const& field, std::string_view value) {
    once(field.name, has_algorithm_[static_cast<std::size_t>(&field - algorithm_fields.data())]);
    for (std::size_t i = 0; i < algorithm_names.size(); ++i)
      if (value == algorithm_names[i]) {
        hardware_.*field.member = static_cast<Algorithm>(i);
        return;
      }
    refuse(field.name, "ring, tree or nccl", value);
  }

  std::string_view label_;
  Hardware hardware_;
  std::size_t line_ = 0;
  bool has_node_ = false, has_link_ = false;
  std::array<bool, algorithm_fields.size()> has_algorithm_{};
  std::array<bool, hardware_fields.size()> seen_{};
};

}  // namespace detail

/// @param label  what messages call the text: the name of its file
/// @throws ConfigError with the line, if a value is missing, outside of its range or unknown, or is given twice
[[gnu::cold]] inline Hardware read_hardware(std::string_view text, std::string_view label) {
  return detail::HardwareReader(label).read(text);
}

/// A value of a hardware file, as text.
struct HardwareValue {
  std::string_view name;
  double value;
};

/// The text of a hardware file with these values: lines that have one of them get the new one, others stay as they are,
/// and what has no line is appended. For programs that measure a part of a file.
[[gnu::cold]] inline std::string with_values(std::string_view text, std::vector<HardwareValue> const& values) {
  std::string result;
  std::vector<bool> written(values.size());
  auto const write = [&](std::size_t i) {
    result += formatted("{} = {}\n", values[i].name, values[i].value);
    written[i] = true;
  };
  while (!text.empty()) {
    auto const end = std::min(text.find('\n'), text.size());
    auto const line = text.substr(0, end);
    auto const key = detail::trimmed(line.substr(0, std::min(line.find('#'), line.find('='))));
    text.remove_prefix(std::min(end + 1, text.size()));
    std::size_t of = 0;
    while (of < values.size() && values[of].name != key) ++of;
    if (of == values.size() || written[of]) {
      if (of == values.size()) result.append(line) += '\n';
    } else {
      write(of);
    }
  }
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!written[i]) write(i);
  return result;
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::plan
