// SPDX-License-Identifier: Apache-2.0
// Any bytes, and good lines with changes, as a line of JSON or as a file whose form is asked for: refused by line and
// column, in a message that a terminal may print, or read as nlohmann's own reader reads them.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/error.hpp"
#include "tests/fuzz/targets/changed.hpp"
#include "transformer/data/input_file.hpp"
#include "transformer/data/json_line.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace json_lines {

void demand(bool holds) {
  if (!holds) std::abort();
}

std::optional<std::string> read_otherwise(std::string_view line) {
  if (line.find('\0') != std::string_view::npos) return std::nullopt;
  auto const json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) return std::nullopt;
  return json["text"].get<std::string>();
}

void read(std::string_view line) {
  auto const otherwise = read_otherwise(line);
  try {
    demand(transformer::document_of_line(line, "f", 1) == otherwise);
  } catch (fsdp::ConfigError const& error) {
    std::string_view const message = error.what();
    demand(message.starts_with("data: 'f', line 1"));
    demand(message.size() < 1000 && std::none_of(message.begin(), message.end(),
                                                 [](unsigned char byte) { return byte < 0x20 || byte == 0x7f; }));
    auto const says = [&](std::string_view part) { return message.find(part) != std::string_view::npos; };
    demand(!otherwise || says("occurs twice") || says("nested more than"));
    constexpr std::string_view column = "data: 'f', line 1, column ";
    if (!message.starts_with(column)) return;
    auto const number = std::strtoul(message.data() + column.size(), nullptr, 10);
    demand(number >= 1 && number <= transformer::count_characters(line) + 1);
  }
}

void ask_for_form(std::string const& bytes) {
  static auto const path = std::filesystem::path("/dev/shm") / ("fsdp-fuzz-form-" + std::to_string(::getpid()));
  std::ofstream(path, std::ios::binary) << bytes;
  try {
    static_cast<void>(transformer::form_of_file(path, "x"));
  } catch (fsdp::ConfigError const&) {
  }
  std::filesystem::remove(path);
}

}  // namespace json_lines

extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {
  static std::string const good =
      R"({"id": -1.5e3, "tags": ["a", null, true, {"b": {}}], "text": "\ud83d\ude00 \"\u00e9\n\\ )"
      "\xc3\xa9\"} ";
  if (size == 0) return 0;
  std::string const rest(reinterpret_cast<char const*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0: json_lines::read(rest); break;
    case 1: json_lines::read(fsdp::testing::changed(good, rest)); break;
    default: json_lines::ask_for_form(rest);
  }
  return 0;
}
