// SPDX-License-Identifier: Apache-2.0
// For tests that count the calls of CUDA's libraries: differences, and what a step of training does without.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tests/standin/runtime/runtime.hpp"

namespace standin::test {

/// Calls after `before`.
inline Counts difference(Counts const& now, Counts const& before) {
  Counts result;
  for (auto const& [name, count] : now) {
    auto const earlier = before.find(name);
    auto const more = count - (earlier == before.end() ? 0 : earlier->second);
    if (more != 0) result[name] = more;
  }
  return result;
}

/// Whether a call makes or ends something, or waits for the device; not the wait for an event, which a step has to
/// account for by itself.
inline bool costs(std::string_view name) {
  for (std::string_view const word :
       {"Malloc", "Alloc", "Free", "Create", "Destroy", "Register", "Init", "Split", "Finalize", "Synchronize"}) {
    if (name.find(word) != std::string_view::npos) return name != "cudaEventSynchronize";
  }
  return name == pageable_copies;
}

/// "2 cudaMalloc, 1 cudaFree".
inline std::string text_of(Counts const& counts) {
  std::string text;
  for (auto const& [name, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + std::string(name);
  return text;
}
/// Calls after `before` that are expensive.
inline std::string costly(Counts const& counts) {
  Counts some;
  for (auto const& entry : counts) {
    if (costs(entry.first)) some.insert(entry);
  }
  return text_of(some);
}

/// How many calls of CUDA's libraries these are, but for those that ask which device is current.
inline std::int64_t calls_in(Counts const& counts) {
  std::int64_t sum = 0;
  for (auto const& [name, count] : counts) {
    bool const own = name.substr(0, 9) == "standin::" || name == host_waits || name == pageable_copies;
    if (!own && name != "cudaGetDevice") sum += count;
  }
  return sum;
}

}  // namespace standin::test
