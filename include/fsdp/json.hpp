// SPDX-License-Identifier: Apache-2.0
// Untrusted JSON files: each field is read by name and type, and errors name the file and the field.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/detail/base/compiled.hpp"
#include "fsdp/detail/kernels/math.hpp"
#include "fsdp/error.hpp"

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

using Json = nlohmann::ordered_json;  ///< a JSON value whose objects keep the order of their names

/// The reason why a text is not JSON.
struct JsonFault {
  /// Reasons for which a text is refused.
  enum class Kind : unsigned char {
    none,    ///< the text is JSON
    syntax,  ///< `end` is one past the first wrong byte; beyond the text's size if the text ends too early
    behind,  ///< bytes follow the end of the value
    number,  ///< the number that ends at `end` is larger than a double
    twice,   ///< the name `name` occurs twice in an object
    deep     ///< arrays and objects are nested more than deepest_json deep
  };
  Kind kind = Kind::none;  ///< none: the text is JSON
  std::size_t end = 0;     ///< syntax, behind, number: offset one past the bytes at fault
  std::size_t token = 0;   ///< syntax, behind, number: offset of the string, number or word that ends at `end`
  std::string name{};      ///< twice: the name that an object has twice
};

inline constexpr std::size_t deepest_json = 64;  ///< levels of nested arrays and objects that parsers accept

