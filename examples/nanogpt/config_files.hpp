// SPDX-License-Identifier: Apache-2.0
// The shipped config files, compiled into the binary.
#pragma once

#include <string_view>
#include <vector>

namespace nanogpt {

struct ConfigFile {
  std::string_view name;
  std::string_view text;
};

/// Every file of examples/nanogpt/configs, by name.
std::vector<ConfigFile> const& shipped_configs();

}  // namespace nanogpt
