// SPDX-License-Identifier: Apache-2.0
// Members of JSON objects from untrusted files.
#pragma once

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

namespace transformer::report {

using Json = nlohmann::ordered_json;

/// `absent`, NaN unless told, where the object has no such number.
inline double number(Json const& object, char const* name, double absent = std::numeric_limits<double>::quiet_NaN()) {
  auto const found = object.find(name);
  return found != object.end() && found->is_number() ? found->get<double>() : absent;
}
/// Empty where the object has no such text.
inline std::string text(Json const& object, char const* name) {
  auto const found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

}  // namespace transformer::report
