// SPDX-License-Identifier: Apache-2.0
// Queries on the machine of this process.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace transformer {

/// This machine's name; "" if it has none.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

/// Bytes of memory that programs of this machine can still have, within the limit of this process's control group if it
/// has one.
inline std::int64_t available_host_bytes() {
  std::int64_t bytes = std::numeric_limits<std::int64_t>::max(), value = 0;
  std::ifstream info("/proc/meminfo");
  for (std::string word; info >> word;)
    if (word == "MemAvailable:" && info >> value) bytes = value * 1024;
  std::ifstream limit("/sys/fs/cgroup/memory.max"), used("/sys/fs/cgroup/memory.current");
  if (std::int64_t now = 0; limit >> value && used >> now) bytes = std::min(bytes, value - now);
  return bytes;
}

}  // namespace transformer
