// SPDX-License-Identifier: Apache-2.0
// Escapes foreign texts (names of folders, settings, units), so that none becomes markup or a script, or controls the
// terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace transformer::report {

/// For an element's text or a quoted attribute of HTML or SVG. Bytes that are not UTF-8, and characters that XML does
/// not have, become U+FFFD.
std::string escaped(std::string_view text);

/// As a JSON string within a script element, with its quotes.
std::string script_text(std::string_view text);

/// For a terminal. Control characters other than a tab and a line's end, and bytes that are not UTF-8, become \x1b and
/// the like: a name in a checkpoint cannot move the cursor, hide lines or set the terminal's title.
std::string printable(std::string_view text);

/// The first `most` characters; three dots stand for the rest. What is no UTF-8 counts by bytes.
std::string shortened(std::string_view text, std::size_t most);

}  // namespace transformer::report
