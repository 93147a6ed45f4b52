// SPDX-License-Identifier: Apache-2.0
// A folder of cached results. A result that cannot be read or written counts as missing.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>

namespace transformer {

/// $XDG_CACHE_HOME/nanogpt, or ~/.cache/nanogpt, with the program's name; nothing where neither variable names a
/// folder.
std::optional<std::filesystem::path> cache_folder();

/// A file's JSON object; an empty object if there is no such file, or it holds anything else.
nlohmann::json read_answers(std::filesystem::path const& file) noexcept;

/// Replaces a file as a whole, and makes its folder.
/// @return whether it was written
bool write_answers(std::filesystem::path const& file, nlohmann::json const& answers) noexcept;

}  // namespace transformer
