// SPDX-License-Identifier: Apache-2.0
// Counts the races that ThreadSanitizer finds in a program whose tests look for them. Included by one source of the
// program. Without the sanitizer nothing is counted.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace standin::test {

inline std::atomic<int> races{0};
#if defined(__SANITIZE_THREAD__)
inline constexpr bool looks_for_races = true;
// The exit code is the tests': ThreadSanitizer, which runs after this, would make another one of its reports.
[[maybe_unused]] inline int const own_exit_code = ::on_exit(
    [](int code, void*) {
      std::fflush(nullptr);
      std::_Exit(code);
    },
    nullptr);
#else
inline constexpr bool looks_for_races = false;
#endif

/// Races that are found while `action` runs.
template <class Action>
int races_during(Action const& action) {
  int const before = races.load(std::memory_order_relaxed);
  action();
  return races.load(std::memory_order_relaxed) - before;
}

}  // namespace standin::test

#if defined(__SANITIZE_THREAD__)
extern "C" {
// Races that ThreadSanitizer finds are counted, not printed.
void __tsan_on_report(void*) { standin::test::races.fetch_add(1, std::memory_order_relaxed); }
char const* __tsan_default_options() { return "suppress_equal_stacks=0:suppress_equal_addresses=0:log_path=/dev/null"; }
}
#endif
