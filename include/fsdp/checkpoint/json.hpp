// SPDX-License-Identifier: Apache-2.0
// JSON files that nobody trusts: every field is asked for by name and type, and what is wrong is said with the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/kernels/math.hpp"

namespace fsdp::checkpoint {

using Json = nlohmann::ordered_json;

/// Parses an object. Names that occur twice in an object are refused, and nesting of more than 64.
/// @param what  the text is, for messages: "'path'", "the header of 'path'"
/// @throws ConfigError
inline Json parse_object(std::string_view text, std::string_view what) {
  constexpr int deepest = 64;
  std::vector<std::set<std::string>> names;
  std::string twice;
  bool deep = false;
  auto const watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > deepest) deep = true;
    if (event == Json::parse_event_t::object_start) names.emplace_back();
    if (event == Json::parse_event_t::object_end) names.pop_back();
    if (event == Json::parse_event_t::key && !names.back().insert(value.get<std::string>()).second)
      twice = value.get<std::string>();
    return depth <= deepest;
  };
  if (text.empty() || text.front() != '{')
    fail<ConfigError>("{} does not begin with '{{': the file is damaged, or of another kind", what);
  auto object = Json::parse(text, watch, false);
  if (deep) fail<ConfigError>("{} is nested more than {} deep", what, deepest);
  if (object.is_discarded() || !object.is_object())
    fail<ConfigError>("{} is not a JSON object: the file is damaged, or of another kind", what);
  if (!twice.empty()) fail<ConfigError>("'{}' occurs twice in {}", twice, what);
  return object;
}

/// @param what  it is, for messages
/// @throws ConfigError if a value cannot be written as JSON and read again: infinities, texts that are not UTF-8,
/// nesting of more than 48
inline void expect_writable(Json const& value, std::string_view what, int depth = 0) {
  if (depth > 48) fail<ConfigError>("{} is nested more than 48 deep", what);
  if (value.is_number_float() && !math::is_finite(value.get<double>()))
    fail<ConfigError>("{} has a number that is not finite, which JSON cannot represent", what);
  if (value.is_binary() || value.is_discarded()) fail<ConfigError>("{} has a value that JSON cannot represent", what);
  if (value.is_structured())
    for (auto const& item : value.items())
      expect_writable(item.value(), value.is_object() ? formatted("{}: '{}'", what, item.key()) : std::string(what),
                      depth + 1);
  if (depth > 0) return;
  try {
    static_cast<void>(value.dump());
  } catch (Json::exception const& error) {
    fail<ConfigError>("{} has a string that is not UTF-8: {}", what, error.what());
  }
}

/// The fields of an object. @throws ConfigError, all of them, naming the field
class Fields {
 public:
  /// @param object  lives as long as this, and so does `what`
  Fields(Json const& object, std::string_view what) : object_(object), what_(what) {
    if (!object.is_object()) fail<ConfigError>("{}: expected an object, got {}", what, object.type_name());
  }

  /// A whole number in [low, high].
  std::int64_t whole(char const* name, std::int64_t low, std::int64_t high) const {
    auto const& value = at(name);
    // What exceeds 2^63 is unsigned, and would wrap.
    bool const fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<std::uint64_t>() <= std::uint64_t(INT64_MAX));
    if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
      wrong(name, formatted("a whole number from {} to {}", low, high));
    return value.get<std::int64_t>();
  }
  /// A number; NaN where there is null, for JSON has neither infinities nor NaN.
  double number(char const* name) const {
    auto const& value = at(name);
    if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (!value.is_number()) wrong(name, "a number");
    return value.get<double>();
  }
  bool flag(char const* name) const {
    if (!at(name).is_boolean()) wrong(name, "true or false");
    return at(name).get<bool>();
  }
  std::string text(char const* name) const {
    if (!at(name).is_string()) wrong(name, "a string");
    return at(name).get<std::string>();
  }
  /// 16 hexadecimal digits.
  std::uint64_t checksum(char const* name) const { return checksum_from(text(name), name); }
  std::uint64_t checksum_from(std::string const& digits, char const* name) const {
    if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
      wrong(name, "16 hexadecimal digits");
    return std::stoull(digits, nullptr, 16);
  }
  Json const& array(char const* name) const {
    if (!at(name).is_array()) wrong(name, "an array");
    return at(name);
  }
  Json const& object(char const* name) const {
    if (!at(name).is_object()) wrong(name, "an object");
    return at(name);
  }
  bool has(char const* name) const { return object_.contains(name); }
  Json const& at(char const* name) const {
    auto const found = object_.find(name);
    if (found == object_.end()) fail<ConfigError>("{}: '{}' is missing", what_, name);
    return *found;
  }
  [[noreturn]] void wrong(char const* name, std::string_view expected) const {
    auto got = object_.contains(name) ? object_[name].dump(-1, ' ', false, Json::error_handler_t::replace) : "nothing";
    if (got.size() > 80) got = got.substr(0, 80) + "...";
    fail<ConfigError>("{}: '{}': expected {}, got {}", what_, name, expected, got);
  }

 private:
  Json const& object_;
  std::string_view what_;
};

}  // namespace fsdp::checkpoint