namespace detail {

/// Offset of the string, number, word or character that ends at `end`, in a text that is JSON up to there.
std::size_t json_token(std::string_view text, std::size_t end);

/// Builds the value that nlohmann's parser reads, in time that is linear in the text but for the sorting of names:
/// nlohmann's own builder goes through all earlier members of an object or array after each object in it, if it is
/// given a callback, and an ordered_json through all earlier names of an object for each further one.
template <class J>
class JsonBuilder {
 public:
  explicit JsonBuilder(JsonFault& fault) : fault_(fault) {}
  J& value() { return value_; }

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(typename J::number_integer_t value) { return put(value); }
  bool number_unsigned(typename J::number_unsigned_t value) { return put(value); }
  bool number_float(typename J::number_float_t value, std::string const&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(typename J::binary_t&) { return false; }  // not in JSON
  bool start_object(std::size_t) { return open(J::object()); }
  bool end_object() {
    if constexpr (ordered) {
      std::vector<std::string_view> names;
      for (auto const& member : members()) names.emplace_back(member.first);
      std::sort(names.begin(), names.end());
      auto const twice = std::adjacent_find(names.begin(), names.end());
      if (twice != names.end()) return refuse_second(*twice);
    }
    return close();
  }
  bool start_array(std::size_t) { return open(J::array()); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if constexpr (ordered) {
      member_ = &members().emplace_back(name, nullptr).second;
      return true;
    } else {
      auto const [member, fresh] = members().emplace(name, nullptr);
      member_ = &member->second;
      return fresh || refuse_second(name);
    }
  }
  /// @param position  bytes that were read
  template <class Error>
  bool parse_error(std::size_t position, std::string const&, Error const& error) {
    constexpr int overflow = 406;
    bool const behind = open_.empty() && has_value_;
    fault_.kind = behind                 ? JsonFault::Kind::behind
                  : error.id == overflow ? JsonFault::Kind::number
                                         : JsonFault::Kind::syntax;
    fault_.end = position;
    return false;
  }

 private:
  using Members = typename J::object_t;  // of an object: a vector of names and values, or a map
  static constexpr bool ordered = requires(Members & members) { members.emplace_back("", nullptr); };

  Members& members() { return open_.back()->template get_ref<Members&>(); }
  bool refuse_second(std::string_view name) {
    fault_ = {JsonFault::Kind::twice, 0, 0, std::string(name)};
    return false;
  }
  bool put(J value) {
    place(std::move(value));
    return true;
  }
  bool open(J value) {
    open_.push_back(&place(std::move(value)));
    if (open_.size() > deepest_json) fault_.kind = JsonFault::Kind::deep;
    return open_.size() <= deepest_json;
  }
  bool close() {
    open_.pop_back();
    return true;
  }
  J& place(J value) {
    has_value_ = true;
    if (open_.empty()) return value_ = std::move(value);
    if (!open_.back()->is_array()) return *member_ = std::move(value);
    open_.back()->push_back(std::move(value));
    return open_.back()->back();
  }

  JsonFault& fault_;
  J value_;
  bool has_value_ = false;
  std::vector<J*> open_;  ///< arrays and objects around the place that is read, the innermost last
  J* member_ = nullptr;   ///< the innermost object's member whose name was read last
};

}  // namespace detail

/// Parses a text that is one JSON value and nothing else.
/// @tparam J      nlohmann::ordered_json; or nlohmann::json, which finds one name among many in logarithmic time, and
///                is a second type to compile
/// @param fault   why the text is refused
/// @return a discarded value if the text is refused
template <class J = Json>
J parse_json(std::string_view text, JsonFault& fault) {
  fault = {};
  // The parser takes a NUL for the end of its input.
  auto const readable = std::min(text.find('\0'), text.size());
  detail::JsonBuilder<J> builder(fault);
  bool const read = J::sax_parse(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(readable), &builder);
  if (readable < text.size() && (read || fault.end > readable))
    fault = {read ? JsonFault::Kind::behind : fault.kind, readable + 1, readable, {}};
  else if (fault.end > 0)
    fault.token = detail::json_token(text, std::min(fault.end, text.size()));
  if (fault.kind != JsonFault::Kind::none) return J(J::value_t::discarded);
  return std::move(builder.value());
}
/// Checks whether a text is JSON, without building a value.
template <class J = Json>
J parse_json(std::string_view text) {
  JsonFault fault;
  return parse_json<J>(text, fault);
}

/// Parses an object. Names that occur twice in an object are refused, nesting of more than deepest_json, and bytes
/// behind the object.
/// @tparam J    as parse_json
/// @param what  the text is, for messages: "'path'", "the header of 'path'"
/// @throws ConfigError
template <class J = Json>
J parse_object(std::string_view text, std::string_view what) {
  using Kind = JsonFault::Kind;
  if (text.empty() || text.front() != '{')
    fail<ConfigError>("{} does not begin with '{{': the file is damaged, or of another kind", what);
  JsonFault fault;
  auto object = parse_json<J>(text, fault);
  if (fault.kind == Kind::deep) fail<ConfigError>("{} is nested more than {} deep", what, deepest_json);
  if (fault.kind == Kind::twice) fail<ConfigError>("'{}' occurs twice in {}", fault.name, what);
  if (fault.kind == Kind::behind)
    fail<ConfigError>("{} has bytes behind the end of its JSON object, the first at offset {}: the file is damaged",
                      what, fault.token);
  if (fault.kind != Kind::none)
    fail<ConfigError>("{} is not a JSON object: the file is damaged, or of another kind", what);
  return object;
}

/// @param what  it is, for messages
/// @throws ConfigError if a value cannot be written as JSON and read again: infinities, texts that are not UTF-8,
/// nesting of more than 48
void expect_writable(Json const& value, std::string_view what, int depth = 0);

/// The fields of an object. @throws ConfigError, all of them, naming the field
class Fields {
 public:
  /// @param object  lives as long as this, and so does `what`
  Fields(Json const& object, std::string_view what);

  /// A whole number in [low, high].
  std::int64_t whole(char const* name, std::int64_t low, std::int64_t high) const;
  /// A number; NaN where there is null, for JSON has neither infinities nor NaN.
  double number(char const* name) const;
  bool flag(char const* name) const;         ///< a field that is true or false
  std::string text(char const* name) const;  ///< a field that is a string
  /// 16 hexadecimal digits.
  std::uint64_t checksum(char const* name) const { return checksum_from(text(name), name); }
  std::uint64_t checksum_from(std::string const& digits, char const* name) const;  ///< parses 16 hexadecimal digits
  Json const& array(char const* name) const;                                       ///< a field that is an array
  Json const& object(char const* name) const;                                      ///< a field that is an object
  bool has(char const* name) const { return object_.contains(name); }              ///< whether the field is there
  Json const& at(char const* name) const;                                          ///< a field of any type
  [[noreturn]] void wrong(char const* name, std::string_view expected) const;      ///< refuses the value of the field

