// SPDX-License-Identifier: Apache-2.0
// Texts of exceptions.
#pragma once

#include <string>

#include "fsdp/error.hpp"

namespace fsdp::testing {

/// The text of the error, of this type, that `call` throws.
template <class Failure = Error, class Call>
std::string what(Call&& call) {
  try {
    call();
  } catch (Failure const& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// The text of the UsageError that `call` throws; "" if there is none.
template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (UsageError const& error) {
    return error.what();
  }
  return {};
}

inline bool has(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

}  // namespace fsdp::testing
