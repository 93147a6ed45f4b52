// SPDX-License-Identifier: Apache-2.0
// Numbers in texts.
#pragma once

#include <charconv>
#include <string_view>
#include <system_error>

namespace transformer {

/// @return whether the whole text, with or without a plus sign, is a number that fits
template <class Number>
bool read_number(std::string_view text, Number& value) {
  if (!text.empty() && text.front() == '+') text.remove_prefix(1);
  auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size();
}

}  // namespace transformer
