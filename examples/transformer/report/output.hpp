// SPDX-License-Identifier: Apache-2.0
// Output files of pages and pictures.
#pragma once

#include <filesystem>
#include <string_view>

namespace transformer::report {

/// Writes a text under a name that the user has chosen. A plain file is there whole or keeps what it had; what a link
/// leads to, a pipe or a device is written in place.
/// @throws fsdp::ConfigError if it cannot be opened, fsdp::ResourceError if it cannot be written in place
void write_output(std::filesystem::path const& path, std::string_view text);

/// Writes a text to a file, which is there whole or keeps what it had. A link of that name is replaced, not followed.
/// @throws fsdp::ConfigError if it cannot be written
void replace_file(std::filesystem::path const& path, std::string_view text);

}  // namespace transformer::report
