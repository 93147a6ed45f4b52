// SPDX-License-Identifier: Apache-2.0
// A part of a file's text for a message.
#pragma once

#include <string>
#include <string_view>

namespace transformer {

/// The beginning of a text, at most 60 bytes: "..." stands for the rest, \x1b for a byte that does not print.
std::string excerpt(std::string_view text);

}  // namespace transformer
