// SPDX-License-Identifier: Apache-2.0
// The shipped config files, compiled into the binary.
#pragma once

#include <string_view>
#include <vector>

namespace transformer {

struct ConfigFile {
  std::string_view name;
  std::string_view text;
};

/// The program's files, by name. Each program defines them.
std::vector<ConfigFile> const& shipped_configs();

}  // namespace transformer
