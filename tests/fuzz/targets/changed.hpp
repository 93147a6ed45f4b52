// SPDX-License-Identifier: Apache-2.0
// A good text, changed a little as a fuzzer says.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace fsdp::testing {

/// Each four bytes of `changes` say what becomes of one place: another byte, one byte more, or one less.
inline std::string changed(std::string text, std::string_view changes) {
  for (; changes.size() >= 4 && !text.empty(); changes.remove_prefix(4)) {
    auto const byte = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<unsigned char>(changes[i])); };
    auto const place = (byte(0) << 8 | byte(1)) % text.size();
    if (byte(2) % 3 == 0) text[place] = changes[3];
    if (byte(2) % 3 == 1) text.insert(text.begin() + static_cast<std::ptrdiff_t>(place), changes[3]);
    if (byte(2) % 3 == 2) text.erase(text.begin() + static_cast<std::ptrdiff_t>(place));
  }
  return text;
}

}  // namespace fsdp::testing
