// SPDX-License-Identifier: Apache-2.0
// Fields of a large untrusted JSON file. Messages name a field by its path: model.vocab.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/error.hpp"
#include "fsdp/json.hpp"
#include "transformer/data/excerpt.hpp"

namespace transformer {

/// A value, and where it stands. A field that is missing is null.
class JsonField {
 public:
  using Json =
      nlohmann::json;  // fsdp::checkpoint::Fields search an object from its beginning: too slow for vocabularies

  /// @param value  lives as long as this, and so does `file`
  /// @param file   is the file, for messages: "'path'"
  JsonField(Json const& value, std::string_view file, std::string path = {})
      : value_(&value), file_(file), path_(std::move(path)) {}

  JsonField operator[](std::string const& name) const {
    static Json const null;
    auto const found = value_->find(name);
    return {found == value_->end() ? null : *found, file_, path_.empty() ? name : path_ + "." + name};
  }
  Json const& value() const { return *value_; }
  std::string_view file() const { return file_; }
  std::string const& path() const { return path_; }
  bool none() const { return value_->is_null(); }
  bool is(Json const& other) const { return *value_ == other; }

  /// The elements of an array.
  std::vector<JsonField> elements() const {
    if (!value_->is_array()) wrong("an array");
    std::vector<JsonField> all;
    for (auto const& element : *value_) all.push_back({element, file_, fsdp::formatted("{}[{}]", path_, all.size())});
    return all;
  }
  std::string const& text() const {
    if (!value_->is_string()) wrong("a string");
    return value_->get_ref<std::string const&>();
  }
  /// The field "type" of an object.
  std::string const& type() const {
    if (!value_->is_object()) wrong("an object with a \"type\"");
    return (*this)["type"].text();
  }
  /// A flag that may be missing.
  bool flag(bool absent) const {
    if (none()) return absent;
    if (!value_->is_boolean()) wrong("true or false");
    return value_->get<bool>();
  }

  void expect(Json const& expected) const {
    if (*value_ != expected) wrong(expected.dump());
  }
  void expect_flag(bool expected, bool absent) const {
    if (flag(absent) != expected) wrong(expected ? "true" : "false");
  }
  /// @throws fsdp::ConfigError unless this is an object that has no other fields
  void expect_fields(std::initializer_list<std::string_view> names) const {
    if (!value_->is_object()) wrong("an object");
    for (auto const& item : value_->items())
      if (std::find(names.begin(), names.end(), item.key()) == names.end())
        (*this)[item.key()].wrong("no field of this name");
  }
  [[noreturn]] void wrong(std::string_view expected) const {
    fsdp::fail<fsdp::ConfigError>("{}: {}: expected {}, got {}", file_, path_.empty() ? "the file" : excerpt(path_),
                                  expected, none() ? std::string("nothing") : excerpt(value_->dump()));
  }

 private:
  Json const* value_;
  std::string_view file_;
  std::string path_;
};

/// Parses an object that is the whole text.
/// @throws fsdp::ConfigError if the text is something else, has a name twice, or is nested too deep
inline nlohmann::json parse_json_object(std::string_view text, std::string_view file) {
  using fsdp::checkpoint::JsonFault;
  JsonFault fault;
  auto json = fsdp::checkpoint::parse_json<nlohmann::json>(text, fault);
  if (fault.kind == JsonFault::Kind::deep)
    fsdp::fail<fsdp::ConfigError>("{}: expected JSON of at most {} levels, got more", file,
                                  fsdp::checkpoint::deepest_json);
  if (fault.kind == JsonFault::Kind::twice)
    fsdp::fail<fsdp::ConfigError>("{}: '{}' occurs twice in an object", file, excerpt(fault.name));
  if (fault.kind == JsonFault::Kind::behind)
    fsdp::fail<fsdp::ConfigError>("{}: expected nothing behind the JSON object, got '{}' at byte {}", file,
                                  excerpt(text.substr(fault.token)), fault.token);
  if (!json.is_object())
    fsdp::fail<fsdp::ConfigError>("{}: expected a JSON object, got '{}'; the file is cut, damaged, or of another kind",
                                  file, excerpt(text));
  return json;
}

}  // namespace transformer
