// SPDX-License-Identifier: Apache-2.0
// Documents as lines of JSON: reads the text of a line, or says why there is none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "fsdp/json.hpp"

namespace transformer {

/// The key of a document's text.
inline constexpr std::string_view document_key = "text";

/// Says what is wrong with a line that is not JSON, and in which column: characters, from 1.
/// @pre fault.kind is not none, and parse_json has given it for `line`
std::string fault_text(std::string_view line, fsdp::checkpoint::JsonFault const& fault);

/// The text of a document.
/// @param line    one line, without its end
/// @param file    its file, for messages
/// @param number  of the line in its file, from 1, for messages
/// @throws fsdp::ConfigError naming file, line, column and fault if the line is not a JSON object with a string "text"
std::string document_of_line(std::string_view line, std::string_view file, std::int64_t number);

}  // namespace transformer
