// SPDX-License-Identifier: Apache-2.0
// What a process knows of the machine that it runs on.
#pragma once

#include <unistd.h>

#include <array>
#include <string>

namespace transformer {

/// This machine's name; "" if it has none.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace transformer
