// SPDX-License-Identifier: Apache-2.0
// Documents as lines of JSON.
#include "transformer/data/json_line.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/error.hpp"
#include "transformer/data/excerpt.hpp"
#include "transformer/tokenizer/utf8.hpp"

namespace transformer {
namespace {

using fsdp::checkpoint::JsonFault;

/// The column of the byte at `offset`, and what is wrong there.
std::string at_column(std::string_view line, std::size_t offset, std::string_view fault) {
  return fmt::format("column {}: {}", count_characters(line.substr(0, offset)) + 1, fault);
}

/// Offset of the first byte before `end` that is not part of a UTF-8 character; `end` if there is none.
std::size_t first_invalid(std::string_view line, std::size_t end) {
  std::size_t offset = 0;
  while (offset < end) {
    auto const character = utf8_at(line, offset);
    if (!character.valid) return offset;
    offset += character.length;
  }
  return end;
}

/// Offset of the escape \uD800 to \uDFFF that ends before `end` and is no pair; npos if there is none.
std::size_t lone_surrogate(std::string_view line, std::size_t end) {
  constexpr std::size_t length = 6;  // of an escape
  auto const surrogate = [&](std::size_t offset) {
    unsigned code = 0;
    auto const* const digits = line.data() + offset + 2;
    bool const whole = offset + length <= line.size() && line.substr(offset, 2) == "\\u" &&
                       std::from_chars(digits, digits + 4, code, 16).ptr == digits + 4;
    return whole && code >= 0xd800 && code <= 0xdfff;
  };
  // Behind the first half of a pair, the parser reads what may be the escape of the second half.
  for (auto const back : {length, length + 1, length + 2, 2 * length})
    if (back <= end && surrogate(end - back)) return end - back;
  return std::string_view::npos;
}

/// Offset of the escape in which the byte at `wrong` cannot stand; npos if that byte is not in an escape.
std::size_t wrong_escape(std::string_view line, std::size_t wrong) {
  if (line[wrong] != '"' && wrong > 0 && line[wrong - 1] == '\\') return wrong - 1;
  auto const unicode = line.substr(0, wrong).rfind("\\u");
  bool const inside = unicode != std::string_view::npos && wrong - unicode < 6 &&
                      line.substr(wrong, 1).find_first_of("0123456789abcdefABCDEF") == std::string_view::npos;
  return inside ? unicode : std::string_view::npos;
}

/// Words of other languages for values, each with the advice that a message gives.
struct ForeignWord {
  std::string_view word, advice;
};
constexpr std::array foreign_words{
    ForeignWord{"NaN", "NaN is not a value of JSON; expected a number or null"},
    ForeignWord{"nan", "nan is not a value of JSON; expected a number or null"},
    ForeignWord{"Infinity", "Infinity is not a value of JSON; expected a number or null"},
    ForeignWord{"-Infinity", "-Infinity is not a value of JSON; expected a number or null"},
    ForeignWord{"None", "None is not a value of JSON; expected null"},
    ForeignWord{"True", "True is not a value of JSON; expected true"},
    ForeignWord{"False", "False is not a value of JSON; expected false"},
    ForeignWord{"'", "a string begins with '; expected \""}};

std::string syntax_text(std::string_view line, JsonFault const& fault) {
  if (auto const invalid = first_invalid(line, std::min(fault.end, line.size()));
      invalid < fault.end && invalid < line.size())
    return at_column(line, invalid,
                     fmt::format("byte 0x{:02x} is not UTF-8", static_cast<unsigned char>(line[invalid])));
  if (fault.end > line.size()) return at_column(line, line.size(), "the line ends before its JSON object does");
  auto const wrong = fault.end - 1;
  auto const rest = line.substr(std::min(fault.token, wrong));
  auto const byte = static_cast<unsigned char>(line[wrong]);
  bool const is_blank = byte == '\t' || byte == '\r' || byte == '\n';
  if (byte < 0x20 && (!is_blank || rest.starts_with('"')))
    return at_column(
        line, wrong,
        fmt::format("the control character U+{:04X} is not allowed in JSON; a string has it as \\u{:04x}", byte, byte));
  if (rest.starts_with('"')) {
    if (auto const half = lone_surrogate(line, fault.end); half != std::string_view::npos)
      return at_column(line, half, fmt::format("the escape {} is half of a surrogate pair", line.substr(half, 6)));
    if (auto const escape = wrong_escape(line, wrong); escape != std::string_view::npos)
      return at_column(line, escape,
                       fmt::format("'{}' is not an escape of JSON", excerpt(line.substr(escape, wrong + 1 - escape))));
  }
  for (auto const& foreign : foreign_words)
    if (rest.starts_with(foreign.word)) return at_column(line, line.size() - rest.size(), foreign.advice);
  return at_column(line, line.size() - rest.size(), fmt::format("expected JSON, got '{}'", excerpt(rest)));
}

/// The keys of an object, for a message.
std::string keys_text(nlohmann::json const& object) {
  constexpr std::size_t most = 10;
  std::string text;
  std::size_t count = 0;
  for (auto const& item : object.items()) {
    if (count++ == most) return text + " and others";
    text += fmt::format("{}\"{}\"", text.empty() ? "" : ", ", excerpt(item.key()));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::string fault_text(std::string_view line, JsonFault const& fault) {
  switch (fault.kind) {
    case JsonFault::Kind::deep:
      return fmt::format("arrays and objects are nested more than {} deep", fsdp::checkpoint::deepest_json);
    case JsonFault::Kind::twice: return fmt::format("the key \"{}\" occurs twice in an object", excerpt(fault.name));
    case JsonFault::Kind::behind:
      return at_column(line, fault.token,
                       fmt::format("'{}' stands behind the end of the JSON value", excerpt(line.substr(fault.token))));
    case JsonFault::Kind::number:
      return at_column(
          line, fault.token,
          fmt::format("the number {} is too large", excerpt(line.substr(fault.token, fault.end - fault.token))));
    case JsonFault::Kind::syntax:
    case JsonFault::Kind::none: break;
  }
  return syntax_text(line, fault);
}

std::string document_of_line(std::string_view line, std::string_view file, std::int64_t number) {
  JsonFault fault;
  auto json = fsdp::checkpoint::parse_json<nlohmann::json>(line, fault);
  auto const refuse = [&](std::string_view why) {
    fsdp::fail<fsdp::ConfigError>("data: '{}', line {}{} {}", file, number, why.starts_with("column ") ? "," : ":",
                                  why);
  };
  if (fault.kind != JsonFault::Kind::none) refuse(fault_text(line, fault));
  if (!json.is_object())
    refuse(fmt::format("expected a JSON object with a string \"{}\", got {}", document_key,
                       json.is_array() ? "an array" : fmt::format("a value of type {}", json.type_name())));
  auto const found = json.find(document_key);
  if (found == json.end())
    refuse(fmt::format("the object has no key \"{}\"; its keys are: {}", document_key, keys_text(json)));
  if (!found->is_string())
    refuse(fmt::format("the value of \"{}\" is of type {}, expected a string", document_key, found->type_name()));
  return std::move(found->get_ref<std::string&>());
}

}  // namespace transformer
