// SPDX-License-Identifier: Apache-2.0
// The program that this process runs.
#pragma once

#include <string_view>

namespace transformer {

/// The program's name in messages and in names of files and threads. `main` of any other program than nanogpt sets it
/// before anything else.
inline constinit std::string_view program_name = "nanogpt";

}  // namespace transformer