 private:
  Json const& object_;
  std::string_view what_;
};

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#if FSDP_COMPILED
namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {
extern template Json parse_json(std::string_view, JsonFault&);
extern template Json parse_json(std::string_view);
extern template Json parse_object(std::string_view, std::string_view);
}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint
#endif

#if FSDP_CHECKPOINT_BODIES

namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint {

#if FSDP_COMPILED
template Json parse_json(std::string_view, JsonFault&);
template Json parse_json(std::string_view);
template Json parse_object(std::string_view, std::string_view);
#endif

FSDP_BODY std::size_t detail::json_token(std::string_view text, std::size_t end) {
  std::size_t begin = 0;
  bool in_string = false, in_word = false;
  for (std::size_t i = 0; i < end; ++i) {
    char const byte = text[i];
    if (in_string) {
      if (byte == '\\') ++i;
      in_string = byte != '"';
    } else if (std::string_view(" \t\r\n,:[]{}").find(byte) != std::string_view::npos) {
      if (!in_word || i + 1 < end) begin = i;  // a number or word may be wrong for what follows it
      in_word = false;
    } else {
      if (!in_word || byte == '"') begin = i;
      in_string = byte == '"';
      in_word = !in_string;
    }
  }
  return begin;
}

FSDP_BODY void expect_writable(Json const& value, std::string_view what, int depth) {
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

FSDP_BODY Fields::Fields(Json const& object, std::string_view what) : object_(object), what_(what) {
  if (!object.is_object()) fail<ConfigError>("{}: expected an object, got {}", what, object.type_name());
}

FSDP_BODY std::int64_t Fields::whole(char const* name, std::int64_t low, std::int64_t high) const {
  auto const& value = at(name);
  // Numbers above 2^63 are unsigned, and would wrap.
  bool const fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<std::uint64_t>() <= std::uint64_t(INT64_MAX));
  if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
    wrong(name, formatted("a whole number from {} to {}", low, high));
  return value.get<std::int64_t>();
}

FSDP_BODY double Fields::number(char const* name) const {
  auto const& value = at(name);
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) wrong(name, "a number");
  return value.get<double>();
}

FSDP_BODY bool Fields::flag(char const* name) const {
  if (!at(name).is_boolean()) wrong(name, "true or false");
  return at(name).get<bool>();
}

FSDP_BODY std::string Fields::text(char const* name) const {
  if (!at(name).is_string()) wrong(name, "a string");
  return at(name).get<std::string>();
}

FSDP_BODY std::uint64_t Fields::checksum_from(std::string const& digits, char const* name) const {
  if (digits.size() != 16 || digits.find_first_not_of("0123456789abcdef") != std::string::npos)
    wrong(name, "16 hexadecimal digits");
  return std::stoull(digits, nullptr, 16);
}

FSDP_BODY Json const& Fields::array(char const* name) const {
  if (!at(name).is_array()) wrong(name, "an array");
  return at(name);
}

FSDP_BODY Json const& Fields::object(char const* name) const {
  if (!at(name).is_object()) wrong(name, "an object");
  return at(name);
}

FSDP_BODY Json const& Fields::at(char const* name) const {
  auto const found = object_.find(name);
  if (found == object_.end()) fail<ConfigError>("{}: '{}' is missing", what_, name);
  return *found;
}

FSDP_BODY void Fields::wrong(char const* name, std::string_view expected) const {
  auto got = object_.contains(name) ? object_[name].dump(-1, ' ', false, Json::error_handler_t::replace) : "nothing";
  if (got.size() > 80) got = got.substr(0, 80) + "...";
  fail<ConfigError>("{}: '{}': expected {}, got {}", what_, name, expected, got);
}

}  // namespace fsdp::inline FSDP_VERSION_NAMESPACE::checkpoint

#endif
